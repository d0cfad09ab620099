"""Times ops and their peers on the same inputs, in turns; there is no figure where a result is wrong.

On a CPU the call before the timed one leaves the inputs in cache, as the head that has just written them would, and
the minimum counts: what else runs on the machine only adds. On a GPU the calls lie in a CUDA graph over copies of the
inputs that are larger than the L2 cache together, so each finds it cold, and the median counts; a peer that waits for
the host cannot be captured and is timed with its wait.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

OURS = "ours"
_CALLS = 20  # in a graph, at least: its own launch is shared by them


@dataclass(frozen=True)
class Case:
    """One shape of a benchmark.

    Attributes:
        shape: what the shape is, for the row.
        inputs: the arguments of every contender.
        contenders: name -> function of the inputs; `OURS` and its peers. They leave the inputs as they were.
        check: raises AssertionError if the results, by name, are not right.
        bytes: what has to be read and written at least.
        waits: contenders that wait for the host.
    """

    shape: Mapping[str, Any]
    inputs: tuple[Any, ...]
    contenders: Mapping[str, Callable[..., Any]]
    check: Callable[[Mapping[str, Any]], None]
    bytes: int
    waits: frozenset[str] = frozenset()

    @property
    def device(self) -> torch.device:
        return next((x.device for x in self.inputs if isinstance(x, Tensor)), torch.device("cpu"))

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self.shape.items())


@dataclass
class Report:
    """Rows of the cases whose check passed; what was wrong, and what was left out, in words."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


def measure(cases: Iterable[Case], seconds: float, step: Callable[[str], None] = lambda _: None) -> Report:
    """A row for every case: its shape, `<name>_ms` and `<name>_median_ms` of all, `ratio_<peer>` = peer / ours.

    Args:
        seconds: how long to repeat each case; never less than 5 turns.
        step: called with each case's name before it runs.
    """
    report = Report()
    for case in cases:
        step(str(case))
        try:
            contenders = verified(case, report)
        except AssertionError as error:
            report.wrong.append(f"{case}: {error or 'a wrong result'}")
            continue
        report.rows.append({**case.shape, **_times(case, contenders, seconds)})
    return report


@torch.inference_mode()
def verified(case: Case, report: Report | None = None) -> dict[str, Callable[..., Any]]:
    """The contenders that run here, ours first, after the check of their results.

    Raises:
        AssertionError: a result is wrong.
    """
    results = {OURS: case.contenders[OURS](*case.inputs)}
    for name, run in case.contenders.items():
        if name == OURS:
            continue
        try:
            results[name] = run(*case.inputs)
        except (RuntimeError, ImportError, NotImplementedError, ValueError) as error:
            if report is not None:
                report.note(f"{name} left out: {str(error).splitlines()[0]}")
    case.check(results)
    return {name: case.contenders[name] for name in results}


@torch.inference_mode()
def _times(case: Case, contenders: Mapping[str, Callable[..., Any]], seconds: float) -> dict[str, Any]:
    samplers = {name: _sampler(case, name, run) for name, run in contenders.items()}
    times: dict[str, list[float]] = {name: [] for name in samplers}
    end = time.perf_counter() + seconds
    while len(times[OURS]) < 5 or time.perf_counter() < end:
        for name, sample in samplers.items():
            times[name].append(sample())
    on_gpu = case.device.type == "cuda"
    row: dict[str, Any] = {"bytes": case.bytes}
    for name, own in times.items():
        row[f"{name}_ms"] = median(own) if on_gpu else min(own)
        row[f"{name}_median_ms"] = median(own)
    row |= {f"ratio_{name}": row[f"{name}_ms"] / row["ours_ms"] for name in times if name != OURS}
    if on_gpu:
        row["limit_ms"] = 1000 * case.bytes / copy_bandwidth(case.device)
        row["times_limit"] = row["ours_ms"] / row["limit_ms"]
    return row


def _sampler(case: Case, name: str, run: Callable[..., Any]) -> Callable[[], float]:
    """Gives the milliseconds of one call each time that it is called."""
    if case.device.type != "cuda":

        def timed() -> float:
            run(*case.inputs)
            begin = time.perf_counter()
            run(*case.inputs)
            return 1000 * (time.perf_counter() - begin)

        return timed

    copies = cold_copies(case.inputs, case.bytes, case.device)
    calls = [copies[i % len(copies)] for i in range(max(_CALLS, len(copies)))]
    if name not in case.waits:
        return graph_sampler([partial(run, *args) for args in calls])

    def waited() -> float:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for args in calls:
            run(*args)
        torch.cuda.synchronize()
        return 1000 * (time.perf_counter() - begin) / len(calls)

    return waited


def cold_copies(inputs: tuple[Any, ...], size: int, device: torch.device) -> list[tuple[Any, ...]]:
    """Enough copies of the inputs that a round over them leaves nothing of the first in L2."""
    count = 1 + 2 * torch.cuda.get_device_properties(device).L2_cache_size // size
    return [tuple(x.clone() if isinstance(x, Tensor) else x for x in inputs) for _ in range(max(count, 2))]


def graph_sampler(calls: list[Callable[[], Any]]) -> Callable[[], float]:
    """Captures the calls in one CUDA graph; each sample replays it and gives the milliseconds a call."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls[:3]:  # what is compiled or allocated once
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def sample() -> float:
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / len(calls)

    return sample


@cache
def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second that a large copy reads and writes: what this GPU can reach."""
    source = torch.empty(2**30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    sample = graph_sampler([lambda: target.copy_(source)] * 4)
    return 2 * source.numel() / (min(sample() for _ in range(10)) / 1000)
