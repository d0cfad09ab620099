"""The draft phase: a drafter and a growth policy make a tree."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from specdec.protocols import Drafter, Growth
from specdec.rows import Rows
from specdec.stats import Stopwatch
from specdec.tree import DraftTree, Layer


def draft(
    drafter: Drafter, growth: Growth, rows: Rows, watch: Stopwatch, fit: Callable[[Layer], Layer]
) -> tuple[DraftTree, int]:
    """Grows one tree for every row until no node wants to be expanded or no row has room for another level.

    Args:
        fit: what is done to each layer before it joins; `Layer.narrow` outside of graphs.
    Returns:
        The tree to verify, and how many draft forwards it took.
    """
    tree = DraftTree(rows.roots, growth.capacity)
    nodes, forwards = tree.root, 0
    while nodes.shape[1] and tree.depth < rows.max_room:
        with watch("draft"):
            logits = drafter.expand(rows, tree, nodes)
        with watch("build"):
            layer = fit(_with_room(growth.grow(tree, nodes, logits, rows.noise), rows, tree.depth))
            nodes = tree.append(layer, drafter.target_ids)
        forwards += 1
    with watch("build"):
        return growth.finish(tree), forwards


def _with_room(layer: Layer, rows: Rows, depth: int) -> Layer:
    """Rows that end sooner than others take no nodes below their last level."""
    if len(rows) == 1:
        return layer
    room = rows.room > depth
    return replace(layer, count=layer.count * room, expand_count=layer.expand_count * room)
