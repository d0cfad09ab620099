"""Attention of tree nodes over one stream of keys and values: the prefix, then the tree.

    out[t, h] = sum_n p_n v_n,  p = softmax over visible n of scale * <q[t, h], k_n>,  lse[t, h] = log sum exp
    visible: entries n < prefix, and slot s = n - prefix where bit s of the query's ancestor words is set

The query heads that share a key head become rows of one product, so that a tile of keys serves them all. Tiles wholly
inside the prefix take no mask; the words are read only in tiles that reach past it (SpecInfer, arXiv 2305.09781,
section 4.2; EAGLE, arXiv 2401.15077, section 4.3). The stream is cut into `splits` parts (flash-decoding) by the length
that is found on the device: the grid depends on static shapes alone. The last part to arrive merges all by their LSE:
splits are few, so its read of them (BLOCK_M * D floats each, from L2) costs less than a second launch.

A window is counted in positions: entry n of the prefix is at n, slot s at prefix + its depth, the query at prefix + its
own, and a query sees positions less than `window` behind it. Tiles wholly outside are skipped.

Scores, softmax and sums are fp32; products of fp16 and bf16 take their dtype's inputs, those of fp32 are IEEE. A query
that sees nothing has output 0 and LSE -inf; no finite number stands for -inf. A NaN in a query, or in any entry of its
row of the batch, may reach the output; what lies behind a row's entries is never read. The same result from run
to run. Head sizes 16 to 256 (padded to a power of two); others, and an inner stride other than 1, are refused.

Limit: 2 S Hkv D elements read a row, 4 T S Hq D flop. Llama-3-8B (Hq 32, Hkv 8, D 128, bf16), S = 8192: 7.9 us at
4.3 TB/s, and 11 us at 790 TFLOP/s for T = 61. On a CPU the op is torch's own fused attention, row by row with a dense
mask: there is nothing to gain over it there.
"""

from typing import Any

import torch
from specdec_kernels import reference
from specdec_kernels._lang import INTERPRETED, unit_stride
from specdec_kernels.aot import TARGETS, Variant
from specdec_kernels.merge_attention import flash_prefix, merge_attention
from specdec_kernels.tree_attention_kernel import arch, config, launch, tiles, tree_attention_kernel, workspace
from torch import Tensor


def _fused(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    prefix: Tensor,
    words: Tensor,
    slots: int,
    scale: float,
    count: Tensor | None,
    block_table: Tensor | None,
    window: int | None,
    depths: Tensor | None,
    slot_depths: Tensor | None,
    tree_only: bool,
    splits: int,
) -> tuple[Tensor, Tensor]:
    rows, queries, heads, dim = query.shape
    shape = rows, queries, heads, keys.shape[2], _capacity(keys, block_table), dim, 8 * query.element_size()
    options = config(*shape, arch(query.device.index))
    if splits:
        options["splits"] = splits
    query, keys, values = map(unit_stride, (query, keys, values))
    small = (prefix, words, count, block_table, depths, slot_depths)
    contiguous: Any = (None if x is None else x.contiguous() for x in small)
    prefix, words, count, block_table, depths, slot_depths = contiguous
    out, lse = _fake(query)
    launch(
        out, lse, query, keys, values, prefix, words, slots, scale, count, block_table, window, depths, slot_depths,
        tree_only, workspace(query, keys.shape[2], options), options,
    )  # fmt: skip
    return out, lse


def _sdpa(
    query, keys, values, prefix, words, slots, scale, count, block_table, window, depths, slot_depths, tree_only, splits
):  # fmt: skip
    """Row by row, so that none computes another's padding; the query heads of a group are rows of one product."""
    queries, heads = query.shape[1:3]
    kv_heads = keys.shape[2]
    exist = prefix + (slots if count is None else count.clamp(max=slots))
    ends = exist.clamp(0, _capacity(keys, block_table)).tolist()
    masks = reference.visible_entries(
        prefix, words, slots, max(ends), count, window, depths, slot_depths, tree_only
    ).repeat_interleave(heads // kv_heads, dim=1)
    out, lse = query.new_zeros(query.shape), query.new_full(query.shape[:3], float("-inf"), dtype=torch.float32)
    for row, end in enumerate(ends):
        if end == 0:
            continue
        key, value = (
            (x[row] if block_table is None else x[block_table[row].long()].flatten(0, 1))[None, :end].transpose(1, 2)
            for x in (keys, values)
        )
        seen = masks[row, :, :end]
        # query heads of a group side by side: [1, Hkv, T * group, D]
        folded = query[row].unflatten(1, (kv_heads, -1)).transpose(0, 1).flatten(1, 2)[None]
        mask = torch.zeros_like(seen, dtype=query.dtype).masked_fill_(~seen, float("-inf"))
        # what scaled_dot_product_attention runs on a CPU, called by its own name for the LSE
        both = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            folded, key, value, attn_mask=mask.expand(1, kv_heads, -1, -1), scale=scale
        )
        for whole, part in zip((out, lse), both, strict=True):
            whole[row] = part[0].unflatten(1, (queries, -1)).transpose(0, 1).flatten(1, 2)
        lse[row].masked_fill_(~seen.any(-1).view(queries, 1, -1).expand(-1, kv_heads, -1).flatten(1), float("-inf"))
    return out, lse


def _fake(query: Tensor, *_) -> tuple[Tensor, Tensor]:
    return query.new_empty(query.shape), query.new_empty(query.shape[:3], dtype=torch.float32)


def _capacity(keys: Tensor, block_table: Tensor | None) -> int:
    return keys.shape[1] * (1 if block_table is None else block_table.shape[1])


_op = torch.library.custom_op("specdec::tree_attention", _fused, mutates_args=(), device_types="cuda")
_op.register_kernel("cpu")(_fused if INTERPRETED else _sdpa)
_op.register_fake(_fake)


def tree_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    prefix: Tensor,
    words: Tensor,
    slots: int,
    *,
    scale: float | None = None,
    count: Tensor | None = None,
    block_table: Tensor | None = None,
    window: int | None = None,
    depths: Tensor | None = None,
    slot_depths: Tensor | None = None,
    splits: int = 0,
    backend: str = "triton",
) -> tuple[Tensor, Tensor]:
    """Tree attention; see the module's docstring.

    Args:
        query: [B, T, Hq, D], fp32, fp16 or bf16: a layer of the tree, all of it, or any other nodes. Query head h reads
            key head h // (Hq / Hkv).
        keys, values: [B, S, Hkv, D] of any strides but the last, or pages [pages, size, Hkv, D] with `block_table`.
        prefix: [B] int, on the device: entries before it are the prefix, slot s of the tree is entry prefix + s. Where
            it is negative, the first slots do not exist.
        words: [B, T, ceil(slots / 32)] int32 from `ancestor_words`: which slots each query sees, itself included.
        slots: of the tree.
        scale: of the scores; 1 / sqrt(D) if None.
        count: [B] int: only the first `count` slots of a row exist.
        block_table: [B, P] int32: the page of entries n with n // size = 0, 1, ...
        window, depths, slot_depths: sliding window in positions; depths of the queries [B, T] and slots [B, slots].
        splits: parts of the stream; 0 lets `config` choose.
        backend: "triton", or "flash": the prefix by flash-attn, the tree by this kernel, merged by LSE.
    Returns:
        out [B, T, Hq, D] in the query's dtype, and the log-sum-exp of the scaled scores [B, T, Hq], fp32.
    Raises:
        ValueError: shapes or dtypes that do not fit. ImportError: "flash" without flash-attn.

    >>> query, keys = torch.zeros(1, 1, 1, 16), torch.zeros(1, 5, 1, 16)  # equal scores: the mean of what is visible
    >>> values = torch.arange(5.0).view(1, 5, 1, 1).expand(1, 5, 1, 16)
    >>> words = reference.ancestor_words(torch.tensor([[[True, False, True]]]))  # a node and the root, not its sibling
    >>> tree_attention(query, keys, values, torch.tensor([2]), words, slots=3)[0][0, 0, 0, 0]  # (0 + 1 + 2 + 4) / 4
    tensor(1.7500)
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    table = "" if block_table is None else "paged "
    if query.dim() != 4 or keys.dim() != 4 or keys.shape != values.shape:
        raise ValueError(
            f"tree_attention: query {list(query.shape)}, {table}keys {list(keys.shape)}, values {list(values.shape)}; "
            "expected [B, T, Hq, D] and twice [B, S, Hkv, D] (or pages [pages, size, Hkv, D] with a block_table)"
        )
    rows, queries, heads, dim = query.shape
    wanted = {
        "keys": (keys, [keys.shape[0] if table else rows, keys.shape[1], keys.shape[2], dim]),
        "prefix": (prefix, [rows]),
        "words": (words, [rows, queries, -(-slots // 32)]),
        "count": (count, [rows]),
        "block_table": (block_table, [rows, 0 if block_table is None else block_table.shape[-1]]),
        "depths": (depths, [rows, queries]),
        "slot_depths": (slot_depths, [rows, slots]),
    }
    for name, (tensor, shape) in wanted.items():
        if tensor is not None and list(tensor.shape) != shape:
            raise ValueError(f"tree_attention: {name} {list(tensor.shape)}; expected {shape}")
        if name != "keys" and tensor is not None and (tensor.is_floating_point() or tensor.dtype == torch.bool):
            raise ValueError(f"tree_attention: {name} of {tensor.dtype}; expected integers")
    if words.dtype != torch.int32:
        raise ValueError(f"tree_attention: words of {words.dtype}; expected torch.int32, as ancestor_words packs them")
    if query.dtype not in (torch.float32, torch.float16, torch.bfloat16) or {keys.dtype, values.dtype} != {query.dtype}:
        raise ValueError(
            f"tree_attention: query, keys and values of {query.dtype}, {keys.dtype} and {values.dtype}; "
            "expected one of float32, float16 and bfloat16 for all"
        )
    if heads % keys.shape[2] or not 16 <= dim <= 256:
        raise ValueError(
            f"tree_attention: {heads} query heads on {keys.shape[2]} key heads of size {dim}; "
            "expected a multiple of the key heads, and a size from 16 to 256"
        )
    if window is not None and (depths is None or slot_depths is None or window < 1):
        raise ValueError(f"tree_attention: window {window}; expected at least 1, with depths and slot_depths")
    arguments = query, keys, values, prefix, words, slots, scale, count, block_table, window, depths, slot_depths
    if backend == "triton":
        return _op(*arguments, False, splits)
    if backend != "flash":
        raise ValueError(f"tree_attention: backend {backend!r}; expected 'triton' or 'flash'")
    if window is not None:
        raise ValueError("tree_attention: the flash backend counts a window in entries, not positions; use 'triton'")
    part = flash_prefix(query, keys, values, prefix, scale, block_table)
    return merge_attention(*part, *_op(*arguments, True, splits))


def _variant(dtype: str, dim: int, packed: int, page: int = 0, window: bool = False) -> Variant:
    """One binary; what `tiles` chooses for sm_90 and, where it differs, for the other targets."""
    chosen = {target: tiles(packed, dim, 32 if dtype == "fp32" else 16, target) for target in TARGETS}
    options = chosen["sm_90"]
    missing = ["count_ptr"]
    if not page:
        missing.append("table_ptr")
    if not window:
        missing += ["depth_ptr", "slot_depth_ptr"]
    arguments = {
        **dict.fromkeys(("out_ptr", "query_ptr", "key_ptr", "value_ptr"), f"*{dtype}:16"),
        **dict.fromkeys(("lse_ptr", "partial_ptr", "state_ptr"), "*fp32:16"),
        **dict.fromkeys(("arrived_ptr", "table_ptr", "words_ptr"), "*i32:16"),
        **dict.fromkeys(("prefix_ptr", "depth_ptr", "slot_depth_ptr"), "*i64:16"),
        "scale_log2": "fp32",
        **dict.fromkeys(("queries", "kv_heads", "group", "slots", "width", "capacity", "pages", "window"), "i32"),
        **{f"{x}_{dimension}": "i32:16" for x in ("key", "value") for dimension in ("row", "entry", "head")},
        **{f"query_{dimension}": "i32:16" for dimension in ("row", "token", "head")},
    }
    constants = {"D": dim, "BLOCK_D": dim, "PAGE": page, "TREE_ONLY": False, **dict.fromkeys(missing)}
    return Variant(
        f"tree_attention_{dtype}_d{dim}_m{options['BLOCK_M']}" + "_paged" * bool(page) + "_window" * window,
        tree_attention_kernel,
        {name: kind for name, kind in arguments.items() if name not in missing},
        {**constants, "BLOCK_M": options["BLOCK_M"], "BLOCK_N": options["BLOCK_N"]},
        num_warps=options["num_warps"],
        num_stages=options["num_stages"],
        wide_loads=True,
        grid=("cdiv(queries * group, BLOCK_M)", "splits", "rows * kv_heads"),
        targets={target: own for target, own in chosen.items() if own != options},
    )


VARIANTS = [
    *(_variant("bf16", dim, packed, page) for dim in (64, 128) for packed in (16, 64) for page in (0, 64)),
    *(_variant("fp16", 128, packed) for packed in (16, 64)),
    *(_variant("fp32", dim, 16) for dim in (64, 128)),
    _variant("bf16", 128, 64, window=True),
]
