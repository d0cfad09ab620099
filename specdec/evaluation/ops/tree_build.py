"""How long does one layer of a draft tree take to choose?

The setting of TALON's micro-benchmark (arXiv 2601.07353, appendix E.6): the tokens of each parent are Zipf-distributed,
P(rank r) ~ r^-alpha. From log-probabilities, as in the paper, and from raw logits, with the log-softmax on all sides.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from specdec_kernels import confidence_gate, reference
from torch import Tensor

from specdec.evaluation.ops.measure import OURS, Case

VOCABULARIES = (32000, 32768, 128256, 151936, 152064)
ALPHAS = (0.7, 1.35, 5.0)
FORMS = ("logprobs", "logits")
EAGLE_TOP_K = 10


def cases(
    vocabularies: Sequence[int] = VOCABULARIES,
    alphas: Sequence[float] = ALPHAS,
    parents: int = 10,
    budget: int = 60,
    mu: float = 0.03,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    forms: Sequence[str] = FORMS,
) -> Iterator[Case]:
    for form in forms:
        for vocab in vocabularies:
            for alpha in alphas:
                yield case(form, vocab, alpha, parents, budget, mu, dtype, device)


def case(
    form: str,
    vocab: int,
    alpha: float,
    parents: int = 10,
    budget: int = 60,
    mu: float = 0.03,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
) -> Case:
    normalized = form == "logprobs"
    scores, parent_scores = zipf(vocab, alpha, parents)
    if not normalized:
        scores += torch.linspace(-8, 8, parents)[:, None]  # logits know no normalisation
    scores, parent_scores = scores.to(device, dtype)[None], parent_scores.to(device)[None]
    room = torch.full((1,), budget, device=device)

    def ours(scores: Tensor, parent_scores: Tensor) -> tuple[Tensor, ...]:
        return confidence_gate(scores, parent_scores, mu, room, budget, normalized=normalized)

    def eagle(scores: Tensor, parent_scores: Tensor) -> tuple[Tensor, ...]:
        return eagle_layer(scores[0], parent_scores[0], budget, normalized)

    def talon(scores: Tensor, parent_scores: Tensor) -> tuple[Tensor, ...]:
        return talon_layer(scores[0], parent_scores[0], mu, budget, normalized)

    def check(results: Mapping[str, Any]) -> None:
        exact = scores if normalized else torch.log_softmax(scores.double(), dim=-1).float()
        expected = reference.confidence_gate(exact, parent_scores, mu, room, budget, normalized=True)
        chosen, peak = kept(*expected), expected[2].max().item()
        threshold = peak + (math.log(mu) if mu else -math.inf)
        same_candidates(kept(*results[OURS]), chosen, threshold, exact=normalized)
        parent, token, score = results["talon"]
        torchs = dict(zip(_pairs(parent, token), score.tolist(), strict=True))
        same_candidates(torchs, chosen, threshold, ulps=64)  # its sums of 150,000 terms are tens of ulp off
        assert abs(results["eagle"][2].max().item() - peak) < 1e-3, "EAGLE's best candidate is not ours"

    shape = {"form": form, "vocab": vocab, "alpha": alpha, "parents": parents, "budget": budget, "mu": mu}
    size = scores.numel() * scores.element_size()
    contenders = {OURS: ours, "eagle": eagle, "talon": talon}
    return Case(shape, (scores, parent_scores), contenders, check, size, waits=frozenset({"talon"}))


def zipf(vocab: int, alpha: float, parents: int) -> tuple[Tensor, Tensor]:
    """Log-probabilities [parents, vocab], each row in an order of its own; of the parents, the ranks from 1 on."""
    rank = torch.arange(1, vocab + 1, dtype=torch.float64)
    logprob = torch.log_softmax(-alpha * rank.log(), dim=-1).float()
    generator = torch.Generator().manual_seed(vocab)
    order = torch.stack([torch.randperm(vocab, generator=generator) for _ in range(parents)])
    return logprob[order], logprob[:parents]


def eagle_layer(scores: Tensor, parent_scores: Tensor, budget: int, normalized: bool) -> tuple[Tensor, Tensor, Tensor]:
    """EAGLE-2's two stages in torch ops: top-K of each parent, then the best of their union; scores [P, V]."""
    logprob = scores if normalized else torch.log_softmax(scores, dim=-1, dtype=torch.float32)
    value, token = logprob.topk(EAGLE_TOP_K, dim=-1)
    best, index = (value + parent_scores[:, None]).flatten().topk(min(budget, value.numel()))
    return index // EAGLE_TOP_K, token.flatten()[index], best


def talon_layer(
    scores: Tensor, parent_scores: Tensor, mu: float, budget: int, normalized: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """TALON's gate in torch ops: maximum, comparison, nonzero; the best `budget` where more pass; scores [P, V]."""
    logprob = scores if normalized else torch.log_softmax(scores, dim=-1, dtype=torch.float32)
    pool = logprob + parent_scores[:, None]
    parent, token = (pool >= pool.max() + (math.log(mu) if mu else -math.inf)).nonzero(as_tuple=True)
    score = pool[parent, token]
    if len(score) > budget:
        score, best = score.topk(budget)
        parent, token = parent[best], token[best]
    return parent, token, score


def kept(parent: Tensor, token: Tensor, score: Tensor, count: Tensor) -> dict[tuple[int, int], float]:
    """The gate's first row as {(parent, token): score}."""
    n = int(count[0])
    return dict(zip(_pairs(parent[0, :n], token[0, :n]), score[0, :n].tolist(), strict=True))


def _pairs(parent: Tensor, token: Tensor) -> list[tuple[int, int]]:
    return list(zip(parent.tolist(), token.tolist(), strict=True))


def same_candidates(
    found: Mapping[tuple[int, int], float],
    expected: Mapping[tuple[int, int], float],
    threshold: float,
    exact: bool = False,
    ulps: int = 4,
) -> None:
    """The same candidates, but for those within `ulps` of the threshold or of the last rank; scores within `ulps`.

    Raises:
        AssertionError: one that no rounding explains; with `exact`, any.
    """
    edges = [edge for edge in (threshold, *(min(x.values()) for x in (found, expected) if x)) if math.isfinite(edge)]
    for pair in found.keys() ^ expected.keys():
        score = found.get(pair, expected.get(pair, 0.0))
        assert not exact, f"candidate {pair} differs"
        assert any(abs(score - edge) <= ulps * _ulp(edge) for edge in edges), f"candidate {pair} differs at {score}"
    for pair in found.keys() & expected.keys():
        gap = abs(found[pair] - expected[pair])
        assert gap <= (0.0 if exact else ulps * _ulp(expected[pair])), f"the score of {pair} is {gap:.1e} off"


def _ulp(value: float) -> float:
    """Of fp32, at least that of 16: the size of a logsumexp over a large vocabulary, which every score contains."""
    return 2.0 ** (math.floor(math.log2(max(abs(value), 16.0))) - 23)
