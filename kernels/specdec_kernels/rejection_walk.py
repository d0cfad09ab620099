"""The walk of multi-step rejection: how a tree of sampled drafts is verified without a change of the target's law.

At a node with target probabilities p and draft probabilities q, for its children in node order, duplicates too:
    accept the child x with probability min(1, p(x) / q(x)) and descend;
    otherwise p <- normalised max(p - q, 0), and, if drafts were sampled without replacement, q <- q less x, normalised
and where no child is accepted the bonus is drawn from what is left of p (SpecInfer, arXiv 2305.09781, Algorithm 2 and
Theorem 4.2; Sequoia, arXiv 2402.12374, for the draws without replacement). For trees that are a function of the draft's
distribution alone, see `verify_walk`.

Nothing V wide is stored: after any number of rejections what is left of p is max(p - c q, 0) with one number c. With Z
its mass and Q the mass of q not yet removed (1 in the beginning, and always 1 with replacement), a child is accepted if

    coin Z q(x) < max(p(x) - c q(x), 0) Q     and a rejection makes     c <- c + Z / Q,  Z <- sum max(p - c q, 0)

c is rounded to fp32, so that c q is exact in fp64, and a term of a sum is rounded down to a multiple of 2^-44, so that
the sum of a row of probabilities is exact: every implementation, in any order of summation, takes the same path and
draws the same bonus, the first token at which the cumulated mass exceeds draw * Z. If rounding has left nothing of p,
the bonus comes from p itself. A NaN is not accepted, and one in the final p - c q makes the bonus -1; so does a p
without mass. A node whose token is outside the vocabulary is nobody's child.

One program a row, which reads 8 V bytes for every rejection and for each of the two passes of the draw. One SM moves
about 0.1 TB/s, so a pass over 152,064 entries takes some 12 us and a walk with two rejections 50; at 4.3 TB/s it were
1.1 us. A split over programs would pay; sampled drafts are the exception here. Declines trees above 1024 nodes.
"""

import torch
from specdec_kernels import _native, reference
from specdec_kernels._lang import INTERPRETED, block, tl, triton, unit_stride
from specdec_kernels.aot import Variant
from specdec_kernels.verify_walk import MAX_NODES
from torch import Tensor


@triton.jit
def _left(p_ptr, q_ptr, at, c, used):
    """max(p - c q, 0) in fp64; NaN stays NaN."""
    p = tl.load(p_ptr + at, mask=used, other=0.0).to(tl.float64)
    q = tl.load(q_ptr + at, mask=used, other=0.0).to(tl.float64)
    left = p - c.to(tl.float64) * q  # the product is exact, so a fused operation gives the same
    return tl.where(left <= 0.0, 0.0, left)


@triton.jit
def _terms(p_ptr, q_ptr, first, c, vocab, BLOCK: tl.constexpr):
    at = first + tl.arange(0, BLOCK)
    left = _left(p_ptr, q_ptr, at, c, at < vocab)
    return tl.floor(tl.where(left > 1.0, 1.0, left) * 17592186044416.0) * (1.0 / 17592186044416.0)  # 2^44


@triton.jit
def _mass(p_ptr, q_ptr, c, vocab, BLOCK: tl.constexpr):
    total = tl.zeros([BLOCK], tl.float64)
    first = 0
    while first < vocab:
        total += _terms(p_ptr, q_ptr, first, c, vocab, BLOCK)
        first += BLOCK
    return tl.sum(total)


@triton.jit
def _rejection_kernel(
    path_ptr, length_ptr, bonus_ptr,  # [B, N - 1], [B], [B]
    tokens_ptr, parents_ptr, count_ptr,  # [B, N], [B, N], [B]
    p_ptr, q_ptr, coins_ptr, draw_ptr,  # [B, N, V], [B, N, V], [B, N], [B]
    nodes, vocab, stride_p_row, stride_p_node, stride_q_row, stride_q_node,
    REPLACEMENT: tl.constexpr, BLOCK_NODES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCK_NODES)
    held = index < tl.minimum(tl.load(count_ptr + row), nodes)
    tokens = tl.load(tokens_ptr + row * nodes + index, mask=held, other=-1)
    parents = tl.load(parents_ptr + row * nodes + index, mask=held, other=-1)
    held = held & (tokens >= 0) & (tokens < vocab)
    path_ptr += row * (nodes - 1)
    tl.store(path_ptr + index, tl.full([BLOCK_NODES], -1, tl.int64), mask=index < nodes - 1)
    tl.debug_barrier()  # the path below overwrites what other threads stored
    p_ptr += row * stride_p_row
    q_ptr += row * stride_q_row

    node_p, node_q = p_ptr, q_ptr
    c = tl.full((), 0.0, tl.float32)
    left_mass = tl.full((), 1.0, tl.float64)  # Z
    draft_mass = tl.full((), 1.0, tl.float64)  # Q
    steps = 0
    node = 0
    child = tl.min(tl.where(held & (index > 0) & (parents == 0), index, BLOCK_NODES))
    while child < BLOCK_NODES:
        token = tl.load(tokens_ptr + row * nodes + child)
        q = tl.load(node_q + token).to(tl.float64)
        left = _left(node_p, node_q, token, c, token >= 0)
        if tl.load(coins_ptr + row * nodes + child) * left_mass * q < left * draft_mass:
            tl.store(path_ptr + steps, child.to(tl.int64))
            steps += 1
            node = child
            node_p = p_ptr + child.to(tl.int64) * stride_p_node
            node_q = q_ptr + child.to(tl.int64) * stride_q_node
            c = tl.full((), 0.0, tl.float32)
            left_mass = tl.full((), 1.0, tl.float64)
            draft_mass = tl.full((), 1.0, tl.float64)
        else:
            c = (c.to(tl.float64) + left_mass / draft_mass).to(tl.float32)
            left_mass = _mass(node_p, node_q, c, vocab, BLOCK)
            if not REPLACEMENT:
                draft_mass = tl.maximum(draft_mass - q, 1.0 / 17592186044416.0)
        # parents come before their children, so none is met before the node that it belongs to
        child = tl.min(tl.where(held & (index > child) & (parents == node), index, BLOCK_NODES))
    tl.store(length_ptr + row, steps.to(tl.int64))

    total = _mass(node_p, node_q, c, vocab, BLOCK)
    if total == 0.0:
        c = tl.full((), 0.0, tl.float32)
        total = _mass(node_p, node_q, c, vocab, BLOCK)
    threshold = tl.load(draw_ptr + row) * total
    bonus = tl.full((), -1, tl.int32)
    before = tl.full((), 0.0, tl.float64)
    first = 0
    while (first < vocab) & (bonus < 0) & (total > 0.0):
        terms = _terms(node_p, node_q, first, c, vocab, BLOCK)
        inside = tl.sum(terms)
        if before + inside > threshold:
            past = before + tl.cumsum(terms, 0) > threshold
            bonus = first + tl.min(tl.where(past, tl.arange(0, BLOCK), BLOCK))
        before += inside
        first += BLOCK
    tl.store(bonus_ptr + row, bonus.to(tl.int64))


def launch(
    path: Tensor, length: Tensor, bonus: Tensor, tokens: Tensor, parents: Tensor, count: Tensor, p: Tensor, q: Tensor,
    coins: Tensor, draw: Tensor, replacement: bool,
) -> None:  # fmt: skip
    """Outputs first; as `rejection_walk`, contiguous but for p and q, whose rows may lie apart. Allocates nothing and
    does not wait: it can be captured."""
    rows, nodes, vocab = p.shape
    assert all(t.is_contiguous() for t in (path, length, bonus, tokens, parents, count, coins, draw))
    assert p.stride(2) == q.stride(2) == 1 or vocab == 1
    _rejection_kernel[(rows,)](
        path, length, bonus, tokens, parents, count, p, q, coins, draw, nodes, vocab, *p.stride()[:2], *q.stride()[:2],
        REPLACEMENT=replacement, BLOCK_NODES=block(nodes, 32), BLOCK=min(block(vocab), 4096), num_warps=8,
    )  # fmt: skip


Walk = tuple[Tensor, Tensor, Tensor]


@torch.library.custom_op("specdec::rejection_walk", mutates_args=(), device_types="cuda")
def _op(
    tokens: Tensor, parents: Tensor, count: Tensor, p: Tensor, q: Tensor, coins: Tensor, draw: Tensor, replacement: bool
) -> Walk:
    return _run(launch, tokens, parents, count, p, q, coins, draw, replacement)


def _run(run, tokens, parents, count, p, q, coins, draw, replacement) -> Walk:
    tokens, parents, count, coins, draw = (t.contiguous() for t in (tokens, parents, count, coins, draw))
    p, q = unit_stride(p), unit_stride(q)
    out = _fake(tokens, parents, count, p, q, coins, draw, replacement)
    run(*out, tokens, parents, count, p, q, coins, draw, replacement)
    return out


def _native_launch(path, length, bonus, tokens, parents, count, p, q, coins, draw, replacement) -> None:
    _native.call(
        "rejection_walk", path, length, bonus, tokens, parents, count, p.data_ptr(), q.data_ptr(), coins, draw,
        *p.shape, *p.stride()[:2], *q.stride()[:2], int(replacement),
    )  # fmt: skip


@_op.register_kernel("cpu")
def _cpu(
    tokens: Tensor, parents: Tensor, count: Tensor, p: Tensor, q: Tensor, coins: Tensor, draw: Tensor, replacement: bool
) -> Walk:
    if not (INTERPRETED or _native.library):
        return reference.rejection_walk(tokens, parents, count, p, q, coins, draw, replacement)
    run = launch if INTERPRETED else _native_launch
    return _run(run, tokens, parents, count, p, q, coins, draw, replacement)


@_op.register_fake
def _fake(
    tokens: Tensor, parents: Tensor, count: Tensor, p: Tensor, q: Tensor, coins: Tensor, draw: Tensor, replacement: bool
) -> Walk:
    rows, nodes = tokens.shape
    return tokens.new_empty(rows, nodes - 1), torch.empty_like(count), torch.empty_like(count)


def rejection_walk(
    tokens: Tensor, parents: Tensor, count: Tensor, p: Tensor, q: Tensor, coins: Tensor, draw: Tensor,
    replacement: bool = True,
) -> Walk:  # fmt: skip
    """Multi-step rejection; see the module's docstring.

    Args:
        tokens, parents: [B, N] int64; node 0 is the root, parents come before children, -1 for the root and padding.
            Siblings stand in the order in which they were drawn.
        count: [B] int64, nodes that exist, the root included.
        p: [B, N, V] fp32, the target's probabilities after each node, processed; rows sum to one.
        q: [B, N, V] fp32, the draft's after each node: what the node's children were really drawn from.
        coins: [B, N] fp64 in (0, 1), one for each node as a child; draw: [B] fp64 in (0, 1), the bonus's. See
            `uniforms`.
        replacement: whether siblings were drawn independently, or each without those before it.
    Returns:
        path [B, N - 1]: accepted nodes from depth 1 on, then -1; length [B]: how many; bonus [B]: the token behind the
        last one, -1 if there is none.

    >>> tree = torch.tensor([[5, 0, 1]]), torch.tensor([[-1, 0, 0]]), torch.tensor([3])
    >>> p, q = torch.tensor([0.0, 0.5, 0.5]).expand(1, 3, 3), torch.tensor([0.5, 0.5, 0.0]).expand(1, 3, 3)
    >>> rejection_walk(*tree, p, q, torch.full((1, 3), 0.5).double(), torch.tensor([0.75]).double())
    (tensor([[-1, -1]]), tensor([0]), tensor([2]))
    """
    rows, nodes = tokens.shape
    ints, wide = torch.int64, [rows, nodes, p.shape[-1]]
    for name, tensor, dtype, shape in (
        ("tokens", tokens, ints, [rows, nodes]),
        ("parents", parents, ints, [rows, nodes]),
        ("count", count, ints, [rows]),
        ("p", p, torch.float32, wide),
        ("q", q, torch.float32, wide),
        ("coins", coins, torch.float64, [rows, nodes]),
        ("draw", draw, torch.float64, [rows]),
    ):
        if tensor.dtype != dtype or list(tensor.shape) != shape:
            raise ValueError(f"rejection_walk: {name} is {tensor.dtype} {list(tensor.shape)}; expected {dtype} {shape}")
    if nodes > MAX_NODES:
        raise ValueError(f"rejection_walk: {nodes} nodes; expected at most {MAX_NODES}")
    return _op(tokens, parents, count, p, q, coins, draw, replacement)


VARIANTS = [
    Variant(
        f"rejection_walk{suffix}",
        _rejection_kernel,
        {
            **dict.fromkeys(("path_ptr", "length_ptr", "bonus_ptr"), "*i64:16"),
            **dict.fromkeys(("tokens_ptr", "parents_ptr", "count_ptr"), "*i64:16"),
            **dict.fromkeys(("p_ptr", "q_ptr"), "*fp32:16"),
            **dict.fromkeys(("coins_ptr", "draw_ptr"), "*fp64:16"),
            "nodes": "i32",
            "vocab": "i32:16",
            **dict.fromkeys(("stride_p_row", "stride_p_node", "stride_q_row", "stride_q_node"), "i64:16"),
        },
        {"REPLACEMENT": replacement, "BLOCK_NODES": 64, "BLOCK": 4096},
        num_warps=8,
        wide_loads=True,
        grid=("rows",),
    )
    for suffix, replacement in (("", True), ("_without_replacement", False))
]
