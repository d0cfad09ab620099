"""How long does it take to see how sure a model is at every node of a tree?

From raw logits: the margin of probabilities, which TriSpec compares (arXiv 2601.23180), against softmax and top-2; and
the margin of logits alone, which needs no sum over the row, against top-2 and against maximum, mask, maximum.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from specdec_kernels.margin_scan import margin_scan
from torch import Tensor

from specdec.evaluation.ops.measure import OURS, Case
from specdec.evaluation.ops.tree_build import VOCABULARIES

MARGINS = ("probabilities", "logits")


def cases(
    vocabularies: Sequence[int] = VOCABULARIES,
    nodes: int = 61,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    margins: Sequence[str] = MARGINS,
) -> Iterator[Case]:
    for of in margins:
        for vocab in vocabularies:
            yield case(of, vocab, nodes, dtype, device)


def case(
    of: str, vocab: int, nodes: int = 61, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> Case:
    generator = torch.Generator(device).manual_seed(vocab)
    logits = torch.randn(1, nodes, vocab, generator=generator, device=device).mul_(3).to(dtype)
    probabilities = of == "probabilities"

    def ours(logits: Tensor) -> Tensor:
        found = margin_scan(logits, normalise=probabilities)
        return found.margin if probabilities else found.logit_margin

    def check(results: Mapping[str, Any]) -> None:
        expected = lead(logits.double().softmax(-1) if probabilities else logits.double()).float()
        for name, margin in results.items():
            # torch rounds to the dtype of the logits, and its sum over a row is some units off; ours is in fp32
            bound = 1e-5 if name == OURS else 1e-4 + 8 * torch.finfo(dtype).eps
            error = (margin.float() - expected).abs().max().item()
            assert error <= bound * max(1.0, expected.max().item()), f"{name}'s margin is {error:.1e} off"

    peers = {"softmax_topk": softmax_topk} if probabilities else {"topk": topk, "max_mask_max": max_mask_max}
    shape = {"margin of": of, "nodes": nodes, "vocab": vocab}
    return Case(shape, (logits,), {OURS: ours, **peers}, check, logits.numel() * logits.element_size())


def lead(values: Tensor) -> Tensor:
    """How far the largest of the last dimension is before the second, by top-2."""
    two = values.topk(2, dim=-1).values
    return two[..., 0] - two[..., 1]


def softmax_topk(logits: Tensor) -> Tensor:
    return lead(torch.softmax(logits, dim=-1))


def topk(logits: Tensor) -> Tensor:
    return lead(logits)


def max_mask_max(logits: Tensor) -> Tensor:
    """Masks the maximum where it lies and puts it back: no copy of the logits."""
    first, token = logits.max(dim=-1, keepdim=True)
    second = logits.scatter_(-1, token, float("-inf")).amax(dim=-1, keepdim=True)
    logits.scatter_(-1, token, first)
    return (first - second)[..., 0]
