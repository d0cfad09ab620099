"""TINY: models of random weights, small enough to decode without a cache. The grid's own factories make them."""

from __future__ import annotations

import functools
from copy import deepcopy

import torch

from oracle.plain import plain
from specdec.decoder import Decoder
from specdec.drafters.lm import LMDrafter
from specdec.evaluation.exactness import FAMILIES, HintedDrafter, random_draft, random_head, random_target
from specdec.models.lm import CausalLM

__all__ = [
    "FAMILIES",
    "TAPS",
    "clone",
    "decoder",
    "head_draft",
    "lm_draft",
    "prompt",
    "text",
    "tiny",
    "tiny_draft",
    "tiny_head",
]

TAPS = (0, 1, 2)  # of two layers: what enters each, and what the last one gives


@functools.cache
def tiny(family: str = "llama", seed: int = 0, **overrides):
    """TINY, shared between tests: nobody may change it."""
    return random_target(family, seed, **overrides)


@functools.cache
def tiny_draft(family: str = "llama", seed: int = 0):
    """A draft model that is often right."""
    return random_draft(tiny(family, seed), seed + 1)


@functools.cache
def tiny_head(family: str = "llama", seed: int = 0):
    """An EAGLE-3 head of random weights."""
    return random_head(tiny(family, seed), seed + 2)


def lm_draft(family: str = "llama", seed: int = 0) -> LMDrafter:
    return LMDrafter(CausalLM(tiny_draft(family, seed), "draft"))


def head_draft(family: str = "llama", seed: int = 0, texts=(), knows=None) -> HintedDrafter:
    """An EAGLE-3 draft that knows `texts` at most positions (or where `knows(position)`)."""
    drafter = HintedDrafter(tiny_head(family, seed), TAPS, knows)
    drafter.texts = list(texts)
    return drafter


def decoder(target=None, pair=(None, None), **options) -> Decoder:
    """A decoder for a (drafter, growth) pair."""
    return Decoder(tiny() if target is None else target, *pair, **options)


def prompt(length: int, seed: int = 0, vocab: int = 97) -> list[int]:
    return torch.randint(vocab, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def clone(model, implementation: str = "sdpa"):
    """A copy that a test may take apart."""
    copy = type(model)._from_config(deepcopy(model.config), attn_implementation=implementation)
    copy.load_state_dict(model.state_dict())
    return copy.eval().requires_grad_(False)


@functools.cache
def _text(family: str, ids: tuple[int, ...], new: int, **options) -> list[int]:
    return plain(tiny(family), ids, new, **options)


def text(family: str, ids: list[int], new: int, **options) -> list[int]:
    """PLAIN's text of a tiny model, remembered between tests."""
    return list(_text(family, tuple(ids), new, **options))
