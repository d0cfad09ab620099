"""Training-time test for heads that draft from their own hidden states: the unrolled forward, its loss, its acceptance.

With x the ids, f the target's features and H its final hidden states of a row, the chain that starts at position t
unrolls as the drafter does (EAGLE-3, section 3.2):

    step 0:  hidden g_t = fc(f_t),      token x_{t+1},    RoPE position t,    sees the true keys 0..t
    step j:  hidden = out of step j-1,  token x_{t+1+j},  RoPE position t+j,  sees those and its own keys of steps 1..j

Step j is taught the target's distribution of x_{t+2+j}, softmax(lm_head H_{t+1+j}) over the draft vocabulary, by
cross-entropy with weight 0.8^j. Positions where the target's best id lies outside the draft vocabulary teach nothing.
A chain needs no other chain, so a random part of the positions can go beyond step 0 at a part of the price.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from specdec.models.eagle3 import Eagle3Head
from specdec.training.features import FeatureBatch

STEP_DISCOUNT = 0.8


class Chains(NamedTuple):
    """Chains in flat order [C], grouped by row; S is the largest number of chains in one row."""

    row: Tensor
    """int64 [C], batch row"""
    start: Tensor
    """int64 [C], position t where the chain starts"""
    slot: Tensor
    """int64 [C], number of the chain within its row, below S"""
    left: Tensor
    """int64 [C], how many steps still have a next id in the row: step j counts where j < left"""
    index: Tensor
    """int64 [C], number of the chain among all chains of the batch"""


def all_chains(batch: FeatureBatch) -> Chains:
    """One chain for every position whose step 0 predicts an answer id but the first (which the target gives itself)."""
    first, last = batch.prompt_length - 1, batch.length - 3
    positions = torch.arange(batch.ids.shape[1])
    row, start = ((positions >= first[:, None]) & (positions <= last[:, None])).nonzero(as_tuple=True)
    return Chains(row, start, start - first[row], last[row] - start + 1, torch.arange(len(row)))


def some_chains(chains: Chains, fraction: float, generator: torch.Generator) -> Chains:
    """A random part of the chains, the same fraction of every row in expectation."""
    keep = torch.rand(len(chains.row), generator=generator) < fraction
    row, start, _, left, index = (part[keep] for part in chains)
    counts = torch.bincount(row, minlength=1)
    slot = torch.arange(len(row)) - (counts.cumsum(0) - counts)[row]
    return Chains(row, start, slot, left, index)


def unroll(
    head: Eagle3Head, batch: FeatureBatch, first: Chains, later: Chains, steps: int
) -> Iterator[tuple[Chains, Tensor]]:
    """Yield (chains, out [C, h]) of every step: `first` for step 0, `later`, a part of them, for the others."""
    batch_rows, length = batch.ids.shape
    embeds = head.embed_tokens(batch.ids).detach()
    positions = torch.arange(length - 1).expand(batch_rows, -1)
    fused = head.fuse(batch.features[:, :-1])
    q, keys, values = head.project(embeds[:, 1:], fused, *head.rope(positions))
    attended = F.scaled_dot_product_attention(
        q.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2), is_causal=True, enable_gqa=True
    )
    attended = attended.transpose(1, 2).flatten(2)
    out = head.finish(fused[first.row, first.start][None], attended[first.row, first.start][None])[0]
    yield first, out

    if steps == 1 or not len(later.row):
        return
    out = out[later.index]
    width = int(later.slot.max()) + 1
    visible = torch.zeros(batch_rows, width, length - 1, dtype=torch.bool)
    visible[later.row, later.slot] = torch.arange(length - 1) <= later.start[:, None]
    bias = torch.zeros(visible.shape).masked_fill_(~visible, float("-inf"))[:, None, None]  # [B, 1, 1, S, T]
    bias[:, :, :, :, 0] = 0.0  # the rows of unused slots need one finite entry; position 0 is visible to all others
    own: list[tuple[Tensor, Tensor]] = []
    for step in range(1, steps):
        ahead = (later.start + 1 + step).clamp(max=length - 1)  # beyond the row's end nothing is taught
        q, k, v = head.project(embeds[later.row, ahead][None], out[None], *head.rope((later.start + step)[None]))
        own.append((k[0], v[0]))
        attended = _chain_attention(q[0], keys, values, own, bias, later)
        out = head.finish(out[None], attended[None])[0]
        yield later, out


def _chain_attention(
    q: Tensor, keys: Tensor, values: Tensor, own: Sequence[tuple[Tensor, Tensor]], bias: Tensor, chains: Chains
) -> Tensor:
    """Attention [C, Hq*d] of q [C, Hq, d] over its row's true keys [B, T, Hkv, d] and its own (k, v) [C, Hkv, d]."""
    batch_rows, length, kv_heads, head_dim = keys.shape
    groups = q.shape[1] // kv_heads
    width = bias.shape[3]
    scaled = q.unflatten(1, (kv_heads, groups)) * head_dim**-0.5  # [C, Hkv, G, d]
    grid = scaled.new_zeros(batch_rows, width, kv_heads, groups, head_dim)
    grid = grid.index_put((chains.row, chains.slot), scaled).permute(0, 2, 3, 1, 4)  # [B, Hkv, G, S, d]
    true = (grid.flatten(2, 3) @ keys.permute(0, 2, 3, 1)).unflatten(2, (groups, width)) + bias  # [B, Hkv, G, S, T]
    true = true.permute(0, 3, 1, 2, 4)[chains.row, chains.slot]  # [C, Hkv, G, T]
    mine = torch.stack([(scaled * k[:, :, None]).sum(-1) for k, _ in own], dim=-1)  # [C, Hkv, G, j]
    weights = torch.cat((true, mine), dim=-1).float().softmax(-1).to(q.dtype)
    spread = weights.new_zeros(batch_rows, width, kv_heads, groups, length)
    spread = spread.index_put((chains.row, chains.slot), weights[..., :length]).permute(0, 2, 3, 1, 4)
    mixed = (spread.flatten(2, 3) @ values.permute(0, 2, 1, 3)).unflatten(2, (groups, width))  # [B, Hkv, G, S, d]
    mixed = mixed.permute(0, 3, 1, 2, 4)[chains.row, chains.slot]
    for step, (_, v) in enumerate(own):
        mixed = mixed + weights[..., length + step, None] * v[:, :, None]
    return mixed.flatten(1)


class _SoftCrossEntropy(torch.autograd.Function):
    """sum_i CE(p_i, softmax(W h_i)) without the [M, Vd] logits in memory: their gradient is made chunk by chunk."""

    CHUNK = 256

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, teacher: Tensor, index: Tensor) -> Tensor:
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight) if weight.requires_grad else None
        total = hidden.new_zeros(())
        for start in range(0, len(hidden), _SoftCrossEntropy.CHUNK):
            chunk = slice(start, start + _SoftCrossEntropy.CHUNK)
            logits, p = hidden[chunk] @ weight.T, teacher[index[chunk]]
            normaliser = logits.logsumexp(-1, keepdim=True)
            total += normaliser.sum() - torch.dot(p.flatten(), logits.flatten())
            grad = logits.sub_(normaliser).exp_().sub_(p)
            torch.mm(grad, weight, out=grad_hidden[chunk])
            if grad_weight is not None:
                grad_weight.addmm_(grad.T, hidden[chunk])
        ctx.save_for_backward(grad_hidden, grad_weight)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        return grads[0] * grad_hidden, None if grad_weight is None else grads[0] * grad_weight, None, None


def ttt_loss(
    head: Eagle3Head, batch: FeatureBatch, teacher_weight: Tensor, first: Chains, later: Chains, steps: int
) -> Tensor:
    """The discounted sum over steps of the mean cross-entropy, a scalar.

    Args:
        teacher_weight: [Vd, h_t], the target's output rows of the draft vocabulary.
        first, later: chains of step 0 and of the other steps (``all_chains``, ``some_chains``).
    """
    with torch.no_grad():
        teacher = (batch.final[first.row, first.start + 1] @ teacher_weight.T).float().softmax(-1)  # [C, Vd]
        taught = head.t2d[batch.best[first.row, first.start + 1]]
    total = teacher.new_zeros(())
    for step, (chains, out) in enumerate(unroll(head, batch, first, later, steps)):
        # The chains of a row are consecutive, so the position that chain c reaches in step j is where chain c+j starts.
        reached = chains.index + step
        usable = (step < chains.left).nonzero()[:, 0]
        usable = usable[taught[reached[usable]]]
        if len(usable):
            loss = _SoftCrossEntropy.apply(head.norm(out[usable]), head.lm_head.weight, teacher, reached[usable])
            total = total + STEP_DISCOUNT**step * loss / len(usable)
    return total


@torch.no_grad()
def acceptance(head: Eagle3Head, batches: Iterator[FeatureBatch], steps: int, chain: int = 4) -> dict[str, Any]:
    """Greedy acceptance along stored greedy answers.

    Returns:
        top1: part of all positions where the first draft is the target's argmax; by_step: for every step the same among
        the chains whose earlier steps were all right; tau: ids per round, bonus included, when greedy chains of
        `chain` drafts walk the answers; rounds: how many rounds that took.
    """
    right, tried = np.zeros(steps), np.zeros(steps)
    emitted = rounds = 0
    for batch in batches:
        chains = all_chains(batch)
        alive = torch.ones(len(chains.row), dtype=torch.bool)
        accepted = torch.zeros(len(chains.row), dtype=torch.int64)
        for step, (_, out) in enumerate(unroll(head, batch, chains, chains, steps)):
            reached = (chains.start + 1 + step).clamp(max=batch.ids.shape[1] - 1)
            guess = torch.cat([head.target_ids(head.logits(part).argmax(-1)) for part in out.split(512)])
            alive &= step < chains.left
            tried[step] += int(alive.sum())
            alive &= guess == batch.best[chains.row, reached]
            right[step] += int(alive.sum())
            if step < chain:
                accepted += alive
        for row in range(len(batch.ids)):
            here, position = accepted[chains.row == row].tolist(), 0
            while position < len(here):
                rounds += 1
                emitted += here[position] + 1
                position += here[position] + 1
    by_step = right / np.maximum(tried, 1)
    return {
        "top1": round(float(by_step[0]), 4),
        "by_step": [round(float(rate), 4) for rate in by_step],
        "tau": round(emitted / max(rounds, 1), 4),
        "rounds": rounds,
    }
