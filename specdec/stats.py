"""What a generation did and where its time went."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from specdec.tree import DraftTree

PHASES = ("draft", "build", "verify", "commit", "host")


class Stopwatch:
    """Adds up the seconds of named phases; on CUDA it waits for the device at each end, elsewhere it costs nothing.

    Waiting changes what is measured, so on CUDA the split is off unless asked for, and `host` holds all the time.
    """

    def __init__(self, device: torch.device, synchronize: bool = False):
        self._cuda = device.type == "cuda"
        self._off = self._cuda and not synchronize
        self.restart()

    def restart(self) -> None:
        self._split = dict.fromkeys(PHASES, 0.0)
        self._start = time.perf_counter()

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        if self._off:
            yield
            return
        begin = self._now()
        yield
        self._split[phase] += self._now() - begin

    def lap(self) -> dict[str, float]:
        """Seconds by phase since the last lap; `host` is what no other phase has claimed."""
        split, start = self._split, self._start
        self.restart()
        split["host"] = self._start - start - sum(split.values())
        return split

    def _now(self) -> float:
        if self._cuda:
            torch.cuda.synchronize()
        return time.perf_counter()


@dataclass(frozen=True)
class Round:
    """One row's view of one draft-verify-commit round.

    Attributes:
        tokens: ids that the round emitted (cut at the end of the text).
        path: accepted tree nodes, from depth 1 on, before that cut.
        nodes: size of the verified tree, the root included.
        draft_forwards, verify_forwards: model calls of the round (one for all rows of a batch).
        split: seconds by phase (`PHASES`), of the whole batch.
    """

    tokens: list[int]
    path: list[int]
    nodes: int
    draft_forwards: int
    verify_forwards: int
    split: dict[str, float]
    _tree: DraftTree = field(repr=False)
    _row: int = field(repr=False)

    @cached_property
    def tree(self) -> dict[str, list]:
        """`tokens`, `parents`, `depths`, `scores` (path log-probability) of the verified tree; node 0 is the root."""
        names = ("tokens", "parents", "depths", "scores")
        return {name: getattr(self._tree, name)[self._row, : self.nodes].tolist() for name in names}


@dataclass
class Output:
    """The text of one prompt.

    Attributes:
        tokens: new ids, an end-of-text id included; text: those ids decoded, without special tokens.
        finish_reason: `eos`, `stop` (a stop string), `length` (max_new_tokens) or `context` (the model's limit).
        rounds: what happened, the prefill first.
        exact: whether the method that made it is lossless.
        seconds: wall time from the prompt to the last token, the whole batch's.
    """

    prompt_tokens: list[int]
    method: str
    exact: bool
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    rounds: list[Round] = field(default_factory=list)
    seconds: float = 0.0
    plain_step_seconds: float | None = None

    def summary(self) -> dict[str, Any]:
        """tau, delta, c, R_model and the rest, in the TALON paper's letters (arXiv 2601.07353, section 3.3).

        The prefill is left out of everything but `prefill_seconds` and the counts of tokens.
            tau: tokens per verification, the bonus included.
            delta: draft forwards per verification.
            c: time of one draft forward over that of one verification.
            R_model: predicted speed-up over plain decoding, tau * T(1) / (T_verify + delta * T_draft), where T(1) is
                the measured time of a plain step; tau / (1 + c * delta) where no plain step was measured.
            r_t: target forwards per generated token.
            split: seconds by phase.
        """
        decode = self.rounds[1:]
        emitted = sum(len(r.tokens) for r in decode)
        verifications = sum(r.verify_forwards for r in decode)
        drafts = sum(r.draft_forwards for r in decode)
        split = {phase: sum(r.split[phase] for r in decode) for phase in PHASES}
        seconds = sum(split.values())
        summary: dict[str, Any] = {
            "method": self.method,
            "exact": self.exact,
            "tokens": len(self.tokens),
            "prompt_tokens": len(self.prompt_tokens),
            "rounds": len(decode),
            "target_forwards": verifications,
            "draft_forwards": drafts,
            "mean_nodes": _ratio(sum(r.nodes for r in decode), len(decode)),
            "tau": _ratio(emitted, verifications),
            "delta": _ratio(drafts, verifications),
            "r_t": _ratio(verifications, emitted),
            "c": _ratio(_ratio(split["draft"], drafts), _ratio(split["verify"], verifications)),
            "tokens_per_second": _ratio(emitted, seconds),
            "prefill_seconds": sum(self.rounds[0].split.values()) if self.rounds else None,
            "decode_seconds": seconds,
            "split": split,
        }
        summary["R_model"] = self._predicted(summary, verifications)
        return summary

    def _predicted(self, summary: dict[str, Any], verifications: int) -> float | None:
        if summary["tau"] is None:
            return None
        if self.plain_step_seconds is None:
            return summary["tau"] / (1 + (summary["c"] or 0.0) * summary["delta"])
        spent = (summary["split"]["draft"] + summary["split"]["verify"]) / verifications
        return summary["tau"] * self.plain_step_seconds / spent if spent else None


def _ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a is not None and b else None
