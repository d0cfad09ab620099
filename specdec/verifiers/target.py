"""The target decides: one draw at every node, descend while a child carries it.

For a tree that is a function of the draft's distribution this has the law of "accept child x with probability p(x),
else remove it and renormalise" (EAGLE's rule with q = 1), without a loop over siblings, and it accepts as much as any
lossless rule can: the sum over the tree's nodes of the target's path probability.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from specdec_kernels import verify_walk
from torch import Tensor

from specdec.models.lm import CausalLM
from specdec.protocols import Span, Verdict
from specdec.rows import Rows
from specdec.sampling import Sampler
from specdec.tree import DraftTree


@dataclass
class TargetVerifier:
    """Sample and match against one model."""

    target: CausalLM
    lossless: ClassVar[bool] = True

    def start(self, rows: Rows, capacity: int) -> None:
        self.target.start(rows, capacity)

    def verify(self, rows: Rows, tree: DraftTree, sampler: Sampler) -> Verdict:
        placement = tree.whole() if tree.size > 1 else None
        logits, span = self.target.forward(rows, placement)
        positions = rows.length[:, None] + tree.depths
        chosen = sampler.draw(logits, rows.noise, positions)
        path, length, bonus = verify_walk(tree.tokens, tree.parents, tree.count, chosen)
        path = path[:, : tree.depth]
        return Verdict(path, length, bonus, span and on_path(span, path, tree.size))

    def commit(self, rows: Rows, tree: DraftTree, verdict: Verdict) -> None:
        self.target.commit(rows, verdict.path, verdict.length)


def on_path(span: Span, path: Tensor, nodes: int) -> Span:
    """From the features of pending ids and all nodes (the root is the last pending id) to those of ids and path."""
    pending = span.features.shape[1] - nodes + 1
    columns = torch.arange(pending, device=path.device).expand(path.shape[0], -1)
    columns = torch.cat((columns, pending - 1 + path.clamp(min=0)), dim=1)
    features = span.features.gather(1, columns[..., None].expand(-1, -1, span.features.shape[2]))
    return span._replace(features=features)
