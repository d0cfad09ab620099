"""`specdec`: a table from name to typed function. Heavy imports happen inside, so that help is instant."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from specdec.cli import bench, train
from specdec.cli import options as cli

app = typer.Typer(cls=cli.Commands, no_args_is_help=True, pretty_exceptions_enable=False, add_completion=False)
app.add_typer(train.app, name="train")
app.add_typer(bench.app, name="bench")


@app.callback()
def specdec(
    version: Annotated[bool, typer.Option("--version", callback=cli.version, is_eager=True, help="Tell it.")] = False,
    traceback: Annotated[bool, typer.Option("--traceback", help="Show where an error comes from.")] = False,
) -> None:
    """Speculative decoding: the same text as your model alone, in fewer passes."""


@app.command()
def generate(
    prompt: Annotated[str | None, typer.Argument(help="The text; - or nothing: read it from standard input.")] = None,
    target: cli.Target = "smollm2",
    draft: cli.Draft = None,
    method: Annotated[str, typer.Option(help="How to draft; `specdec methods` lists them.")] = "talon",
    max_new_tokens: Annotated[int, typer.Option(help="The most tokens to add.")] = 128,
    temperature: cli.Temperature = 0.0,
    top_p: cli.TopP = 1.0,
    top_k: cli.TopK = 0,
    seed: cli.Seed = 0,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends the answer; may be repeated.")] = None,
    options: Annotated[list[str] | None, typer.Option("--set", help="An option of the method: key=value.")] = None,
    raw: cli.Raw = False,
    exact: Annotated[bool, typer.Option("--exact", help="Refuse a method that is not lossless.")] = False,
    color: Annotated[bool, typer.Option("--color", help="Drafted tokens green, the verifier's own plain.")] = False,
    as_json: cli.Json = False,
    device: cli.Device = None,
    dtype: cli.Dtype = None,
) -> None:
    """Continue a prompt, or answer it if the tokenizer has a chat template; the text streams as it comes."""
    cli.quiet()
    from specdec import load
    from specdec.cli import report
    from specdec.sampling import Sampler

    text, own, *_ = cli.all_of(
        lambda: cli.read_prompt(prompt),
        lambda: cli.method_options(method, options or []),
        lambda: Sampler(temperature, top_k, top_p),
        lambda: cli.at_least("--max-new-tokens", max_new_tokens, 1),
    )
    with cli.status(f"loading {target}"):
        decoder = load(target, draft=draft, method=method, device=device, dtype=dtype, exact=exact, **own)
    chat = decoder.tokenizer is not None and decoder.tokenizer.chat_template is not None and not raw
    law: dict[str, Any] = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "seed": seed}
    turn = [{"role": "user", "content": text}] if chat else text
    pieces = decoder.stream(turn, max_new_tokens=max_new_tokens, stop=stop or (), **law)
    output = report.stream(pieces, None if as_json else sys.stdout, decoder.tokenizer if color else None)
    if as_json:
        cli.print_json(report.output_json(output))
    else:
        report.stderr.print(report.output_line(output), style="dim")


@app.command()
def compare(
    target: cli.Target = "smollm2",
    draft: cli.Draft = None,
    methods: Annotated[str, typer.Option(help="Names, separated by commas.")] = "ar,sd,eagle3,talon",
    prompts: Annotated[Path | None, typer.Option(help="JSON lines with `turns` or `prompt`; default: our own.")] = None,
    limit: Annotated[int | None, typer.Option(help="Use only the first so many prompts.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens per prompt.")] = 128,
    temperature: cli.Temperature = 0.0,
    top_p: cli.TopP = 1.0,
    top_k: cli.TopK = 0,
    seed: cli.Seed = 0,
    options: Annotated[list[str] | None, typer.Option("--set", help="method.key=value; may be repeated.")] = None,
    factors: Annotated[bool, typer.Option("--factors", help="Measure what each part is worth (CPU).")] = False,
    raw: cli.Raw = False,
    as_json: cli.Json = False,
    device: cli.Device = None,
    dtype: cli.Dtype = None,
) -> None:
    """Run methods side by side, and plain transformers beside them: speed, acceptance, and is the text the same?"""
    cli.quiet()
    from specdec.cli import report
    from specdec.evaluation import compare as engine
    from specdec.evaluation import setting
    from specdec.request import Request

    chosen, texts, request, _ = cli.all_of(
        lambda: cli.options_by_method(methods, options or []),
        lambda: setting.read_prompts(prompts, limit),
        lambda: Request(max_new_tokens, temperature, top_k, top_p, seed),
        lambda: cli.at_least("--max-new-tokens", max_new_tokens, 2),  # the first belongs to the prefill
    )
    with cli.status(f"loading {target}"):
        lineup = engine.line_up(target, chosen, draft, device, dtype, factors)
        ids = lineup.encode(texts, raw)
    machine = setting.machine(lineup.target.device)
    with report.progress(engine.total_runs(lineup.contenders, ids)) as step:
        results = engine.compare(lineup.contenders, ids, request, lineup.judge, step)
    found = report.comparison(machine, target, ids, request, results)
    if as_json:
        cli.print_json(found)
    else:
        report.print_comparison(found)


@app.command()
def methods(as_json: cli.Json = False) -> None:
    """List the methods, what they need and their options."""
    cli.quiet()
    from specdec import METHODS
    from specdec.cli import report

    if as_json:
        cli.print_json(report.methods_json(METHODS))
    else:
        report.print_methods(METHODS)


@app.command()
def doctor(
    target: cli.Target = "smollm2",
    draft: cli.Draft = None,
    remeasure: Annotated[bool, typer.Option("--remeasure", help="Measure the cost curve again.")] = False,
    as_json: cli.Json = False,
    device: cli.Device = None,
    dtype: cli.Dtype = None,
) -> None:
    """Tell what will run here and why: device, dtype, forward pass, versions, node budget and its cost curve."""
    cli.quiet()
    from specdec.cli import report
    from specdec.cli.diagnosis import diagnose

    with cli.status(f"examining {target}"):
        found = diagnose(target, draft, device, dtype, remeasure)
    if as_json:
        cli.print_json(found)
    else:
        report.print_diagnosis(found)
    raise typer.Exit(1 if found["problems"] else 0)
