"""Counting which child the target took."""

from __future__ import annotations

from dataclasses import dataclass

from specdec.evaluation.acceptance import rank_counts


@dataclass
class FakeRound:
    tree: dict
    path: list[int]


def test_ranks_are_counted_where_the_target_went() -> None:
    tree = {"parents": [-1, 0, 0, 2, 2], "scores": [0.0, -2.0, -1.0, -1.5, -1.2]}
    took_best_then_second = FakeRound(tree, [2, 3])
    took_nothing = FakeRound(tree, [])
    visits, taken = rank_counts([took_best_then_second, took_nothing], ranks=2)
    assert visits == 2
    assert taken == [1, 0], "of the root's children; the tree below it is there only where the draft was unsure"


def test_narrow_nodes_do_not_count() -> None:
    """A missing child would look like a refused one."""
    assert rank_counts([FakeRound({"parents": [-1, 0], "scores": [0.0, -1.0]}, [1])], ranks=2) == (0, [0, 0])
