"""Attention over two disjoint sets of entries, from the output and log-sum-exp (LSE) of each.

    lse = log(exp(lse_a) + exp(lse_b));  out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b

A part with LSE -inf is empty: its output, NaN included, changes nothing; two empty parts give 0 and -inf. A NaN in an
LSE reaches the result. Sums are fp32. Elementwise and deterministic; 3 rows of D elements are moved a query head, so a
launch is all that it costs (FlashInfer, arXiv 2501.01005, section 2.2).

`flash_prefix` gives the first set for tree attention: the prefix, by flash-attn.
"""

import torch
from specdec_kernels import reference
from specdec_kernels._lang import INTERPRETED, block, tl, triton
from specdec_kernels.aot import Variant
from torch import Tensor


@triton.jit
def _merge_kernel(
    out_ptr, lse_ptr, out_a_ptr, lse_a_ptr, out_b_ptr, lse_b_ptr,  # [n, D], [n], ...
    n, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    lane = tl.arange(0, BLOCK_D)
    held = row < n
    cell = row[:, None] * D + lane[None, :]
    wide = held[:, None] & (lane < D)[None, :]
    lse_a = tl.load(lse_a_ptr + row, mask=held, other=float("-inf"))
    lse_b = tl.load(lse_b_ptr + row, mask=held, other=float("-inf"))
    peak = tl.maximum(lse_a, lse_b, propagate_nan=tl.PropagateNan.ALL)
    base = tl.where(peak == float("-inf"), 0.0, peak)
    weight_a = tl.exp(lse_a - base)
    weight_b = tl.exp(lse_b - base)
    total = weight_a + weight_b
    total = tl.where(total == 0.0, 1.0, total)
    # an empty part is not read: it may hold anything
    a = tl.load(out_a_ptr + cell, mask=wide & (weight_a != 0.0)[:, None], other=0).to(tl.float32)
    b = tl.load(out_b_ptr + cell, mask=wide & (weight_b != 0.0)[:, None], other=0).to(tl.float32)
    out = (weight_a[:, None] * a + weight_b[:, None] * b) / total[:, None]
    tl.store(out_ptr + cell, out.to(out_ptr.dtype.element_ty), mask=wide)
    tl.store(lse_ptr + row, peak + tl.log(total), mask=held)


def launch(out: Tensor, lse: Tensor, out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> None:
    """Outputs first; all contiguous. Allocates nothing and does not wait: it can be captured."""
    assert all(t.is_contiguous() for t in (out, lse, out_a, lse_a, out_b, lse_b))
    n, dim = lse.numel(), out.shape[-1]
    _merge_kernel[(-(-n // 16),)](
        out, lse, out_a, lse_a, out_b, lse_b, n, D=dim, BLOCK_D=block(dim), BLOCK=16, num_warps=4
    )


def _fused(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    out, lse = _fake(out_a, lse_a, out_b, lse_b)
    launch(out, lse, *(x.contiguous() for x in (out_a, lse_a, out_b, lse_b)))
    return out, lse


def _fake(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    return out_a.new_empty(out_a.shape), lse_a.new_empty(lse_a.shape)


_op = torch.library.custom_op("specdec::merge_attention", _fused, mutates_args=(), device_types="cuda")
_op.register_kernel("cpu")(_fused if INTERPRETED else reference.merge_attention)
_op.register_fake(_fake)


def merge_attention(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Merges two partial attentions; see the module's docstring.

    Args:
        out_a, out_b: [..., D] of one shape and dtype (fp32, fp16, bf16).
        lse_a, lse_b: [...] fp32, natural logarithms.
    Returns:
        out [..., D] in the dtype of the parts, and lse [...].
    Raises:
        ValueError: shapes or dtypes that do not fit.

    >>> ones = torch.ones(1, 2)
    >>> merge_attention(ones, torch.tensor([0.0]), 3 * ones, torch.tensor([0.0]))
    (tensor([[2., 2.]]), tensor([0.6931]))
    """
    shapes = [list(x.shape) for x in (out_a, lse_a, out_b, lse_b)]
    if shapes[0] != shapes[2] or shapes[1] != shapes[0][:-1] or shapes[3] != shapes[1]:
        raise ValueError(f"merge_attention: out and lse {shapes}; expected twice [..., D] and [...]")
    if out_a.dtype != out_b.dtype or {lse_a.dtype, lse_b.dtype} != {torch.float32}:
        kinds = out_a.dtype, lse_a.dtype, out_b.dtype, lse_b.dtype
        raise ValueError(f"merge_attention: out and lse of {kinds}; expected outputs of one dtype and LSEs of float32")
    return _op(out_a, lse_a, out_b, lse_b)


def flash_prefix(
    query: Tensor, keys: Tensor, values: Tensor, prefix: Tensor, scale: float, block_table: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Attention over the prefix alone by flash-attn, with its LSE [B, T, Hq]; arguments as in `tree_attention`.

    Raises:
        ImportError: flash-attn is not installed.
    """
    try:
        from flash_attn import flash_attn_with_kvcache
    except ImportError as error:
        raise ImportError(
            "tree_attention: backend 'flash' needs flash-attn (pip install flash-attn --no-build-isolation); "
            "backend 'triton' needs nothing"
        ) from error
    out, lse = flash_attn_with_kvcache(
        query,
        keys,
        values,
        cache_seqlens=prefix.clamp(min=0).int(),
        block_table=block_table,
        softmax_scale=scale,
        causal=False,
        return_softmax_lse=True,
    )
    # an empty prefix has LSE +inf there
    return out, lse.transpose(1, 2).masked_fill((prefix <= 0)[:, None, None], float("-inf"))


VARIANTS = [
    Variant(
        f"merge_attention_{dtype}",
        _merge_kernel,
        {
            **dict.fromkeys(("out_ptr", "out_a_ptr", "out_b_ptr"), f"*{dtype}:16"),
            **dict.fromkeys(("lse_ptr", "lse_a_ptr", "lse_b_ptr"), "*fp32:16"),
            "n": "i32",
        },
        {"D": 128, "BLOCK_D": 128, "BLOCK": 16},
        wide_loads=True,
        grid=("cdiv(n, BLOCK)",),
    )
    for dtype in ("bf16", "fp16")
]
