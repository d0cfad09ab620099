"""The walk of sample and match: from the root, descend to the child that carries the token chosen at its parent.

    node_0 = root;  node_{i+1} = the first child c of node_i, in node order, with tokens[c] = chosen[node_i]

This is lossless for trees that are a function of the draft's distribution alone (no sampled nodes): one draw of the
target per node decides, and a miss is the bonus (SpecInfer, arXiv 2305.09781, section 4.3, at temperature 0; for T > 0
the draw is the target's own sample). For sampled drafts see `rejection_walk`.

One warp a row holds the tree in registers; a level is one comparison and one minimum. Reads 32 N bytes a row, so a
launch is all that it costs. Integers only: the same result in every implementation. Children come after their parents;
a node whose parent is -1 is never reached; a chosen token of -1 (no usable logit) matches nothing but a token -1.
Declines trees above 1024 nodes.
"""

import torch
from specdec_kernels import _native, reference
from specdec_kernels._lang import INTERPRETED, block, tl, triton
from specdec_kernels.aot import Variant
from torch import Tensor

MAX_NODES = 1024


@triton.jit
def _walk_kernel(
    path_ptr, length_ptr, bonus_ptr,  # [B, N - 1], [B], [B]
    tokens_ptr, parents_ptr, count_ptr, chosen_ptr,  # [B, N], [B, N], [B], [B, N]
    nodes,
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
    choice = tl.load(chosen_ptr + row * nodes)
    while node < BLOCK:
        match = held & (index > node) & (parents == node) & (tokens == choice)
        child = tl.min(tl.where(match, index, BLOCK))
        if child < BLOCK:
            tl.store(path_ptr + steps, child.to(tl.int64))
            steps += 1
            choice = tl.load(chosen_ptr + row * nodes + child)
        node = child
    tl.store(length_ptr + row, steps.to(tl.int64))
    tl.store(bonus_ptr + row, choice)


def launch(
    path: Tensor, length: Tensor, bonus: Tensor, tokens: Tensor, parents: Tensor, count: Tensor, chosen: Tensor
) -> None:
    """Outputs first; contiguous int64 on one device. Allocates nothing and does not wait: it can be captured."""
    rows, nodes = tokens.shape
    assert all(t.is_contiguous() for t in (path, length, bonus, tokens, parents, count, chosen))
    _walk_kernel[(rows,)](
        path, length, bonus, tokens, parents, count, chosen, nodes, BLOCK=block(nodes, 32), num_warps=1
    )


@torch.library.custom_op("specdec::verify_walk", mutates_args=(), device_types="cuda")
def _op(tokens: Tensor, parents: Tensor, count: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    tokens, parents, count, chosen = (t.contiguous() for t in (tokens, parents, count, chosen))
    out = _fake(tokens, parents, count, chosen)
    launch(*out, tokens, parents, count, chosen)
    return out


@_op.register_kernel("cpu")
def _cpu(tokens: Tensor, parents: Tensor, count: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    if not (INTERPRETED or _native.library):
        return reference.verify_walk(tokens, parents, count, chosen)
    tokens, parents, count, chosen = (t.contiguous() for t in (tokens, parents, count, chosen))
    out = _fake(tokens, parents, count, chosen)
    if INTERPRETED:
        launch(*out, tokens, parents, count, chosen)
    else:
        _native.call("verify_walk", *out, tokens, parents, count, chosen, *tokens.shape)
    return out


@_op.register_fake
def _fake(tokens: Tensor, parents: Tensor, count: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows, nodes = tokens.shape
    return tokens.new_empty(rows, nodes - 1), torch.empty_like(count), torch.empty_like(count)


def verify_walk(tokens: Tensor, parents: Tensor, count: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sample and match; see the module's docstring.

    Args:
        tokens, parents: [B, N] int64; node 0 is the root, parents come before children, -1 for the root and padding.
        count: [B] int64, nodes that exist, the root included.
        chosen: [B, N] int64, the token that the verifier chose after each node.
    Returns:
        path [B, N - 1]: accepted nodes from depth 1 on, then -1; length [B]: how many; bonus [B]: the token chosen at
        the last one (at the root if none was accepted).

    >>> tree = torch.tensor([[5, 7, 8, 9]]), torch.tensor([[-1, 0, 0, 2]])
    >>> verify_walk(*tree, torch.tensor([4]), chosen=torch.tensor([[8, 1, 9, 6]]))
    (tensor([[ 2,  3, -1]]), tensor([2]), tensor([6]))
    """
    if tokens.shape[-1] > MAX_NODES:
        raise ValueError(f"verify_walk: {tokens.shape[-1]} nodes; expected at most {MAX_NODES}")
    return (_cpu if _native.direct(tokens) else _op)(tokens, parents, count, chosen)


VARIANTS = [
    Variant(
        "verify_walk",
        _walk_kernel,
        {
            **dict.fromkeys(("path_ptr", "length_ptr", "bonus_ptr"), "*i64:16"),
            **dict.fromkeys(("tokens_ptr", "parents_ptr", "count_ptr", "chosen_ptr"), "*i64:16"),
            "nodes": "i32",
        },
        {"BLOCK": 64},
        num_warps=1,
        grid=("rows",),
    )
]
