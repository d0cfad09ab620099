"""PLAIN: decoding as the textbook has it. No cache, no tree, no batch; the noise is written again, in NumPy.

Nothing here calls the package: what both would get wrong together has to be wrong twice.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch


def plain(
    model,
    prompt: Sequence[int],
    new: int,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    eos: Sequence[int] = (),
) -> list[int]:
    """`new` tokens (fewer if one of `eos` comes), each from a full forward pass over everything before it."""
    ids = list(prompt)
    for _ in range(new):
        logits = last_logits(model, ids)
        if temperature == 0:
            token = int(np.argmax(logits))
        else:
            token = int(np.argmax(warp(logits, temperature, top_k, top_p) + gumbel(seed, 0, len(ids), len(logits))))
        ids.append(token)
        if token in eos:
            break
    return ids[len(prompt) :]


def last_logits(model, ids: Sequence[int]) -> np.ndarray:
    """Logits behind the last id: [V]."""
    with torch.inference_mode():
        return model(torch.tensor([list(ids)]), use_cache=False).logits[0, -1].float().numpy()


def warp(logits: np.ndarray, temperature: float, top_k: int = 0, top_p: float = 1.0) -> np.ndarray:
    """Temperature, then top-k (ties with the k-th stay), then top-p (the token that crosses it stays)."""
    scores = logits / np.float32(temperature)
    if 0 < top_k < len(scores):
        scores = np.where(scores >= np.sort(scores)[-top_k], scores, -np.inf)
    if top_p < 1:
        order = np.argsort(-scores, kind="stable")
        p = softmax(scores)[order]
        before = np.cumsum(p) - p
        scores[order[before >= top_p]] = -np.inf
    return scores


def softmax(scores: np.ndarray) -> np.ndarray:
    p = np.exp(scores.astype(np.float64) - scores.max())
    return p / p.sum()


def gumbel(seed: int, stream: int, position: int, vocab: int) -> np.ndarray:
    """Gumbel noise of one position: [V] float64. One philox block gives the noise of four neighbouring tokens."""
    words = [w for block in range((vocab + 3) // 4) for w in philox((position, stream, block, 0), seed)][:vocab]
    v = np.minimum(np.array(words).astype(np.float32) + np.float32(0.5), np.float32(2**32)) * np.float32(2.0**-32)
    v = np.minimum(v, np.float32(1 - 2.0**-24)).astype(np.float64)
    return -np.log(-np.log1p(-v))


def philox(counter: tuple[int, int, int, int], key: int) -> list[int]:
    """Philox 4x32-10 (Salmon et al. 2011) in Python's own integers: four 32-bit words."""
    mask = 0xFFFFFFFF
    c, k = list(counter), [key & mask, key >> 32 & mask]
    for _ in range(10):
        a, b = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [b >> 32 ^ c[1] ^ k[0], b & mask, a >> 32 ^ c[3] ^ k[1], a & mask]
        k = [(k[0] + 0x9E3779B9) & mask, (k[1] + 0xBB67AE85) & mask]
    return c
