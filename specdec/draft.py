"""The draft phase: a drafter and a growth policy make a tree."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from specdec.protocols import Drafter, Growth
from specdec.rows import Rows
from specdec.stats import Stopwatch
from specdec.tree import DraftTree, Layer


def draft(
    drafter: Drafter, growth: Growth, rows: Rows, watch: Stopwatch, fit: Callable[[Layer], Layer]
) -> tuple[DraftTree, int]:
    """Grows one tree for every row until no node wants to be expanded or no row has room for another level.

    Args:
        fit: what is done to each layer before it joins; see `narrow`.
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
            _check_capacity(tree, layer, growth)
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


def _check_capacity(tree: DraftTree, layer: Layer, growth: Growth) -> None:
    """Of one row, whose columns all exist; rows of a batch have different widths, which the host does not read."""
    if len(layer.count) == 1 and tree.size + layer.token.shape[1] > tree.capacity:
        raise ValueError(
            f"{type(growth).__name__} grew a tree of {tree.size + layer.token.shape[1]} nodes, the root included, but "
            f"its capacity is {tree.capacity}; raise the capacity, or grow fewer"
        )


def narrow(layer: Layer) -> Layer:
    """Cuts a layer's columns to those that exist in some row: reads two numbers, saves the padding's work."""
    width, expanded = torch.stack((layer.count, layer.expand_count)).max(dim=1).values.tolist()
    return Layer(
        layer.parent[:, :width],
        layer.token[:, :width],
        layer.score[:, :width],
        layer.count,
        layer.expand[:, :expanded],
        layer.expand_count,
    )
