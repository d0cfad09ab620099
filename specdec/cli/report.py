"""What the commands show. Results go to standard output; progress, remarks and errors to standard error."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from itertools import groupby, takewhile
from typing import Any, TextIO

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from transformers import PreTrainedTokenizerBase

from specdec.evaluation.compare import Result
from specdec.evaluation.compare import factors as factors_of
from specdec.evaluation.exactness import TIE
from specdec.methods import Method
from specdec.request import Request
from specdec.stats import Output
from specdec.streaming import Piece, TextStream

stderr = Console(stderr=True)


def _stdout() -> Console:
    """Made when needed: tests and callers replace sys.stdout."""
    console = Console(file=sys.stdout, highlight=False)
    return console if console.is_terminal else Console(file=sys.stdout, highlight=False, width=120)


# --- generate --------------------------------------------------------------------------------------------------------


def stream(pieces: Iterable[Piece], out: TextIO | None, color_by: PreTrainedTokenizerBase | None = None) -> Output:
    """Consumes a stream, writing to `out` as it comes.

    Args:
        color_by: the tokenizer, to write accepted draft tokens in green and the verifier's own plainly.
    """
    text = TextStream(color_by)
    output = None
    for piece in pieces:
        output = piece.output
        if out is None:
            continue
        if color_by is None:
            out.write(piece.text)
        else:
            drafted = min(len(piece.round.path), len(piece.tokens))
            if accepted := text.push(piece.tokens[:drafted], last=False):
                out.write(typer.style(accepted, fg="green"))
            out.write(text.push(piece.tokens[drafted:], last=output.finish_reason is not None))
        out.flush()
    if out is not None:
        out.write("\n")
    assert output is not None, "a stream of at least one token has a piece"
    return output


def output_json(output: Output) -> dict[str, Any]:
    names = ("text", "tokens", "finish_reason", "exact", "method")
    return {**{name: getattr(output, name) for name in names}, "summary": output.summary()}


def output_line(output: Output) -> str:
    """One line: `talon: 96 tokens (length), tau 2.31, delta 1.80, 30.1 tokens/s`."""
    told = output.summary()
    parts = [f"{output.method}: {len(output.tokens)} tokens ({output.finish_reason})"]
    parts += [f"{name} {told[name]:.2f}" for name in ("tau", "delta") if told[name] is not None]
    if told["tokens_per_second"]:
        parts.append(f"{told['tokens_per_second']:.1f} tokens/s")
    return ", ".join(parts)


# --- compare ---------------------------------------------------------------------------------------------------------


@contextmanager
def progress(total: int) -> Iterator[Callable[[str], None]]:
    """A bar on standard error; call what it gives with a name before each step."""
    columns = (TextColumn("{task.description:<28}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=stderr, transient=True, disable=not stderr.is_terminal) as bar:
        task = bar.add_task("", total=total)
        done = -1

        def step(name: str) -> None:
            nonlocal done
            done += 1
            bar.update(task, description=name, completed=done)

        yield step


def comparison(
    machine: dict[str, Any],
    target: str,
    prompts: Sequence[list[int]],
    request: Request,
    results: Sequence[Result],
) -> dict[str, Any]:
    """All of a comparison as one object for JSON."""
    found: dict[str, Any] = {
        "machine": machine,
        "target": target,
        "prompts": len(prompts),
        "request": asdict(request),
        "results": [asdict(result) for result in results],
    }
    if factors := factors_of(results):
        found["factors"] = factors
    return found


def print_comparison(found: Mapping[str, Any]) -> None:
    console = _stdout()
    machine, request = found["machine"], found["request"]
    console.print(
        f"{found['target']}: {found['prompts']} prompt(s), {request['max_new_tokens']} new tokens each, "
        f"temperature {request['temperature']:g}; {machine['processor']}, {machine['threads']} threads, "
        f"torch {machine['torch']}, transformers {machine['transformers']}, load average {machine['load_average']}",
        style="dim",
        soft_wrap=True,
    )
    table = _table("method", "tau", "delta", "tokens/s", "vs ar", "vs HF", "identical", right=range(1, 6))
    for row in found["results"]:
        table.add_row(
            row["method"],
            _number(row["tau"]),
            _number(row["delta"]),
            _number(row["tokens_per_second"], 1),
            _number(row["speedup_vs_ar"], 2, "×"),
            _number(row["speedup_vs_hf"], 2, "×"),
            _identical(row),
            style="dim" if row["kind"] != "method" else None,
        )
    console.print(table)
    for row in found["results"]:
        if row["identical"] is False:
            first = next(one for one in row["differences"] if one["gap"] is None or one["gap"] >= TIE)
            gap = "of another length, or an excluded token" if first["gap"] is None else f"{first['gap']:.1e} below"
            console.print(f"{row['method']}: prompt {first['prompt']}, new token {first['position']} differs: {gap}")
    if factors := found.get("factors"):
        names = ("loop", "lean_forward", "packing", "speculation", "whole")
        parts = _table("speed-up over transformers", *(name.replace("_", " ") for name in names), right=range(1, 6))
        for method, ratios in factors.items():
            parts.add_row(method, *(_number(ratios[name], 2, "×") for name in names))
        console.print(parts)


def _identical(row: Mapping[str, Any]) -> str:
    if row["identical"] is None:
        return "–"
    ties = f", {row['ties']} tie{'s' if row['ties'] > 1 else ''}" if row["ties"] else ""
    return f"yes{ties}" if row["identical"] else "[red]no[/red]"


# --- bench -----------------------------------------------------------------------------------------------------------


def print_bench(found: Mapping[str, Any]) -> None:
    """The rows of a bench of ops, a table for each set of peers."""
    console = _stdout()
    machine, wrong, notes = found["machine"], found["wrong"], found["notes"]
    on_cpu = machine["device"] == "cpu"
    console.print(
        f"{machine['processor'] if on_cpu else machine['device']}, {machine['threads']} thread(s), torch "
        f"{machine['torch']}, load average {machine['load_average']}; milliseconds, "
        f"{'least of many (median)' if on_cpu else 'median, in a CUDA graph with cold L2'}; × how many times ours",
        style="dim",
        soft_wrap=True,
    )
    for peers, group in groupby(found["rows"], key=bench_peers):
        rows = list(group)
        shape = bench_shape(rows[0])
        names = ["ours", *(name for peer in peers for name in (peer, "×")), *(() if on_cpu else ("limit", "×"))]
        table = _table(*shape, *names, right=range(len(shape), len(shape) + len(names)))
        for row in rows:
            cells = [f"{row[name]:g}" if isinstance(row[name], float) else str(row[name]) for name in shape]
            cells.append(_ms(row, "ours", on_cpu))
            for peer in peers:
                cells += [_ms(row, peer, on_cpu), f"{row[f'ratio_{peer}']:.1f}"]
            if not on_cpu:
                cells += [f"{row['limit_ms']:.4f}", f"{row['times_limit']:.1f}"]
            table.add_row(*cells)
        console.print(table)
    for line in notes:
        console.print(line, style="dim", markup=False)
    for line in wrong:
        stderr.print(f"wrong: {line}", style="red", markup=False)


def bench_peers(row: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(name.removeprefix("ratio_") for name in row if name.startswith("ratio_"))


def bench_shape(row: Mapping[str, Any]) -> list[str]:
    """The names of what describes the shape: all before the times."""
    return list(takewhile(lambda name: name != "bytes", row))


def _ms(row: Mapping[str, Any], name: str, on_cpu: bool) -> str:
    if on_cpu:
        return f"{row[f'{name}_ms']:.3f} ({row[f'{name}_median_ms']:.3f})"
    return f"{row[f'{name}_ms']:.4f}"


# --- methods and doctor ----------------------------------------------------------------------------------------------


def methods_json(methods: Mapping[str, Method]) -> dict[str, Any]:
    names = ("description", "lossless", "needs", "options")
    return {name: {key: getattr(method, key) for key in names} for name, method in methods.items()}


def print_methods(methods: Mapping[str, Method]) -> None:
    table = _table("method", "what it does", "lossless", "needs", "options (--set key=value)")
    for name, method in methods.items():
        options = ", ".join(f"{key}={value}" for key, value in method.options.items())
        table.add_row(name, method.description, "yes" if method.lossless else "no", method.needs, options)
    console = _stdout()
    console.print(table)
    console.print("On a CPU, tree sizes that are not given follow from the measured cost: specdec doctor", style="dim")


def print_diagnosis(found: Mapping[str, Any]) -> None:
    """Sections of a diagnosis, one line a fact; the cost curve as a table."""
    console = _stdout()
    facts = Table.grid(padding=(0, 2))
    for section in ("versions", "machine", "target", "draft", "ops", "caches"):
        for name, value in found[section].items():
            facts.add_row(f"[bold]{section}[/bold]", name, str(value))
            section = ""
    console.print(facts)
    if cost := found["cost"]:
        table = _table("nodes", *cost["verify_ms"], right=range(1, 1 + len(cost["verify_ms"])))
        times = cost["verify_ms"].values()
        table.add_row("T(n), ms", *(f"{ms:.1f}" for ms in times))
        table.add_row("T(n) / T(1)", *(f"{ms / next(iter(times)):.2f}" for ms in times))
        console.print(table)
        console.print(cost["why"])
    for name, given in found["methods"].items():
        console.print(f"{name}: {given}", style="dim")
    for kind, style in (("warnings", "yellow"), ("problems", "red")):
        for line in found[kind]:
            console.print(f"{kind[:-1]}: {line}", style=style, markup=False)


def _table(*columns: str, right: Iterable[int] = ()) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for index, name in enumerate(columns):
        table.add_column(name, justify="right" if index in right else "left")
    return table


def _number(value: float | None, digits: int = 2, unit: str = "") -> str:
    return "–" if value is None else f"{value:.{digits}f}{unit}"
