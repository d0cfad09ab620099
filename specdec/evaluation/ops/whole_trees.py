"""How long does it take to choose whole trees, given the logits that a head really gave?

Each tree's logits, layer by layer, are recorded once; then only the choosing is repeated: TALON's rule (top-K below the
root, the gate from there on, until the budget is spent) by our op and in torch ops.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from specdec_kernels import confidence_gate
from torch import Tensor

from specdec.evaluation.ops.measure import OURS, Case
from specdec.evaluation.ops.tree_build import same_candidates, talon_layer

TOP_K = 10
PROMPTS, TREES = 4, 2  # of each prompt, so many trees

Layers = list[Tensor]  # one tree: [1, parents, V] a layer
Chosen = list[tuple[Tensor, Tensor, Tensor]]  # of one tree: (parent, token, score) a layer


def record(preset: str = "smollm2", budget: int = 60, mu: float = 0.03) -> list[Layers]:
    """The logits of the first trees of a few prompts, by the preset's own head.

    Raises:
        ValueError, OSError, ModuleNotFoundError: the preset is not here.
    """
    from specdec import Decoder, load
    from specdec.evaluation.setting import read_prompts
    from specdec.growth.talon import Talon

    decoder = load(preset, method="talon")
    trees: list[Layers] = []
    for prompt in read_prompts(limit=PROMPTS):
        recorder = _Recorder(decoder.drafter)
        recorded = Decoder(decoder.target, recorder, Talon(budget, mu, TOP_K), tokenizer=decoder.tokenizer)
        for piece in recorded.stream([{"role": "user", "content": prompt}], max_new_tokens=64):
            if piece.output.finish_reason or len(recorder.trees) > TREES:
                break
        trees += recorder.trees[:TREES]
    return trees


class _Recorder:
    """A drafter that keeps what it said."""

    def __init__(self, drafter: Any):
        self._drafter, self.trees = drafter, list[Layers]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._drafter, name)

    def expand(self, rows: Any, tree: Any, nodes: Tensor) -> Tensor:
        logits = self._drafter.expand(rows, tree, nodes)
        if tree.depth == 0:
            self.trees.append([])
        self.trees[-1].append(logits.clone())
        return logits


def case(trees: Sequence[Layers], budget: int = 60, mu: float = 0.03) -> Case:
    """All trees, one after the other."""

    def ours(trees: Sequence[Layers]) -> list[Chosen]:
        return [grow(layers, budget, mu, _ours) for layers in trees]

    def talon(trees: Sequence[Layers]) -> list[Chosen]:
        return [grow(layers, budget, mu, _torch) for layers in trees]

    def check(results: Mapping[str, Any]) -> None:
        for mine, theirs in zip(results[OURS], results["talon"], strict=True):
            for depth, (one, other) in enumerate(zip(mine, theirs, strict=True), 1):
                edge = min(one[2].min(), other[2].min()).item()
                same_candidates(_named(*one), _named(*other), edge, ulps=4 * depth)  # a path adds up `depth` scores

    layers = [layer for tree in trees for layer in tree]
    shape = {
        "form": "whole trees",
        "vocab": layers[0].shape[-1],
        "trees": len(trees),
        "layers": len(layers),
        "parents": round(sum(layer.shape[1] for layer in layers) / len(layers), 1),
        "budget": budget,
        "mu": mu,
    }
    size = sum(layer.numel() * layer.element_size() for layer in layers)
    return Case(shape, (list(trees),), {OURS: ours, "talon": talon}, check, size)


def _named(parent: Tensor, token: Tensor, score: Tensor) -> dict[tuple[int, int], float]:
    return dict(zip(zip(parent.tolist(), token.tolist(), strict=True), score.tolist(), strict=True))


Step = Callable[[Tensor, Tensor, float, int], tuple[Tensor, Tensor, Tensor]]


def grow(layers: Layers, budget: int, mu: float, step: Step) -> Chosen:
    """Each layer's (parent, token, score), from its recorded logits; `step` chooses."""
    chosen, left = [], budget - 1
    scores = torch.zeros(1, device=layers[0].device)
    for depth, logits in enumerate(layers):
        room = min(left, TOP_K) if depth == 0 else left
        chosen.append(step(logits, scores, 0.0 if depth == 0 else mu, room))
        scores = chosen[-1][2]
        left -= len(scores)
    return chosen


def _ours(logits: Tensor, scores: Tensor, mu: float, room: int) -> tuple[Tensor, Tensor, Tensor]:
    found = confidence_gate(logits, scores[None], mu, torch.tensor([room], device=logits.device), room)
    count = int(found[3])
    return found[0][0, :count], found[1][0, :count], found[2][0, :count]


def _torch(logits: Tensor, scores: Tensor, mu: float, room: int) -> tuple[Tensor, Tensor, Tensor]:
    if mu == 0:
        score, token = torch.log_softmax(logits[0, 0], dim=-1, dtype=torch.float32).topk(room)
        return torch.zeros_like(token), token, score
    parent, token, score = talon_layer(logits[0], scores, mu, room, normalized=False)
    score, order = score.sort(descending=True)  # the recorded rows are in this order
    return parent[order], token[order], score
