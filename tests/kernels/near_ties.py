"""The one excuse for another candidate: from raw logits, two log-sums differ in their last bits."""

from __future__ import annotations

import numpy as np
import torch


def ulp(value: float) -> float:
    """The spacing of fp32 at this magnitude."""
    return float(np.spacing(np.float32(abs(value))))


def near(a: float, b: float) -> bool:
    """Within 4 ulp. All parts of a path log-probability have one sign, so none is larger than their sum."""
    return a == b or abs(a - b) <= 4 * ulp(max(abs(a), abs(b)))


def assert_same_ranking(found: list[int], expected: list[int], exact: torch.Tensor, threshold: float = -np.inf) -> None:
    """Two rankings of one pool are the same but for near-ties.

    Args:
        found, expected: pool indices in order of rank.
        exact: [n] fp64 scores of the pool.
        threshold: fp64, what a score has to reach to be kept.
    """
    assert len(set(found)) == len(found), "no candidate twice"
    for mine, theirs in zip(found, expected, strict=False):
        assert mine == theirs or near(float(exact[mine]), float(exact[theirs])), (mine, theirs)
    shorter = min(len(found), len(expected))
    for extra in found + expected if shorter == 0 else found[shorter:] + expected[shorter:]:
        assert near(float(exact[extra]), threshold), f"{extra} is not on the threshold"
