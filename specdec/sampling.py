"""From logits to a token: processing as Hugging Face does it, then one draw keyed by the token's position."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum
from numbers import Integral, Real
from typing import Any

import torch
from specdec_kernels import greedy_tokens, gumbel, sample_tokens
from torch import Tensor


class Stream(IntEnum):
    """Independent noise streams; a draw of one never moves another."""

    TARGET = 0
    DRAFT = 1
    COIN = 2
    SECOND_STAGE = 3


@dataclass(frozen=True)
class Noise:
    """Counter-based noise: a function of (seed, stream, position, token) alone.

    So a row's text depends neither on its batch mates nor on how many tokens a draft proposed.
    """

    seeds: Tensor  # [B] int64

    def gumbel(self, stream: Stream, positions: Tensor, vocab: int) -> Tensor:
        """[B, M, V] fp32 for absolute positions [B, M]."""
        return gumbel(self.seeds, int(stream), positions, vocab)

    def draw(self, logits: Tensor, stream: Stream, positions: Tensor) -> Tensor:
        """One token per node from processed logits [B, M, V]: [B, M], -1 where no logit is usable."""
        return sample_tokens(logits, self.seeds, int(stream), positions)


@dataclass(frozen=True)
class Sampler:
    """Temperature, top-k, top-p in Hugging Face's order: the same law as its sampling, not the same random stream."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not (_is_number(self.temperature) and math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature is {self.temperature!r}; expected a finite number >= 0 (0 is greedy)")
        if not (_is_number(self.top_k) and isinstance(self.top_k, Integral) and self.top_k >= 0):
            raise ValueError(f"top_k is {self.top_k!r}; expected an integer >= 0 (0 keeps all tokens)")
        if not (_is_number(self.top_p) and 0 < self.top_p <= 1):
            raise ValueError(f"top_p is {self.top_p!r}; expected a number in (0, 1] (1 keeps all tokens)")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def process(self, logits: Tensor) -> Tensor:
        """Logits [..., V] to the fp32 logits that are drawn from; excluded tokens are -inf."""
        scores = logits.float()
        if self.greedy:
            return scores
        scores = scores / self.temperature
        if 0 < self.top_k < scores.shape[-1]:
            scores = scores.masked_fill(scores < torch.topk(scores, self.top_k).values[..., -1:], float("-inf"))
        if self.top_p < 1:
            ordered, index = torch.sort(scores, dim=-1)
            tail = ordered.softmax(-1).cumsum(-1) <= 1 - self.top_p
            tail[..., -1] = False  # the most likely token always stays
            scores = scores.masked_fill(tail.scatter(-1, index, tail), float("-inf"))
        return scores

    def draw(
        self,
        logits: Tensor,
        noise: Noise,
        positions: Tensor,
        stream: Stream = Stream.TARGET,
    ) -> Tensor:
        """The token after each node.

        Args:
            logits: [B, M, V] raw logits.
            positions: [B, M] absolute position of the token that is drawn.
        Returns:
            [B, M] int64; equal maxima go to the lowest id; -1 where the logits hold a NaN or no finite value.
        """
        if self.greedy:
            return greedy_tokens(logits)
        return noise.draw(self.process(logits), stream, positions)


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
