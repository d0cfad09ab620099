"""TriSpec's walk: sample and match by a proxy, up to the first node whose next token it is not sure of.

    at a node, the root first:   margin < threshold          -> the node is escalated; the walk ends
                                 a child carries the choice  -> descend to it
                                 otherwise                   -> the choice is the bonus; the walk ends

Asking for the margin before looking at the children makes one walk of both cases of TriSpec (arXiv 2601.23180):
without an escalated node (tau_a < tau_m) the path and the bonus are committed without the target; with one (tau_m <=
tau_a) the path is, and the target goes on from the node's subtree. A margin on the threshold is trusted; NaN, an
infinity or a chosen token of -1 never is, whatever the threshold.

One warp a row holds the tree in registers, as in `verify_walk`; reads 36 N bytes a row, so a launch is all that it
costs. The same result in every implementation. Declines trees above 1024 nodes.
"""

import torch
from specdec_kernels import _native, reference
from specdec_kernels._lang import INTERPRETED, block, tl, triton
from specdec_kernels.aot import Variant
from specdec_kernels.reference import TrustWalk
from specdec_kernels.verify_walk import MAX_NODES
from torch import Tensor


@triton.jit
def _trust_kernel(
    path_ptr, length_ptr, bonus_ptr, escalated_ptr,  # [B, N - 1], [B], [B], [B]
    tokens_ptr, parents_ptr, count_ptr, chosen_ptr, margins_ptr,  # [B, N], [B, N], [B], [B, N], [B, N]
    nodes, threshold,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCK)
    held = index < tl.minimum(tl.load(count_ptr + row), nodes)
    tokens = tl.load(tokens_ptr + row * nodes + index, mask=held, other=0)
    parents = tl.load(parents_ptr + row * nodes + index, mask=held, other=-1)
    path_ptr += row * (nodes - 1)
    tl.store(path_ptr + index, tl.full([BLOCK], -1, tl.int64), mask=index < nodes - 1)
    tl.debug_barrier()  # the path below overwrites what other threads stored

    node = 0
    steps = 0
    bonus = tl.full((), -1, tl.int64)
    escalated = tl.full((), -1, tl.int64)
    while node < BLOCK:
        choice = tl.load(chosen_ptr + row * nodes + node)
        margin = tl.load(margins_ptr + row * nodes + node)
        trusted = (choice >= 0) & (margin >= threshold) & (margin < float("inf"))
        match = held & (index > node) & (parents == node) & (tokens == choice) & trusted
        child = tl.min(tl.where(match, index, BLOCK))
        if child < BLOCK:
            tl.store(path_ptr + steps, child.to(tl.int64))
            steps += 1
        bonus = tl.where(trusted, choice, -1)
        escalated = tl.where(trusted, -1, node).to(tl.int64)
        node = child
    tl.store(length_ptr + row, steps.to(tl.int64))
    tl.store(bonus_ptr + row, bonus)
    tl.store(escalated_ptr + row, escalated)


def launch(
    path: Tensor, length: Tensor, bonus: Tensor, escalated: Tensor,
    tokens: Tensor, parents: Tensor, count: Tensor, chosen: Tensor, margins: Tensor, margin_threshold: float,
) -> None:  # fmt: skip
    """Outputs first; contiguous int64, margins fp32. Allocates nothing and does not wait: it can be captured."""
    tensors = (path, length, bonus, escalated, tokens, parents, count, chosen, margins)
    assert all(t.is_contiguous() for t in tensors)
    rows, nodes = tokens.shape
    _trust_kernel[(rows,)](*tensors, nodes, margin_threshold, BLOCK=block(nodes, 32), num_warps=1)


def _launched(
    tokens: Tensor, parents: Tensor, count: Tensor, chosen: Tensor, margins: Tensor, margin_threshold: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    given = [t.contiguous() for t in (tokens, parents, count, chosen, margins)]
    out = _fake(*given, margin_threshold)
    if tokens.device.type == "cpu" and not INTERPRETED:
        _native.call("trust_walk", *out, *given, *tokens.shape, float(margin_threshold))
    else:
        launch(*out, *given, margin_threshold)
    return out


_op = torch.library.custom_op("specdec::trust_walk", _launched, mutates_args=(), device_types="cuda")


@_op.register_kernel("cpu")
def _cpu(
    tokens: Tensor, parents: Tensor, count: Tensor, chosen: Tensor, margins: Tensor, margin_threshold: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    run = _launched if INTERPRETED or _native.library else reference.trust_walk
    path, length, bonus, escalated = run(tokens, parents, count, chosen, margins, margin_threshold)
    return path, length, bonus, escalated


@_op.register_fake
def _fake(
    tokens: Tensor, parents: Tensor, count: Tensor, chosen: Tensor, margins: Tensor, margin_threshold: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, nodes = tokens.shape
    return tokens.new_empty(rows, nodes - 1), torch.empty_like(count), torch.empty_like(count), torch.empty_like(count)


def trust_walk(
    tokens: Tensor, parents: Tensor, count: Tensor, chosen: Tensor, margins: Tensor, margin_threshold: float
) -> TrustWalk:
    """Sample and match by a proxy, up to the first node whose next token it is not sure of.

    Args:
        tokens, parents, count, chosen: as in `verify_walk`, chosen by the proxy.
        margins: [B, N] fp32, of which on the threshold counts as above it. Neither NaN nor an infinity is trusted, nor
            is a chosen token of -1, whatever the threshold.
        margin_threshold: lambda; at most 0 trusts every usable margin, above 1 none of probabilities.
    Returns:
        `TrustWalk`: path [B, N - 1], length [B], bonus [B] (-1 where the target has to give it) and escalated [B]: the
        node whose next token is the target's to decide, at the end of the path; -1 where there is none.

    >>> tree = torch.tensor([[5, 7, 8, 9]]), torch.tensor([[-1, 0, 0, 2]]), torch.tensor([4])
    >>> trust_walk(*tree, torch.tensor([[8, 1, 9, 6]]), torch.tensor([[0.9, 0.9, 0.3, 0.9]]), margin_threshold=0.5)
    TrustWalk(path=tensor([[ 2, -1, -1]]), length=tensor([1]), bonus=tensor([-1]), escalated=tensor([2]))
    """
    if tokens.shape[-1] > MAX_NODES:
        raise ValueError(f"trust_walk: {tokens.shape[-1]} nodes; expected at most {MAX_NODES}")
    if margins.dtype != torch.float32 or margins.shape != tokens.shape:
        expected = f"torch.float32 {list(tokens.shape)}"
        raise ValueError(f"trust_walk: margins are {margins.dtype} {list(margins.shape)}; expected {expected}")
    return TrustWalk(*_op(tokens, parents, count, chosen, margins, margin_threshold))


VARIANTS = [
    Variant(
        "trust_walk",
        _trust_kernel,
        {
            **dict.fromkeys(("path_ptr", "length_ptr", "bonus_ptr", "escalated_ptr"), "*i64:16"),
            **dict.fromkeys(("tokens_ptr", "parents_ptr", "count_ptr", "chosen_ptr"), "*i64:16"),
            "margins_ptr": "*fp32:16",
            "nodes": "i32",
            "threshold": "fp32",
        },
        {"BLOCK": 64},
        num_warps=1,
    ),
]
