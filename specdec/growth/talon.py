"""TALON (arXiv 2601.07353, Algorithm 2): one node budget, top-K at the root, a confidence gate below."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from specdec_kernels import confidence_gate, topk_logprobs
from torch import Tensor

from specdec.sampling import Noise
from specdec.tree import DraftTree, Layer


@dataclass(frozen=True)
class Talon:
    """Sure contexts grow deep and narrow, unsure ones shallow and wide.

    Attributes:
        budget: N, nodes of the finished tree, the root included (the paper's |T|).
        mu: a candidate stays if its path probability is at least mu times the best of its layer; in (0, 1].
        top_k: K, children of the root.
        init_layers: how many layers from the root on take their top K instead of the gate; the paper uses 1.
        max_depth: optional cap on the depth; the paper has none.
        min_probability: a candidate whose path probability is below this is dropped; the paper has no such floor (0).
            Where verification is not free a node this unlikely costs more than it brings, and an unsure context ends
            before the budget is spent. The root's best child is kept in any case: its draft forward is paid for. It
            shortens the tree and never changes the text.
        min_mass: a layer whose path probabilities sum to less than this is not expanded: the chance that its draft
            forward matters is too small to pay for it. The paper has none (0); like the floor it only shortens.
    """

    budget: int = 60
    mu: float = 0.03
    top_k: int = 10
    init_layers: int = 1
    max_depth: int | None = None
    min_probability: float = 0.0
    min_mass: float = 0.0

    def __post_init__(self) -> None:
        for name, least in (("budget", 2), ("top_k", 1), ("init_layers", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"talon: {name} is {getattr(self, name)}; expected at least {least}")
        if not 0 < self.mu <= 1:
            raise ValueError(f"talon: mu is {self.mu}; expected a number in (0, 1] (1 keeps only the best candidate)")
        for name in ("min_probability", "min_mass"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"talon: {name} is {getattr(self, name)}; expected a number in [0, 1)")
        if self.max_depth is not None and self.max_depth < 1:
            raise ValueError(f"talon: max_depth is {self.max_depth}; expected at least 1, or None for no cap")

    @property
    def capacity(self) -> int:
        return self.budget

    def grow(self, tree: DraftTree, nodes: Tensor, logits: Tensor, noise: Noise) -> Layer:
        left = self.budget - tree.count
        ungated = tree.depth < self.init_layers
        if ungated and tree.depth == 0:  # one parent whose score is 0: the order that the gate would give, for less
            width = min(self.budget - 1, self.top_k, logits.shape[2])
            score, token = (x.flatten(1) for x in topk_logprobs(logits, width))
            at, count = torch.zeros_like(token), (score > -math.inf).sum(-1)
        else:
            width = min(self.budget - 1, logits.shape[1] * logits.shape[2], self.top_k if ungated else self.budget)
            parent_scores = torch.where(nodes >= 0, tree.scores.gather(1, nodes.clamp(min=0)), float("-inf"))
            mu = 0.0 if ungated else self.mu
            at, token, score, count = confidence_gate(logits, parent_scores, mu, left, width)
        if self.min_probability:
            likely = (score >= math.log(self.min_probability)).sum(-1)
            count = torch.minimum(count, likely.clamp(min=1 if tree.depth == 0 else 0))
        everything = torch.arange(width, device=nodes.device).expand_as(token)
        mass = torch.where(everything < count[:, None], score.exp(), 0.0).sum(-1)
        full = tree.count + count >= self.budget
        last = self.max_depth is not None and tree.depth + 1 >= self.max_depth
        more = ~(full | last) & (mass >= self.min_mass)
        return Layer(nodes.gather(1, at), token, score, count, everything, count * more)

    def finish(self, tree: DraftTree) -> DraftTree:
        return tree
