"""EAGLE-2's dynamic tree (arXiv 2406.16858, section 4), which EAGLE-3 drafts with too: expand the best, then rerank."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from specdec_kernels import topk_logprobs
from specdec_kernels.reference import ordered_topk
from torch import Tensor

from specdec.sampling import Noise
from specdec.tree import DraftTree, Layer


@dataclass(frozen=True)
class Eagle2:
    """Every node of the frontier proposes its top K, the best K of those are forwarded, the best N of all are verified.

    Attributes:
        budget: N, nodes of the finished tree, the root included (EAGLE's `total_tokens`).
        top_k: K.
        depth: D in TALON's count (Algorithm 1 runs d = 0..D): D + 1 draft forwards, D + 1 levels below the root.
            SafeAILab's `depth` is the same number.
    """

    budget: int = 60
    top_k: int = 10
    depth: int = 8

    def __post_init__(self) -> None:
        for name, least in (("budget", 2), ("top_k", 1), ("depth", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"eagle2: {name} is {getattr(self, name)}; expected at least {least}")

    @property
    def capacity(self) -> int:
        """Candidates before the rerank."""
        return 1 + self.top_k + self.depth * self.top_k**2

    def grow(self, tree: DraftTree, nodes: Tensor, logits: Tensor, noise: Noise) -> Layer:
        parent_scores = torch.where(nodes >= 0, tree.scores.gather(1, nodes.clamp(min=0)), float("-inf"))
        children = min(self.top_k, logits.shape[-1])
        logprob, token = topk_logprobs(logits, children)
        score = (parent_scores[..., None] + logprob).flatten(1)
        parent = nodes[..., None].expand_as(token).flatten(1)
        width = score.shape[1]
        expand = ordered_topk(score, min(self.top_k, width))[1]
        full = torch.full_like(tree.count, width)
        more = torch.full_like(tree.count, expand.shape[1] if tree.depth < self.depth else 0)
        return Layer(parent, token.flatten(1), score, full, expand, more)

    def finish(self, tree: DraftTree) -> DraftTree:
        """The N best by path probability; a parent never scores below its child and comes before it: no orphans."""
        column = torch.arange(tree.size, device=tree.count.device)
        scores = torch.where(column < tree.count[:, None], tree.scores, float("-inf"))  # rows may differ in nodes
        scores[:, 0] = float("inf")
        best, keep = ordered_topk(scores, min(self.budget, tree.size))
        count = (best > float("-inf")).sum(-1)  # a NaN in the draft's logits leaves candidates without probability
        exists = torch.arange(keep.shape[1], device=keep.device) < count[:, None]
        keep = torch.where(exists, keep, tree.size).sort(-1).values.clamp(max=tree.size - 1)
        return tree.subset(keep, count)
