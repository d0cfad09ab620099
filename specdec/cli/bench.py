"""`specdec bench`: the ops against the torch ops that they replace."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specdec.cli import options as cli

if TYPE_CHECKING:
    import torch

    from specdec.evaluation.ops.measure import Case

app = typer.Typer(no_args_is_help=True, help="Time the ops against what they replace; every result is checked first.")

Vocab = Annotated[
    list[int] | None, typer.Option(help="Size of the vocabulary; may be repeated. Default: five models'.")
]
Dtype = Annotated[str | None, typer.Option(help="Of the inputs. Default: float32 on a CPU, else bfloat16.")]
Threads = Annotated[int, typer.Option(help="Threads that torch may use; the ops use one.")]
Seconds = Annotated[float, typer.Option(help="How long to repeat each shape.")]
Quick = Annotated[bool, typer.Option("--quick", help="Few shapes and few repeats: does it run?")]


@app.command()
def tree_build(
    vocab: Vocab = None,
    alpha: Annotated[list[float] | None, typer.Option(help="Zipf's exponent; may be repeated.")] = None,
    parents: Annotated[int, typer.Option(help="Nodes whose children are chosen from.")] = 10,
    budget: Annotated[int, typer.Option(help="Children at most.")] = 60,
    mu: Annotated[
        float, typer.Option(help="The gate: a child has at least mu times the best one's probability.")
    ] = 0.03,
    dtype: Dtype = None,
    device: cli.Device = None,
    threads: Threads = 1,
    seconds: Seconds = 1.0,
    quick: Quick = False,
    as_json: cli.Json = False,
) -> None:
    """Choose a layer of a draft tree, and whole trees, against EAGLE's two top-k and TALON's nonzero in torch ops."""
    cli.quiet()
    from specdec.evaluation.ops import tree_build as bench
    from specdec.evaluation.ops import whole_trees

    place, kind, *_ = cli.all_of(
        lambda: _device(device),
        lambda: _dtype(dtype, device),
        lambda: _all_within("--vocab", vocab or [], bench.EAGLE_TOP_K, 2**18),
        lambda: _all_within("--parents", [parents], 1, 256),
        lambda: _all_within("--budget", [budget], 1, 256),
        lambda: _all_within("--mu", [mu], 0, 1),
    )
    vocabularies = vocab or bench.VOCABULARIES[: 1 if quick else None]
    alphas = alpha or (bench.ALPHAS[1:2] if quick else bench.ALPHAS)
    notes = ["whole trees left out: --quick"] if quick else []

    def cases() -> Iterator[Case]:
        yield from bench.cases(vocabularies, alphas, parents, budget, mu, kind, place)
        if not quick:
            try:
                yield whole_trees.case(whole_trees.record("smollm2", budget, mu), budget, mu)
            except cli.USER_ERRORS as error:
                notes.append(f"whole trees left out, as smollm2 is not here: {error}")

    _run(cases(), place, threads, seconds, quick, as_json, notes)


@app.command()
def margin(
    vocab: Vocab = None,
    nodes: Annotated[int, typer.Option(help="Rows of logits.")] = 61,
    dtype: Dtype = None,
    device: cli.Device = None,
    threads: Threads = 1,
    seconds: Seconds = 2.0,
    quick: Quick = False,
    as_json: cli.Json = False,
) -> None:
    """See how sure a model is at every node, against softmax with top-2, top-2 alone, and max, mask, max."""
    cli.quiet()
    from specdec.evaluation.ops import margin as bench
    from specdec.evaluation.ops.tree_build import VOCABULARIES

    place, kind, *_ = cli.all_of(
        lambda: _device(device),
        lambda: _dtype(dtype, device),
        lambda: _all_within("--vocab", vocab or [], 2, 2**18),
        lambda: _all_within("--nodes", [nodes], 1, 1024),
    )
    vocabularies = vocab or VOCABULARIES[: 1 if quick else None]
    _run(bench.cases(vocabularies, nodes, kind, place), place, threads, seconds, quick, as_json)


@app.command()
def attention(
    queries: Annotated[list[int] | None, typer.Option(help="Nodes of the tree; may be repeated.")] = None,
    prefix: Annotated[list[int] | None, typer.Option(help="Entries before the tree; may be repeated.")] = None,
    model: Annotated[
        list[str] | None, typer.Option(help="Whose heads: Llama-3-8B, Qwen3-32B; may be repeated.")
    ] = None,
    dtype: Dtype = None,
    device: cli.Device = None,
    threads: Threads = 1,
    seconds: Seconds = 1.0,
    quick: Quick = False,
    as_json: cli.Json = False,
) -> None:
    """Attend to a prefix and a draft tree, against SDPA with a dense mask, FlashInfer, flash-attn (a GPU's bench)."""
    cli.quiet()
    from specdec.evaluation.ops import attention as bench

    models = model or list(bench.HEADS)[: 1 if quick else None]
    place, kind, *_ = cli.all_of(
        lambda: _device(device),
        lambda: _dtype(dtype, device),
        lambda: _all_within("--queries", queries or [], 1, 1024),
        lambda: _all_within("--prefix", prefix or [], 0, 2**17),
        lambda: _known("--model", models, bench.HEADS),
    )
    small = quick or place.type == "cpu"
    notes = []
    if place.type == "cpu":
        notes.append("on a CPU the op is torch's own fused attention (SDPA), so only small shapes; time it on a GPU")
    asked: Sequence[int] = queries or ((1, 16, 61) if small else bench.QUERIES)
    behind: Sequence[int] = prefix or ((512, 2048) if small else bench.PREFIXES)
    if quick:
        asked, behind = asked[:2], behind[:1]
    _run(bench.cases(asked, behind, models, kind, place), place, threads, seconds, quick, as_json, notes)


def _run(
    cases: Iterable[Case],
    device: torch.device,
    threads: int,
    seconds: float,
    quick: bool,
    as_json: bool,
    notes: Sequence[str] = (),
) -> None:
    """Measures, prints, and exits with 1 if a result was wrong."""
    from specdec.cli import report
    from specdec.evaluation.ops.measure import measure
    from specdec.evaluation.setting import machine

    cli.at_least("--threads", threads, 1)
    with _threads(threads), report.stderr.status("timing …") as status:
        made = machine(device)
        found = measure(cases, 0.05 if quick else seconds, lambda name: status.update(f"timing {name} …"))
    told: dict[str, Any] = {"machine": made, "rows": found.rows, "notes": [*notes, *found.notes], "wrong": found.wrong}
    if as_json:
        cli.print_json(told)
    else:
        report.print_bench(told)
    if found.wrong:
        raise typer.Exit(1)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _device(given: str | None) -> torch.device:
    from specdec.loading import choose_device

    return choose_device(given)


def _dtype(given: str | None, device: str | None) -> torch.dtype:
    import torch

    names = ("float32", "bfloat16", "float16")
    if given is None:
        return torch.float32 if _device(device).type == "cpu" else torch.bfloat16
    _known("--dtype", [given], names)
    return getattr(torch, given)


def _known(name: str, given: Iterable[str], known: Iterable[str]) -> None:
    for value in given:
        if value not in known:
            raise ValueError(f"{name} is {value!r}; expected one of {', '.join(known)}")


def _all_within(name: str, given: Iterable[float], least: float, most: float) -> None:
    for value in given:
        if not least <= value <= most:
            raise ValueError(f"{name} is {value}; expected a number from {least} to {most}")
