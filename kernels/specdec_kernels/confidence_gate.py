"""TALON's gate: the children of all parents of a layer whose path probability is at least mu times the best one's.

    score[p, v] = (logits[p, v] - max) - log sum exp(logits[p] - max) + parent_scores[p]
    kept = {score >= max score + log mu}, the first `budget` by (score desc, parent asc, token asc)

From logits one launch leaves each parent's (max, log-sum); the gate itself is one launch. Any partial maximum lets
through a superset, so each program passes its chunk by the best score seen so far in its row, cuts what it has to its
own best `width`, and emits it as 64-bit keys (score, index) that are all different; the last program of a row filters
by the true maximum, cuts, ranks by counting and writes. Where more passes than there is room for (mu = 0, a flat
distribution) the cut bisects on the keys: exact, at tens of rounds over them. Limit: the logits once from
memory, 1.41 us for 10 x 152064 in fp32 and 0.71 us in bf16 at 4.3 TB/s; from logits they are read once more, from L2.

Inputs bf16, fp16 or fp32, strided in all but the last dimension; decisions in fp32. NaN and -inf are never kept; a NaN
or an infinite maximum takes its parent's row with it. Deterministic: programs may emit more or less from run to run,
what is kept is the same. Declines width > 256, which goes to the reference, and pools above 2^31 entries. Source: TALON
(arXiv 2601.07353), Algorithm 2.
"""

import math

import torch
from specdec_kernels import _native, reference
from specdec_kernels._lang import (
    INTERPRETED,
    key_index,
    key_score,
    last_arrival,
    ordered,
    rank_key,
    tl,
    triton,
    unit_stride,
)
from specdec_kernels.aot import Variant
from specdec_kernels.topk_logprobs import DTYPES, chunks_of, config, launch_normaliser
from torch import Tensor

MAX_WIDTH = 256
CAPACITY = 512  # candidates that are ranked by counting; more are cut to the width first
TILE = 8  # columns of a step of that count


@triton.jit
def _middle(low, high):
    return (low >> 1) + (high >> 1) + (low & high & 1)  # their sum may not fit


@triton.jit
def _count(keys_ptr, total, least, CAPACITY: tl.constexpr):
    """How many of `total` keys are at least `least`."""
    lane = tl.arange(0, CAPACITY)
    counts = tl.zeros([CAPACITY], tl.int32)
    start = 0
    while start < total:
        key = tl.load(keys_ptr + start + lane, mask=start + lane < total, other=-(2**63))
        counts += (key >= least).to(tl.int32)
        start += CAPACITY
    return tl.sum(counts)


@triton.jit
def _gate_kernel(
    parent_ptr, token_ptr, score_ptr, count_ptr,  # [B, width] three times, [B]
    logits_ptr, parent_scores_ptr, budget_ptr,  # [B, P, V], [B, P], [B]
    normaliser_ptr,  # [B * P, 2] maximum, log-sum; not read if NORMALIZED
    counters_ptr,  # [B, 3] int64: best score, candidates, arrivals; zero before and after
    keys_ptr, ranked_ptr,  # [B, P * chunks * width], [B, CAPACITY] int64
    log_mu, parents, vocab, width, stride_row, stride_parent,
    NORMALIZED: tl.constexpr, BLOCK: tl.constexpr, CAPACITY: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    chunks = tl.cdiv(vocab, BLOCK)
    programs = parents * chunks
    row = (tl.program_id(0) // programs).to(tl.int64)
    parent = tl.program_id(0) % programs // chunks
    column = tl.program_id(0) % chunks * BLOCK + tl.arange(0, BLOCK)
    counters_ptr += 3 * row
    keys_ptr += row * programs * width

    # the chunk's scores; a parent that does not exist is not read
    parent_score = tl.load(parent_scores_ptr + row * parents + parent)
    held = (column < vocab) & (tl.full([BLOCK], parent_score, tl.float32) > float("-inf"))
    logits_ptr += row * stride_row + parent.to(tl.int64) * stride_parent
    score = tl.load(logits_ptr + column, mask=held, other=float("-inf")).to(tl.float32)
    if not NORMALIZED:
        normaliser_ptr += 2 * (row * parents + parent)
        score = (score - tl.load(normaliser_ptr)) - tl.load(normaliser_ptr + 1)
    score = score + parent_score + 0.0  # + 0.0 makes -0.0 equal to 0.0
    real = held & (score > float("-inf"))
    score = tl.where(real, score, float("-inf"))

    # the best that the row has seen so far, kept above zero, which stands for nothing yet
    own = ordered(tl.max(score)).to(tl.int64) + 2**31
    seen = tl.maximum(tl.atomic_max(counters_ptr, own, sem="relaxed"), own) - 2**31
    survives = real & (score >= key_score(seen << 32) + log_mu)
    none = tl.full([BLOCK], -(2**63), tl.int64)
    key = tl.where(survives, rank_key(score, parent * vocab + column), none)
    found = tl.sum(survives.to(tl.int32))
    if found > width:  # find the key that `width` of them reach
        high = tl.max(key) + 1
        low = tl.min(tl.where(survives, key, high))
        while found != width:
            middle = _middle(low, high)
            found = tl.sum((key >= middle).to(tl.int32))
            if found >= width:
                low = middle
            else:
                high = middle
        survives = key >= low
    if found > 0:
        place = tl.atomic_add(counters_ptr + 1, found.to(tl.int64), sem="relaxed")
        tl.store(keys_ptr + place + tl.cumsum(survives.to(tl.int32)) - 1, key, mask=survives)

    if last_arrival(counters_ptr + 2, programs):
        best = tl.load(counters_ptr) - 2**31
        total = tl.load(counters_ptr + 1)
        threshold = key_score(best << 32) + log_mu
        low = ordered(threshold).to(tl.int64) << 32
        low = tl.where(threshold == threshold, low, 2**63 - 1)  # inf - inf: nothing passes
        passed = _count(keys_ptr, total, low, CAPACITY)
        if passed > CAPACITY:
            high = (best + 1) << 32
            while passed != width:
                middle = _middle(low, high)
                passed = _count(keys_ptr, total, middle, CAPACITY)
                if passed >= width:
                    low = middle
                else:
                    high = middle

        # what passes, close together
        ranked_ptr += row * CAPACITY
        lane = tl.arange(0, CAPACITY)
        filled = 0
        start = 0
        while filled < passed:
            near = tl.load(keys_ptr + start + lane, mask=start + lane < total, other=-(2**63))
            passes = (near >= low).to(tl.int32)
            tl.store(ranked_ptr + filled + tl.cumsum(passes) - 1, near, mask=passes > 0)
            filled += tl.sum(passes)
            start += CAPACITY
        tl.debug_barrier()  # what some threads stored is read by others

        mine = tl.load(ranked_ptr + lane, mask=lane < passed, other=-(2**63))
        rank = tl.zeros([CAPACITY], tl.int32)
        start = 0
        while start < passed:
            other = start + tl.arange(0, TILE)
            better = tl.load(ranked_ptr + other, mask=other < passed, other=-(2**63))[None, :] > mine[:, None]
            rank += tl.sum(better.to(tl.int32), axis=1)
            start += TILE

        budget = tl.maximum(tl.load(budget_ptr + row), 0)
        count = tl.minimum(tl.minimum(passed, width).to(tl.int64), budget)
        kept = (lane < passed) & (rank < count)
        past = (lane >= count) & (lane < width)
        at = row * width + tl.where(kept, rank, lane)
        index = key_index(mine).to(tl.int32)
        tl.store(parent_ptr + at, tl.where(kept, index // vocab, 0), mask=kept)
        tl.store(token_ptr + at, tl.where(kept, index % vocab, 0), mask=kept)
        tl.store(score_ptr + at, key_score(mine), mask=kept)
        at = row * width + lane
        tl.store(parent_ptr + at, tl.zeros([CAPACITY], tl.int64), mask=past)
        tl.store(token_ptr + at, tl.zeros([CAPACITY], tl.int64), mask=past)
        tl.store(score_ptr + at, tl.full([CAPACITY], float("-inf"), tl.float32), mask=past)
        tl.store(count_ptr + row, count)
        tl.store(counters_ptr, tl.zeros([], tl.int64))
        tl.store(counters_ptr + 1, tl.zeros([], tl.int64))


def workspace_size(rows: int, parents: int, vocab: int, width: int) -> tuple[int, int, int]:
    """Elements of `launch`'s workspace: counters (int64, zero), keys (int64), floats (fp32)."""
    programs = parents * chunks_of(vocab)
    return rows * (parents + 3), rows * (programs * width + CAPACITY), rows * (parents + programs) * 2


def launch(
    parent: Tensor, token: Tensor, score: Tensor, count: Tensor,
    logits: Tensor, parent_scores: Tensor, mu: float, budget: Tensor, normalized: bool,
    counters: Tensor, keys: Tensor, floats: Tensor,
) -> None:  # fmt: skip
    """Outputs first, then the inputs (the last stride of logits is 1), then the workspace of `workspace_size`.

    The counters are zero before the first launch, and a launch leaves them so. Allocates nothing and does not wait: it
    can be captured.
    """
    (rows, parents, vocab), width = logits.shape, parent.shape[-1]
    assert logits.stride(-1) == 1 and width <= MAX_WIDTH
    contiguous = (parent, token, score, count, parent_scores, budget, counters, keys, floats)
    assert all(t.is_contiguous() for t in contiguous)
    normaliser, partial = floats[: rows * parents * 2], floats[rows * parents * 2 :]
    if not normalized:
        launch_normaliser(normaliser, logits, counters[3 * rows :], partial)
    _gate_kernel[(rows * parents * chunks_of(vocab),)](
        parent, token, score, count, logits, parent_scores, budget, normaliser, counters,
        keys[rows * CAPACITY :], keys, math.log(mu) if mu else -math.inf, parents, vocab, width, *logits.stride()[:2],
        NORMALIZED=normalized, CAPACITY=CAPACITY, TILE=TILE, **config(vocab),
    )  # fmt: skip


def _launched(
    logits: Tensor, parent_scores: Tensor, mu: float, budget: Tensor, width: int, normalized: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    logits = unit_stride(logits)
    out = _fake(logits, parent_scores, mu, budget, width, normalized)
    if logits.numel():
        sizes = zip(workspace_size(*logits.shape, width), (torch.long, torch.long, torch.float32), strict=True)
        counters, keys, floats = (logits.new_empty(size, dtype=dtype) for size, dtype in sizes)
        inputs = logits, parent_scores.contiguous(), mu, budget.contiguous(), normalized
        launch(*out, *inputs, counters.zero_(), keys, floats)
    return out


_op = torch.library.custom_op("specdec::confidence_gate", _launched, mutates_args=(), device_types="cuda")


@_op.register_kernel("cpu")
def _cpu(
    logits: Tensor, parent_scores: Tensor, mu: float, budget: Tensor, width: int, normalized: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if INTERPRETED:
        return _launched(logits, parent_scores, mu, budget, width, normalized)
    if not _native.library:
        return reference.confidence_gate(logits, parent_scores, mu, budget, width, normalized)
    logits, parent_scores, budget = logits.contiguous(), parent_scores.contiguous(), budget.contiguous()
    out = _fake(logits, parent_scores, mu, budget, width, normalized)
    dtype = _native.DTYPES[logits.dtype]
    _native.call(
        "confidence_gate", *out, logits, parent_scores, budget, dtype, float(mu), int(normalized), *logits.shape, width
    )
    return out


@_op.register_fake
def _fake(
    logits: Tensor, parent_scores: Tensor, mu: float, budget: Tensor, width: int, normalized: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows = logits.shape[0]
    parent, token = (logits.new_empty(rows, width, dtype=torch.long) for _ in range(2))
    return parent, token, logits.new_empty(rows, width, dtype=torch.float32), logits.new_empty(rows, dtype=torch.long)


def confidence_gate(
    logits: Tensor, parent_scores: Tensor, mu: float, budget: Tensor, width: int, normalized: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """TALON's gate; see the module's docstring.

    Args:
        logits: [B, P, V] bf16, fp16 or fp32.
        parent_scores: [B, P] fp32 path log-probabilities; -inf for a parent that does not exist.
        mu: in [0, 1]; 1 keeps the best alone (and what ties with it), 0 keeps everything, so that the budget decides.
        budget: [B] int64, nodes that may still be added.
        width: columns of the result, at most P * V; above 256 the reference does it.
        normalized: `logits` are log-probabilities already.
    Returns:
        parent [B, width] int64 (index into P), token [B, width] int64, score [B, width] fp32, count [B] int64; entries
        past the count are 0, 0 and -inf.
    Raises:
        ValueError: another shape or dtype, a mu outside [0, 1], a width that the pool does not have.

    >>> probabilities = torch.tensor([[[0.5, 0.3, 0.2]]])
    >>> parent, token, score, count = confidence_gate(probabilities.log(), torch.zeros(1, 1), 0.5, torch.tensor([9]), 3)
    >>> token, count
    (tensor([[0, 1, 0]]), tensor([2]))
    """
    if logits.dim() != 3 or logits.dtype not in DTYPES:
        raise ValueError(f"confidence_gate: logits {list(logits.shape)} {logits.dtype}; expected [B, P, V] of {DTYPES}")
    rows, parents, vocab = logits.shape
    for name, value, shape, dtype in (
        ("parent_scores", parent_scores, (rows, parents), torch.float32),
        ("budget", budget, (rows,), torch.long),
    ):
        if value.shape != shape or value.dtype != dtype:
            given = f"{list(value.shape)} {value.dtype}"
            raise ValueError(f"confidence_gate: {name} {given}; expected {list(shape)} {dtype}")
    if not 0 <= mu <= 1:
        raise ValueError(f"confidence_gate: mu is {mu}; expected a number in [0, 1]")
    if not 1 <= width <= parents * vocab or parents * vocab > 2**31:
        raise ValueError(
            f"confidence_gate: width {width} of a pool of {parents} x {vocab}; expected 1 <= width <= pool <= 2**31"
        )
    run = _cpu if _native.direct(logits) else _op
    if width > MAX_WIDTH:
        run = reference.confidence_gate
    return run(logits, parent_scores, mu, budget, width, normalized)


_ARGUMENTS = {
    **dict.fromkeys(("parent_ptr", "token_ptr", "count_ptr", "budget_ptr"), "*i64:16"),
    **dict.fromkeys(("score_ptr", "parent_scores_ptr"), "*fp32:16"),
    **dict.fromkeys(("counters_ptr", "keys_ptr", "ranked_ptr"), "*i64"),
    **dict.fromkeys(("parents", "width"), "i32"),
    **dict.fromkeys(("vocab", "stride_row", "stride_parent"), "i32:16"),
    "normaliser_ptr": "*fp32",
    "log_mu": "fp32",
}
VARIANTS = [
    Variant(
        f"confidence_gate_{'logprobs' if normalized else 'logits'}_{dtype}",
        _gate_kernel,
        {**_ARGUMENTS, "logits_ptr": f"*{dtype}:16"},
        {"NORMALIZED": normalized, "BLOCK": 2048, "CAPACITY": CAPACITY, "TILE": TILE},
        num_warps=8,
        wide_loads=True,
    )
    for normalized in (False, True)
    for dtype in ("fp32", "fp16", "bf16")
]
