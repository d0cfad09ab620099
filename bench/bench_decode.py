"""What does it cost to verify n nodes? A target forward over a chain of n behind 200 tokens; n = 1 is a plain step."""

from __future__ import annotations

import pytest
import torch

from specdec.models.lm import CausalLM
from specdec.rows import Rows
from specdec.tree import DraftTree, Layer

PREFIX = 200


@pytest.mark.parametrize("nodes", [1, 2, 4, 8, 16, 32, 60])
@pytest.mark.parametrize("path", ["lean", "transformers"])
def test_verify(benchmark, finding: dict, targets: dict[str, CausalLM], path: str, nodes: int) -> None:
    target = targets[path]
    rows = Rows([list(range(1, PREFIX + 1))], 2 * nodes, [0])
    target.taps = ()
    target.start(rows, rows.limit[0] + nodes)
    target.forward(rows)
    rows.set_cached(target.name, behind=1)
    tree = chain(rows.roots, nodes)
    placement = tree.whole() if nodes > 1 else None
    benchmark.pedantic(target.forward, (rows, placement), rounds=7, warmup_rounds=2)
    finding["ms_a_node"] = 1000 * benchmark.stats.stats.min / nodes


def chain(roots: torch.Tensor, nodes: int) -> DraftTree:
    tree = DraftTree(roots, nodes)
    frontier, one = tree.root, torch.ones_like(roots)
    for _ in range(nodes - 1):
        score = torch.zeros_like(tree.scores[:, :1])
        frontier = tree.append(Layer(frontier, frontier, score, one, torch.zeros_like(frontier), one), lambda ids: ids)
    return tree
