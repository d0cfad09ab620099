"""A chain: the draft's most likely token, `length` times (Leviathan et al. 2023, with a greedy draft)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from specdec_kernels import topk_logprobs
from torch import Tensor

from specdec.sampling import Noise
from specdec.tree import DraftTree, Layer


@dataclass(frozen=True)
class Chain:
    """Attributes: length: drafted tokens, which is also the number of draft forwards."""

    length: int = 4

    def __post_init__(self) -> None:
        if self.length < 1:
            raise ValueError(f"chain length is {self.length}; expected at least 1 (use method='ar' for no drafting)")

    @property
    def capacity(self) -> int:
        return self.length + 1

    def grow(self, tree: DraftTree, nodes: Tensor, logits: Tensor, noise: Noise) -> Layer:
        logprob, token = topk_logprobs(logits, 1)
        usable = (nodes[:, 0] >= 0) & torch.isfinite(logprob[:, 0, 0])
        count = usable.long()
        score = tree.scores.gather(1, nodes.clamp(min=0)) + logprob[..., 0]
        more = count * (tree.count + count < self.capacity)
        return Layer(nodes, token[..., 0], score, count, torch.zeros_like(nodes), more)

    def finish(self, tree: DraftTree) -> DraftTree:
        return tree
