"""Every op in plain torch: the definition of right.

Shapes: B rows (requests), P parents, N tree nodes, V vocabulary. Floats that decide are fp32, ids are int64. Nothing
here reads a tensor's value on the host.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

_LOW32 = 0xFFFFFFFF
_ROUND = 1.5 * 2**32  # adding it to an fp64 number and taking it off again rounds to a multiple of 2**-20
_NO_TOKEN = -2  # what no node carries


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
    logits: Tensor, parent_scores: Tensor, mu: float, budget: Tensor, width: int, normalized: bool = False
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
        normalized: `logits` are log-probabilities already.
    Returns:
        parent [B, width] (index into P), token [B, width], score [B, width] (fp32 path log-probability), count [B]: the
        first `count` entries are kept, the others are 0, 0 and -inf. NaN is never kept.
    """
    logprobs = logits.float() if normalized else torch.log_softmax(logits.float(), dim=-1)
    score, index = ordered_topk((logprobs + parent_scores[..., None]).flatten(1), width)
    kept = (score >= score[:, :1] + (math.log(mu) if mu else -math.inf)) & (score > -math.inf)
    kept &= torch.arange(width, device=score.device) < budget[:, None]
    index, vocab = torch.where(kept, index, 0), logits.shape[-1]
    return index // vocab, index % vocab, torch.where(kept, score, -math.inf), kept.sum(-1)


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

    -log(-log(1 - v)) in fp64, rounded to a multiple of 2**-20: there are 84 million v, and every library whose
    logarithm is off by less than 11 ulp comes to the same noise for each of them (tests/kernels/test_sample_tokens.py
    counts it out).

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
    # the smallest exponential wins the race: -log(1 - v) keeps its precision where it is small
    v = ((words.float() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24).double()
    return ((-torch.log(-torch.log(1 - v)) + _ROUND) - _ROUND).float()


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


class Margins(NamedTuple):
    """Of each row of logits. In a row with a NaN or without a finite maximum token is -1, both margins are 0, and the
    other four are NaN."""

    token: Tensor  # int64, the most likely one; equal ones: the lowest id
    top1: Tensor  # its logit
    top2: Tensor  # the logit of the second; of an equal maximum too; -inf where there is none
    logsumexp: Tensor
    probability: Tensor  # of `token`
    margin: Tensor  # the first probability less the second
    logit_margin: Tensor  # top1 - top2


def margin_scan(logits: Tensor, normalise: bool = True) -> Margins:
    """How far the most likely token leads: TriSpec's margin, of probabilities at temperature 1 (arXiv 2601.23180).

    Args:
        logits: [B, N, V], raw.
        normalise: False leaves out the sum over the row; logsumexp, probability and margin are then NaN.
    Returns:
        `Margins`, each [B, N].
    """
    scores = logits.float()
    top1, token = scores.max(-1, keepdim=True)
    top2 = scores.scatter(-1, token, -math.inf).amax(-1, keepdim=True)
    total = torch.exp(scores - top1).sum(-1, keepdim=True) if normalise else torch.full_like(top1, math.nan)
    values = (top1, top2, top1 + torch.log(total), 1 / total, (1 - torch.exp(top2 - top1)) / total, top1 - top2)
    usable = torch.isfinite(top1)
    masked = (torch.where(usable, x, bad)[..., 0] for x, bad in zip(values, (math.nan,) * 4 + (0.0,) * 2, strict=True))
    return Margins(torch.where(usable, token, -1)[..., 0], *masked)


class TrustWalk(NamedTuple):
    """The proxy's part of a round."""

    path: Tensor  # [B, N - 1] trusted nodes from depth 1 on, then -1
    length: Tensor  # [B] how many
    bonus: Tensor  # [B] the token behind the last one, -1 where that is not trusted
    escalated: Tensor  # [B] the node whose next token the target has to decide, -1 if none


def trust_walk(
    tokens: Tensor, parents: Tensor, count: Tensor, chosen: Tensor, margins: Tensor, margin_threshold: float
) -> TrustWalk:
    """Sample and match by a proxy, up to the first node whose next token it is not sure of.

    Every node on the way is asked for its margin before its children are looked at: below the threshold it is
    escalated, and what follows is the target's. On the threshold it is trusted.

    Args:
        tokens, parents, count, chosen: as in `verify_walk`, chosen by the proxy.
        margins: [B, N] fp32; neither NaN nor an infinity is ever trusted, nor is a chosen token of -1.
        margin_threshold: lambda; at most 0 trusts everything usable.
    Returns:
        `TrustWalk`.
    """
    trusted = (chosen >= 0) & (margins >= margin_threshold) & torch.isfinite(margins)
    row = torch.arange(tokens.shape[0], device=tokens.device)
    path, length, _ = verify_walk(tokens, parents, count, torch.where(trusted, chosen, _NO_TOKEN))
    last = torch.cat((torch.zeros_like(count)[:, None], path), 1)[row, length]
    sure = trusted[row, last]
    return TrustWalk(path, length, torch.where(sure, chosen[row, last], -1), torch.where(sure, -1, last))


class CascadeScalars(NamedTuple):
    """What SpecCascade's rules compare at a node, all at temperature 1; 0 for a token that is -1 or not in p."""

    draft_token: Tensor  # a = argmax q, as an id of the target
    draft_probability: Tensor  # max q = q(a)
    target_token: Tensor  # b = argmax p
    target_probability: Tensor  # max p
    agreed_probability: Tensor  # p(a)


def cascade_scalars(draft_logits: Tensor, target_logits: Tensor, token_ids: Tensor | None = None) -> CascadeScalars:
    """The five numbers from which every SpecCascade rule (arXiv 2405.19261) decides at temperature 0: a or b.

    Args:
        draft_logits: [B, N, Vd]; target_logits: [B, N, V]; both raw.
        token_ids: [Vd] the draft's ids as the target's; None if they are the same.
    Returns:
        `CascadeScalars`, each [B, N].
    """
    (a, q), (b, p) = (_most_likely(torch.softmax(x.float(), -1)) for x in (draft_logits, target_logits))
    a = a if token_ids is None else torch.where(a >= 0, token_ids[a.clamp(min=0)], -1)
    known = (a >= 0) & (a < target_logits.shape[-1]) & (b >= 0)
    at_a = torch.softmax(target_logits.float(), -1).gather(-1, torch.where(known, a, 0)[..., None])[..., 0]
    return CascadeScalars(a, q, b, p, torch.where(known, at_a, 0.0))


def _most_likely(probabilities: Tensor) -> tuple[Tensor, Tensor]:
    best, token = probabilities.max(-1)
    usable = torch.isfinite(best)
    return torch.where(usable, token, -1), torch.where(usable, best, 0.0)


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


def uniforms(seeds: Tensor, stream: int, positions: Tensor, count: int) -> Tensor:
    """Uniform numbers that depend on (seed, stream, position, index) and on nothing else.

    Args:
        seeds: [B] int64; stream: which of the independent streams; positions: [B, M] int64, absolute token positions.
        count: how many for each position.
    Returns:
        [B, M, count] fp64, the middles of 2**32 equal parts of (0, 1).
    """
    blocks = torch.arange((count + 3) // 4, device=positions.device)
    words = philox(seeds[:, None, None], (positions[..., None], stream, blocks)).flatten(-2)[..., :count]
    return (words.double() + 0.5) * 2.0**-32


def rejection_walk(
    tokens: Tensor, parents: Tensor, count: Tensor, p: Tensor, q: Tensor, coins: Tensor, draw: Tensor,
    replacement: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Multi-step rejection over a tree of sampled drafts (SpecInfer, arXiv 2305.09781, Algorithm 2).

    A node's children in order: accept x with probability min(1, p(x) / q(x)), else p <- norm(max(p - q, 0)) and,
    without replacement, q <- norm(q less x). What is left of p is always max(p - c q, 0): c counts the normalised
    copies of q that were taken off. The sums' terms are multiples of 2**-44, so that no order of addition matters.

    Args:
        tokens, parents: [B, N] as in `ancestors`; count: [B] nodes that exist, the root included.
        p, q: [B, N, V] fp32, the target's and the draft's probabilities after each node.
        coins: [B, N] fp64, one for each node as a child; draw: [B] fp64; all in (0, 1).
        replacement: whether siblings were drawn independently, or each without those before it.
    Returns:
        path, length as in `verify_walk`; bonus [B]: a draw from what is left of p at the last node, by the inverse of
        its cumulated mass; -1 where that holds a NaN or p has no mass.
    """

    def left(node, c):  # [B, V]
        taken = p[row, node].double() - c.double()[:, None] * q[row, node].double()
        return torch.where(taken <= 0, 0.0, taken)

    def terms(node, c):
        return torch.floor(left(node, c).clamp(max=1) * 2.0**44) * 2.0**-44

    rows, size = tokens.shape
    vocab = p.shape[-1]
    row = torch.arange(rows, device=tokens.device)
    exists = (torch.arange(size, device=tokens.device) < count[:, None]) & (tokens >= 0) & (tokens < vocab)
    node, length = torch.zeros_like(count), torch.zeros_like(count)
    c, one = torch.zeros_like(draw, dtype=torch.float32), torch.ones_like(draw)
    left_mass, draft_mass = one, one
    path = torch.full_like(tokens, -1)
    for child in range(1, size):  # parents come before their children
        tried = exists[:, child] & (parents[:, child] == node)
        token = tokens[:, child].clamp(0, vocab - 1)
        drafted = q[row, node, token].double()
        accepted = tried & (coins[:, child] * left_mass * drafted < left(node, c)[row, token] * draft_mass)
        path[row, length] = torch.where(accepted, child, path[row, length])
        length = length + accepted

        taken = torch.where(tried, (c.double() + left_mass / draft_mass).float(), c)
        rest = draft_mass if replacement else (draft_mass - drafted).clamp(min=2.0**-44)
        left_mass = torch.where(accepted, one, torch.where(tried, terms(node, taken).sum(-1), left_mass))
        draft_mass = torch.where(accepted, one, torch.where(tried, rest, draft_mass))
        c = torch.where(accepted, 0.0, taken)
        node = torch.where(accepted, child, node)

    c = torch.where(terms(node, c).sum(-1) == 0, 0.0, c)  # only rounding leaves nothing
    cumulated = terms(node, c).cumsum(-1)
    past = cumulated > draw[:, None] * cumulated[:, -1:]
    return path[:, : size - 1], length, torch.where(past.any(-1), past.int().argmax(-1), -1)


def kv_commit(cache: Tensor, source: Tensor, start: Tensor, count: Tensor, block_table: Tensor | None = None) -> None:
    """Moves accepted cache entries into place: `cache[:, b, start + i] = cache[:, b, source[b, i]]` for i < count.

    Overlap-safe: everything is read before anything is written. Moves from or to a slot outside the row are left out.

    Args:
        cache: [L, B, S, H, D] (L = all layers, keys and values alike), changed in place; with a block table
            [L, pages, page_size, H, D].
        source: [B, M] slots to move, in path order; start: [B]; count: [B] how many of them.
        block_table: [B, pages of a row]: slot s is entry s % page_size of page block_table[b, s // page_size].
    """
    rows, width = source.shape
    page = cache.shape[2]
    slots = page if block_table is None else page * block_table.shape[1]
    step = torch.arange(width, device=cache.device)
    target = start[:, None] + step
    kept = (step < count[:, None]) & (source >= 0) & (source < slots) & (target >= 0) & (target < slots)
    # what is not moved repeats the first move, or stays where it is if there is none: no two writes differ
    step = torch.where(kept, step, kept.int().argmax(-1, keepdim=True))
    target = target.gather(1, step).clamp(0, slots - 1)
    source = torch.where(kept.any(-1, keepdim=True), source.gather(1, step).clamp(0, slots - 1), target)
    if block_table is None:
        row = torch.arange(rows, device=cache.device)[:, None].expand(rows, width)
        cache[:, row, target] = cache[:, row, source]
    else:
        held = cache[:, block_table.gather(1, source // page), source % page]
        cache[:, block_table.gather(1, target // page), target % page] = held


def ancestor_words(visible: Tensor) -> Tensor:
    """Packs which slots each query sees into bits: slot s is bit s % 32 of word s // 32.

    Args:
        visible: [B, T, N] bool.
    Returns:
        [B, T, ceil(N / 32)] int32; bits behind the last slot are 0.
    """
    slots = visible.shape[-1]
    bits = torch.nn.functional.pad(visible, (0, -slots % 32)).unflatten(-1, (-1, 32)).long()
    word = (bits << torch.arange(32, device=visible.device)).sum(-1)
    return torch.where(word >= 2**31, word - 2**32, word).int()


def visible_entries(
    prefix: Tensor,
    words: Tensor,
    slots: int,
    entries: int,
    count: Tensor | None = None,
    window: int | None = None,
    depths: Tensor | None = None,
    slot_depths: Tensor | None = None,
    tree_only: bool = False,
) -> Tensor:
    """The dense mask of `tree_attention`: [B, T, entries] bool, True = visible; arguments as there."""
    rows, queries, _ = words.shape
    entry = torch.arange(entries, device=words.device)
    slot = entry - prefix[:, None]
    existing = slot < (slots if count is None else count.clamp(max=slots)[:, None])
    in_tree = (slot >= 0) & existing
    slot = torch.where(in_tree, slot, 0)
    word = words.gather(2, (slot // 32)[:, None].expand(rows, queries, entries))
    seen = ((word >> (slot % 32)[:, None]) & 1 > 0) & in_tree[:, None]
    if not tree_only:
        seen |= (entry < prefix[:, None])[:, None]
    if window is not None:
        assert depths is not None and slot_depths is not None
        position = torch.where(in_tree, prefix[:, None] + slot_depths.gather(1, slot), entry)
        seen &= (prefix[:, None] + depths)[..., None] - position[:, None] < window
    return seen


def tree_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    prefix: Tensor,
    words: Tensor,
    slots: int,
    scale: float,
    count: Tensor | None = None,
    block_table: Tensor | None = None,
    window: int | None = None,
    depths: Tensor | None = None,
    slot_depths: Tensor | None = None,
    tree_only: bool = False,
) -> tuple[Tensor, Tensor]:
    """Every query attends to the prefix of its row and to the tree slots that its words name.

    Args:
        query: [B, T, Hq, D]; query head h reads key head h // (Hq / Hkv).
        keys, values: [B, S, Hkv, D], or [pages, size, Hkv, D] with `block_table` [B, P]: entry n is in page n // size.
        prefix: [B]; entries before it are the prefix, slot s of the tree is entry prefix + s. Where it is negative,
            the first slots do not exist.
        words: [B, T, ceil(slots / 32)] int32, see `ancestor_words`.
        count: [B], only the first `count` slots exist.
        window: a query sees positions less than this behind its own: prefix + `depths` [B, T] for queries,
            prefix + `slot_depths` [B, slots] for slots, n for entry n of the prefix.
        tree_only: leave the prefix out.
    Returns:
        out [B, T, Hq, D] in the query's dtype and the log-sum-exp of the scaled scores [B, T, Hq], fp32 (fp64 from
        fp64). What sees nothing has output 0 and LSE -inf.
    """
    if block_table is not None:
        keys, values = (x[block_table.long()].flatten(1, 2) for x in (keys, values))
    dtype = torch.promote_types(query.dtype, torch.float32)
    groups = query.shape[2] // keys.shape[2]
    keys, values = (x.to(dtype).repeat_interleave(groups, dim=2) for x in (keys, values))
    seen = visible_entries(prefix, words, slots, keys.shape[1], count, window, depths, slot_depths, tree_only)
    score = torch.einsum("bthd,bnhd->bthn", query.to(dtype), keys) * scale
    score = torch.where(seen[:, :, None], score, float("-inf"))
    lse = score.logsumexp(-1)
    weight = torch.exp(score - torch.where(lse == float("-inf"), 0.0, lse)[..., None])
    held = seen.any(1)[..., None, None]  # what nobody sees may be NaN
    return torch.einsum("bthn,bnhd->bthd", weight, torch.where(held, values, 0.0)).to(query.dtype), lse


def merge_attention(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over two disjoint sets of entries, from that over each: out = sum_i exp(lse_i - lse) out_i.

    Args:
        out_a, out_b: [..., D] of one dtype; lse_a, lse_b: [...] fp32.
    Returns:
        out [..., D] and lse [...]. A part with LSE -inf is empty: its output, whatever it is, changes nothing.
    """
    peak = torch.maximum(lse_a, lse_b)
    base = torch.where(peak == float("-inf"), 0.0, peak)
    weights = [torch.exp(lse - base) for lse in (lse_a, lse_b)]
    total = weights[0] + weights[1]
    total = torch.where(total == 0, 1.0, total)
    held = [
        torch.where((weight != 0)[..., None], weight[..., None] * out.float(), 0.0)
        for weight, out in zip(weights, (out_a, out_b), strict=True)
    ]
    return ((held[0] + held[1]) / total[..., None]).to(out_a.dtype), peak + total.log()
