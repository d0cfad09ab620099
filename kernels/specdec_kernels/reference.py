"""Every op in plain torch: the definition of right.

Shapes: B rows (requests), P parents, N tree nodes, V vocabulary. Floats that decide are fp32, ids are int64. Nothing
here reads a tensor's value on the host.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LOW32 = 0xFFFFFFFF


def ordered_topk(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of the last dimension, descending, equal scores by ascending index; NaN counts as -inf.

    `torch.topk` leaves the order of equal values open. Here score and index share one int64 key, so that no two keys
    are equal.

    Args:
        scores: [..., n] float, at most 2**31 entries in the last dimension.
        k: 1 <= k <= n.
    Returns:
        values [..., k] fp32 and indices [..., k] int64.
    """
    scores = torch.where(torch.isnan(scores), float("-inf"), scores.float()) + 0.0  # + 0.0 makes -0.0 equal to 0.0
    bits = scores.contiguous().view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()  # the same order as the floats
    index = torch.arange(scores.shape[-1], device=scores.device)
    keys = torch.topk(ordered * 2**32 + (_LOW32 - index), k, dim=-1).values
    picked = _LOW32 - (keys & _LOW32)
    return scores.gather(-1, picked), picked


def topk_logprobs(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Log-softmax, then the k most likely tokens of each row.

    Args:
        logits: [B, P, V] float.
        k: how many, 1 <= k <= V.
    Returns:
        log-probabilities [B, P, k] fp32, descending (equal ones by token id), and token ids [B, P, k]. A row with a NaN
        or without a finite maximum has all log-probabilities -inf: nothing in it is likely.
    """
    return ordered_topk(torch.log_softmax(logits.float(), dim=-1), k)


def confidence_gate(
    logits: Tensor, parent_scores: Tensor, mu: float, budget: Tensor, width: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """TALON's gate: keep every child whose path probability is at least mu times the best one's.

    p(child) = p(parent) * softmax(logits)[token]; the children of all parents form one pool; m is its maximum; kept are
    those with p >= mu * m, then at most `budget` of them in the order (p descending, parent ascending, token ascending)
    (arXiv 2601.07353, Algorithm 2). Gate-then-truncate equals taking the best `width` >= budget of the pool and gating
    those, which has a fixed shape.

    Args:
        logits: [B, P, V] draft logits.
        parent_scores: [B, P] fp32 path log-probabilities; -inf for a parent that does not exist.
        mu: in [0, 1]; 0 keeps everything, so that the budget alone decides (the root's top-K).
        budget: [B] int64, nodes that may still be added.
        width: columns of the result, at most P * V; no budget may exceed it.
    Returns:
        parent [B, width] (index into P), token [B, width], score [B, width] (fp32 path log-probability), count [B]: the
        first `count` entries are kept. NaN is never kept.
    """
    pool = torch.log_softmax(logits.float(), dim=-1) + parent_scores[..., None]
    score, index = ordered_topk(pool.flatten(1), width)
    kept = (score >= score[:, :1] + torch.log(torch.tensor(mu, dtype=torch.float32))) & (score > float("-inf"))
    count = torch.minimum(kept.sum(-1), budget.clamp(min=0))
    vocab = logits.shape[-1]
    return index // vocab, index % vocab, score, count


def philox(key: Tensor, counter: tuple[Tensor | int, Tensor | int, Tensor | int]) -> Tensor:
    """Philox 4x32-10 (Salmon et al. 2011): four uniform 32-bit words from a 64-bit key and a counter.

    Args:
        key: int64 tensor, its low and high words are the key.
        counter: three 32-bit words (tensors that broadcast with `key`, or ints); the fourth is zero.
    Returns:
        [..., 4] int64, each in [0, 2**32).
    """
    c0, c1, c2, c3, k0, k1 = torch.broadcast_tensors(
        *(torch.as_tensor(c, device=key.device) & _LOW32 for c in (*counter, 0)), key & _LOW32, (key >> 32) & _LOW32
    )
    for _ in range(10):
        low, high = c0 * 0xD2511F53, c2 * 0xCD9E8D57  # wraps in int64; the masks below read the right words
        c0, c1, c2, c3 = (
            ((high >> 32) & _LOW32) ^ c1 ^ k0,
            high & _LOW32,
            ((low >> 32) & _LOW32) ^ c3 ^ k1,
            low & _LOW32,
        )
        k0, k1 = (k0 + 0x9E3779B9) & _LOW32, (k1 + 0xBB67AE85) & _LOW32
    return torch.stack((c0, c1, c2, c3), dim=-1)


def gumbel(seeds: Tensor, stream: int, positions: Tensor, vocab: int) -> Tensor:
    """Gumbel noise that depends on (seed, stream, position, token) and on nothing else.

    Args:
        seeds: [B] int64.
        stream: which of the independent streams.
        positions: [B, M] int64, absolute token positions.
        vocab: V.
    Returns:
        [B, M, V] fp32, from -2.9 to 22.9.
    """
    blocks = torch.arange((vocab + 3) // 4, device=positions.device)
    words = philox(seeds[:, None, None], (positions[..., None], stream, blocks)).flatten(-2)[..., :vocab]
    # -log(1 - v) keeps its precision where it is small, and the smallest exponential wins the race
    v = ((words + 0.5) * 2.0**-32).float().clamp(max=1 - 2.0**-24)
    return -torch.log(-torch.log1p(-v))


def sample_tokens(logits: Tensor, seeds: Tensor, stream: int, positions: Tensor) -> Tensor:
    """One draw per node from softmax(logits), by the Gumbel maximum.

    Args:
        logits: [B, M, V] processed logits (temperature applied, excluded tokens at -inf).
        seeds, stream, positions: as for `gumbel`; equal positions of a row share their noise.
    Returns:
        token ids [B, M]; -1 where the row holds a NaN or no finite logit.
    """
    return perturbed_argmax(logits, gumbel(seeds, stream, positions, logits.shape[-1]))


def perturbed_argmax(logits: Tensor, noise: Tensor | None = None) -> Tensor:
    """The token with the largest logit plus noise; greedy without noise.

    Args:
        logits, noise: [B, M, V].
    Returns:
        token ids [B, M], equal maxima to the lowest id; -1 where the maximum is a NaN or infinite.
    """
    best, token = (logits if noise is None else logits.float() + noise).max(-1)
    return torch.where(torch.isfinite(best), token, -1)


def ancestors(parents: Tensor) -> Tensor:
    """Which nodes lie on the path from the root to each node, itself and the root included.

    Args:
        parents: [B, N]; node 0 is the root, parents come before children, -1 for the root and for padding.
    Returns:
        [B, N, N] bool, [b, i, j] = j is i or an ancestor of i.
    """
    size = parents.shape[1]
    index = torch.arange(size, device=parents.device)
    reach = ((parents[..., None] == index) | (index[:, None] == index)).float()
    reach[..., 0] = 1.0  # the root is everybody's ancestor
    for _ in range(max(size - 1, 1).bit_length()):
        reach = (reach @ reach).clamp(max=1.0)
    return reach > 0


def verify_walk(tokens: Tensor, parents: Tensor, count: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sample and match: from the root, descend to the first child that carries the token chosen at its parent.

    Args:
        tokens, parents: [B, N] as in `ancestors`; count: [B] nodes that exist, the root included.
        chosen: [B, N] the token that the verifier chose after each node.
    Returns:
        path [B, N - 1]: accepted nodes from depth 1 on, then -1; length [B]: how many; bonus [B]: the token chosen at
        the last one (at the root if none was accepted).
    """
    rows, size = tokens.shape
    row, index = torch.arange(rows, device=tokens.device), torch.arange(size, device=tokens.device)
    exists = index < count[:, None]
    node, length = torch.zeros_like(count), torch.zeros_like(count)
    path = torch.full_like(tokens, -1)
    for step in range(size - 1):
        match = exists & (parents == node[:, None]) & (tokens == chosen[row, node][:, None])
        match[:, 0] = False  # nobody's child
        found = match.any(-1)
        node = torch.where(found, match.int().argmax(-1), node)  # the first of equal maxima
        path[:, step] = torch.where(found, node, -1)
        length += found
    return path[:, : size - 1], length, chosen[row, node]


def kv_commit(cache: Tensor, source: Tensor, start: Tensor, count: Tensor) -> None:
    """Moves accepted cache entries into place: `cache[:, b, start + i] = cache[:, b, source[b, i]]` for i < count.

    Overlap-safe: everything is read before anything is written.

    Args:
        cache: [L, B, S, H, D] (L = all layers, keys and values alike), changed in place.
        source: [B, M] slots to move, in path order; start: [B]; count: [B] how many of them.
    """
    rows, width = source.shape
    row = torch.arange(rows, device=cache.device)[:, None].expand(rows, width)
    step = torch.arange(width, device=cache.device)
    kept = (step < count[:, None])[None, :, :, None, None]
    target = (start[:, None] + step).clamp(max=cache.shape[2] - 1)
    # all targets differ, so what is not moved can be written back to where it was
    cache[:, row, target] = torch.where(kept, cache[:, row, source.clamp(min=0)], cache[:, row, target])
