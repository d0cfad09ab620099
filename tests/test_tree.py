"""The draft tree against lists: every append, placement and renumbering, for rows that differ."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec.tree import DraftTree, Layer

pytestmark = pytest.mark.usefixtures("one_thread")


@dataclass
class Node:
    token: int
    parent: int
    depth: int
    score: float
    slot: int = -1


class ListTree:
    """One row, in Python: the same operations, slowly."""

    def __init__(self, root: int):
        self.nodes = [Node(root, -1, 0, 0.0, 0)]
        self.slots = [0]  # which node lies at which slot; -1 = padding

    def path(self, node: int) -> list[int]:
        """The node and its ancestors."""
        return [] if node < 0 else [node, *self.path(self.nodes[node].parent)]


@st.composite
def growths(draw):
    """What up to three rows do: per layer and row (parents, tokens, expanded columns), parents in the frontier."""
    rows, layers = draw(st.integers(1, 3)), draw(st.integers(0, 4))
    frontier, count, script = [[0] for _ in range(rows)], [1] * rows, []
    for _ in range(layers):
        layer = []
        for row in range(rows):
            children = draw(st.integers(0, 3)) if frontier[row] else 0
            parents = sorted(draw(st.sampled_from(frontier[row])) for _ in range(children))
            tokens = [draw(st.integers(0, 9)) for _ in parents]
            expand = sorted(draw(st.sets(st.integers(0, children - 1)))) if children else []
            layer.append((parents, tokens, expand))
            frontier[row] = [count[row] + column for column in expand]
            count[row] += children
        script.append(layer)
    return rows, script


def padded(lists, pad=0) -> torch.Tensor:
    width = max((len(x) for x in lists), default=0)
    return torch.tensor([[*x, *[pad] * (width - len(x))] for x in lists], dtype=torch.long).view(len(lists), width)


def build(rows, script) -> tuple[DraftTree, list[ListTree]]:
    """Runs a script on both, and compares every frontier and placement on the way."""
    capacity = 1 + sum(max(len(tokens) for _, tokens, _ in layer) for layer in script)
    tree = DraftTree(torch.arange(rows) + 50, capacity)
    lists = [ListTree(50 + row) for row in range(rows)]
    for layer in script:
        frontier = tree.append(
            Layer(
                parent=padded([parents for parents, _, _ in layer]),
                token=padded([tokens for _, tokens, _ in layer]),
                score=-padded([tokens for _, tokens, _ in layer]).float(),
                count=torch.tensor([len(tokens) for _, tokens, _ in layer]),
                expand=padded([expand for _, _, expand in layer]),
                expand_count=torch.tensor([len(expand) for _, _, expand in layer]),
            ),
            target_ids=lambda draft_ids: draft_ids + 100,
        )
        expected = []
        for mine, (parents, tokens, expand) in zip(lists, layer, strict=True):
            first = len(mine.nodes)
            for parent, token in zip(parents, tokens, strict=True):
                mine.nodes.append(Node(token + 100, parent, mine.nodes[parent].depth + 1, -float(token)))
            expected.append([first + column for column in expand])
        assert torch.equal(frontier, padded(expected, -1))
        if frontier.shape[1]:
            check_placement(tree.place(frontier), lists, expected)
    return tree, lists


def check_placement(placement, lists: list[ListTree], frontier: list[list[int]]) -> None:
    width = placement.tokens.shape[1]
    for row, mine in enumerate(lists):
        assert placement.start == len(mine.slots)
        for column in range(width):
            node = frontier[row][column] if column < len(frontier[row]) else -1
            mine.slots.append(node)
            if node < 0:
                continue
            mine.nodes[node].slot = len(mine.slots) - 1
            assert placement.tokens[row, column] == mine.nodes[node].token
            assert placement.depths[row, column] == mine.nodes[node].depth
            assert placement.parent_slots[row, column] == mine.nodes[mine.nodes[node].parent].slot
            visible = placement.visible[row, column].nonzero()[:, 0].tolist()
            assert visible == sorted(mine.nodes[other].slot for other in mine.path(node))
            assert all(placement.slot_depths[row, s] == mine.nodes[mine.slots[s]].depth for s in visible)


def check(tree: DraftTree, lists: list[ListTree]) -> None:
    assert tree.count.tolist() == [len(mine.nodes) for mine in lists]
    for row, mine in enumerate(lists):
        size = len(mine.nodes)
        assert tree.tokens[row, :size].tolist() == [node.token for node in mine.nodes]
        assert tree.parents[row].tolist() == [node.parent for node in mine.nodes] + [-1] * (tree.size - size)
        assert tree.depths[row, :size].tolist() == [node.depth for node in mine.nodes]
        assert tree.scores[row, :size].tolist() == [node.score for node in mine.nodes]
        assert tree.slots[row, :size].tolist() == [node.slot for node in mine.nodes]
        for node in range(size):
            assert tree.lineage()[row, node].nonzero()[:, 0].tolist() == sorted(mine.path(node))


@given(growths())
def test_append_and_place(growth) -> None:
    check(*build(*growth))


@given(growths())
def test_the_whole_tree_as_the_target_sees_it(growth) -> None:
    """D17: node i at slot i, at the position of its depth: siblings share one, and see their ancestors alone."""
    tree, lists = build(*growth)
    whole = tree.whole()
    for row, mine in enumerate(lists):
        for node in range(1, len(mine.nodes)):
            assert whole.tokens[row, node - 1] == mine.nodes[node].token
            assert whole.depths[row, node - 1] == whole.slot_depths[row, node] == mine.nodes[node].depth
            assert whole.visible[row, node - 1].nonzero()[:, 0].tolist() == sorted(mine.path(node))


@given(growths(), st.data())
def test_subset(growth, data) -> None:
    """The only renumbering: paths, tokens, scores and slots follow; what is left out is gone."""
    tree, lists = build(*growth)
    keeps, expected = [], []
    for mine in lists:
        leaves = data.draw(st.sets(st.integers(0, len(mine.nodes) - 1)))
        keep = sorted({0}.union(*(mine.path(leaf) for leaf in leaves)))
        keeps.append(keep)
        small = ListTree(0)
        small.nodes = [
            Node(n.token, keep.index(n.parent) if n.parent >= 0 else -1, n.depth, n.score, n.slot)
            for n in (mine.nodes[i] for i in keep)
        ]
        expected.append(small)
    count = torch.tensor([len(keep) for keep in keeps])
    check(tree.subset(padded(keeps, tree.size - 1), count), expected)


def test_positions_of_a_small_tree() -> None:
    """D17: a flattened tree with consecutive positions is right for every chain and wrong from the first sibling on."""
    tree = DraftTree(torch.tensor([5]), 5)
    two = torch.tensor([2])
    nodes = tree.append(
        Layer(tree.root.expand(1, 2), torch.tensor([[10, 20]]), torch.zeros(1, 2), two, torch.tensor([[0, 1]]), two),
        lambda ids: ids,
    )
    tree.append(
        Layer(nodes, torch.tensor([[30, 40]]), torch.zeros(1, 2), two, tree.root[:, :0], two * 0), lambda ids: ids
    )
    assert tree.tokens.tolist() == [[5, 10, 20, 30, 40]]
    assert tree.parents.tolist() == [[-1, 0, 0, 1, 2]]
    assert tree.whole().depths.tolist() == [[1, 1, 2, 2]]
