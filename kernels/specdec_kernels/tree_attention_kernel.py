"""Tree attention over one stream of keys and values: kernel, tiles, launch. `tree_attention` says what they compute."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

import torch
from specdec_kernels._lang import INTERPRETED, block, last_arrival, tl, triton
from torch import Tensor

PROCESSORS = {"sm_80": 108, "sm_90": 132, "sm_100": 148, "sm_120": 170, "gfx942": 304, "interpreter": 1}


@triton.jit
def _offsets(
    table_ptr, tile, entry, length, key_block, key_entry, value_block, value_entry,
    BLOCK_N: tl.constexpr, PAGE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Where the tile's entries lie in the keys and in the values."""
    if PAGE == 0:
        keys = entry.to(tl.int64) * key_entry
        values = entry.to(tl.int64) * value_entry
    else:
        if PAGE % BLOCK_N == 0:  # the tile lies in one page
            page = tl.load(table_ptr + tile * BLOCK_N // PAGE).to(tl.int64)
        elif MASKED:
            page = tl.load(table_ptr + entry // PAGE, mask=entry < length, other=0).to(tl.int64)
        else:
            page = tl.load(table_ptr + entry // PAGE).to(tl.int64)
        inside = (entry % PAGE).to(tl.int64)
        keys = page * key_block + inside * key_entry
        values = page * value_block + inside * value_entry
    return keys, values


@triton.jit
def _step(score, value, peak, total, out):
    """Online softmax in base 2: takes in one tile's scores [M, N] and values [N, D]."""
    higher = tl.maximum(peak, tl.max(score, 1))
    base = tl.where(higher == float("-inf"), 0.0, higher)  # nothing seen yet: exp2(-inf - 0) is 0, not NaN
    weight = tl.exp2(score - base[:, None])
    decay = tl.exp2(peak - base)
    out = tl.dot(weight.to(value.dtype), value, out * decay[:, None], input_precision="ieee")
    return higher, total * decay + tl.sum(weight, 1), out


@triton.jit
def _store(out_ptr, lse_ptr, peak, total, out, query_head, held, lane, D: tl.constexpr):
    """Output and natural LSE; 0 and -inf where nothing was seen."""
    total = tl.where(total == 0.0, 1.0, total)
    out /= total[:, None]
    at = out_ptr + query_head[:, None] * D + lane[None, :]
    tl.store(at, out.to(out_ptr.dtype.element_ty), mask=held[:, None] & (lane < D)[None, :])
    tl.store(lse_ptr + query_head, (peak + tl.log2(total)) * 0.6931471805599453, mask=held)


# these change from call to call: none is worth a binary for its value
@triton.jit(do_not_specialize=["queries", "slots", "width", "capacity", "pages", "window"])
def tree_attention_kernel(
    out_ptr, lse_ptr,  # [B, T, Hq, D], [B, T, Hq]
    partial_ptr, state_ptr, arrived_ptr,  # [units, splits, BLOCK_M, D], [units, splits, 2, BLOCK_M], [units]
    query_ptr, key_ptr, value_ptr, table_ptr,  # [B, T, Hq, D]; [B, S or PAGE, Hkv, D]; [B, pages]
    prefix_ptr, count_ptr, words_ptr,  # [B], [B] or None, [B, T, W]
    depth_ptr, slot_depth_ptr,  # [B, T], [B, slots]; None without a window
    scale_log2, queries, kv_heads, group, slots, width, capacity, pages, window,
    query_row, query_token, query_head, key_row, key_entry, key_head, value_row, value_entry, value_head,  # strides
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PAGE: tl.constexpr,  # entries a page; 0: contiguous
    TREE_ONLY: tl.constexpr,
):  # fmt: skip
    part, splits = tl.program_id(1), tl.num_programs(1)
    unit = (tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)).to(tl.int64)
    row = (tl.program_id(2) // kv_heads).to(tl.int64)
    kv_head = (tl.program_id(2) % kv_heads).to(tl.int64)

    # rows of the product: query x head in group
    index = tl.arange(0, BLOCK_M)
    packed = tl.program_id(0) * BLOCK_M + index
    held = packed < queries * group
    token = row * queries + packed // group
    head = kv_head * group + packed % group
    lane = tl.arange(0, BLOCK_D)
    wide = (lane < D)[None, :]
    at = query_ptr + row * query_row + (packed // group).to(tl.int64) * query_token + head * query_head
    query = tl.load(at[:, None] + lane[None, :], mask=held[:, None] & wide, other=0)

    # the stream: which entries there are, and which of them every query of this block sees
    prefix = tl.load(prefix_ptr + row).to(tl.int32)
    count = slots
    if count_ptr is not None:
        count = tl.minimum(tl.load(count_ptr + row).to(tl.int32), slots)
    length = tl.minimum(tl.maximum(prefix + count, 0), capacity)
    first = 0
    whole = 0
    behind = tl.zeros([BLOCK_M], tl.int32)
    if depth_ptr is not None:
        depth = tl.load(depth_ptr + token, mask=held, other=0).to(tl.int32)
        behind = prefix + depth - window  # the last position that is too far back
        whole = tl.max(tl.where(held, behind, -1)) + 1
        first = tl.maximum(tl.minimum(tl.min(tl.where(held, behind, prefix)) + 1, prefix), 0)
    if TREE_ONLY:
        first = tl.maximum(prefix, 0)

    # this part's tiles: [begin, end), of which [clear, clear_end) need no mask
    begin = first // BLOCK_N
    end = tl.cdiv(length, BLOCK_N)
    share = tl.cdiv(tl.maximum(end - begin, 0), splits)
    begin += part * share
    end = tl.maximum(tl.minimum(begin + share, end), begin)
    clear = tl.minimum(tl.maximum(tl.cdiv(tl.maximum(whole, 0), BLOCK_N), begin), end)
    clear_end = tl.minimum(tl.maximum(tl.minimum(prefix, length) // BLOCK_N, clear), end)
    if TREE_ONLY:
        clear_end = clear

    key_ptr += kv_head * key_head
    value_ptr += kv_head * value_head
    if PAGE == 0:
        key_ptr += row * key_row
        value_ptr += row * value_row
    else:
        table_ptr += row * pages
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    out = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)

    # `for`, not `while`: the compiler overlaps the loads of coming tiles with the products of this one
    for tile in range(clear, clear_end):
        entry = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        keys, values = _offsets(
            table_ptr, tile, entry, length, key_row, key_entry, value_row, value_entry, BLOCK_N, PAGE, False
        )
        key = tl.load(key_ptr + keys[:, None] + lane[None, :], mask=wide, other=0)
        value = tl.load(value_ptr + values[:, None] + lane[None, :], mask=wide, other=0)
        score = tl.dot(query, tl.trans(key), input_precision="ieee") * scale_log2
        peak, total, out = _step(score, value, peak, total, out)

    before = clear - begin
    for i in range(before + end - clear_end):
        tile = tl.where(i < before, begin + i, clear_end - before + i)
        entry = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        exists = entry < length
        keys, values = _offsets(
            table_ptr, tile, entry, length, key_row, key_entry, value_row, value_entry, BLOCK_N, PAGE, True
        )
        load = exists[:, None] & wide
        key = tl.load(key_ptr + keys[:, None] + lane[None, :], mask=load, other=0)
        value = tl.load(value_ptr + values[:, None] + lane[None, :], mask=load, other=0)
        score = tl.dot(query, tl.trans(key), input_precision="ieee") * scale_log2

        slot = entry - prefix
        low = (tile * BLOCK_N - prefix) >> 5  # the word of the tile's first slot, which the tile need not start
        bits = tl.zeros([BLOCK_M, BLOCK_N], tl.int32)
        for j in tl.static_range(BLOCK_N // 32 + 1):
            word = low + j + tl.zeros([BLOCK_M], tl.int32)
            loaded = tl.load(words_ptr + token * width + word, mask=held & (word >= 0) & (word < width), other=0)
            bits |= tl.where(((slot >> 5) == low + j)[None, :], loaded[:, None] >> (slot & 31)[None, :], 0)
        seen = (bits & 1) != 0
        if not TREE_ONLY:
            seen = seen | (slot < 0)[None, :]
        if depth_ptr is not None:
            in_tree = (slot >= 0) & exists
            deep = tl.load(slot_depth_ptr + row * slots + slot, mask=in_tree, other=0).to(tl.int32)
            seen = seen & (tl.where(in_tree, prefix + deep, entry)[None, :] > behind[:, None])
        score = tl.where(seen & exists[None, :], score, float("-inf"))
        peak, total, out = _step(score, value, peak, total, out)

    at = token * kv_heads * group + head
    if splits > 1:
        # peak and total apart: their LSE would round at the size of the scores
        cell = index[:, None] * D + lane[None, :]
        mine = unit * splits + part
        tl.store(state_ptr + 2 * mine * BLOCK_M + index, peak)
        tl.store(state_ptr + (2 * mine + 1) * BLOCK_M + index, total)
        tl.store(partial_ptr + mine * BLOCK_M * D + cell, out, mask=wide & (peak != float("-inf"))[:, None])
        if last_arrival(arrived_ptr + unit, splits):
            state_ptr += 2 * unit * splits * BLOCK_M
            partial_ptr += unit * splits * BLOCK_M * D
            peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
            for i in range(splits):
                peak = tl.maximum(peak, tl.load(state_ptr + 2 * i * BLOCK_M + index, cache_modifier=".cg"))
            base = tl.where(peak == float("-inf"), 0.0, peak)
            total = tl.zeros([BLOCK_M], tl.float32)
            out = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
            for i in range(splits):
                weight = tl.exp2(tl.load(state_ptr + 2 * i * BLOCK_M + index, cache_modifier=".cg") - base)
                total += weight * tl.load(state_ptr + (2 * i + 1) * BLOCK_M + index, cache_modifier=".cg")
                stored = wide & (weight != 0.0)[:, None]  # an empty part stored no output
                part_of = partial_ptr + i * BLOCK_M * D + cell
                out += weight[:, None] * tl.load(part_of, mask=stored, other=0, cache_modifier=".cg")
            _store(out_ptr, lse_ptr, peak, total, out, at, held, lane, D)
    else:
        _store(out_ptr, lse_ptr, peak, total, out, at, held, lane, D)


class Workspace(NamedTuple):
    """What a launch with splits > 1 needs beside its inputs; of no size for one split.

    Attributes:
        partial [units, splits, BLOCK_M, D], state [units, splits, 2, BLOCK_M]: fp32, written before they are read.
        arrived [units]: int32, zero; a launch leaves it zero.
    """

    partial: Tensor
    state: Tensor
    arrived: Tensor


def config(rows: int, queries: int, heads: int, kv_heads: int, capacity: int, dim: int, bits: int, arch: str) -> dict:
    """Tiles, splits and launch options from static shapes alone.

    Args:
        rows, queries, heads, kv_heads, capacity, dim: B, T, Hq, Hkv, S, D.
        bits: of one element, 16 or 32.
        arch: one of `PROCESSORS`.
    """
    packed = queries * heads // kv_heads
    tile = tiles(packed, dim, bits, arch)
    units = rows * kv_heads * -(-packed // tile["BLOCK_M"])
    # about one wave, no part under 4 tiles, and no more than the last arrival can merge at little cost
    splits = min(PROCESSORS[arch] // units, -(-capacity // (4 * tile["BLOCK_N"])), 16)
    return tile | {"splits": max(splits, 1)}


def tiles(packed: int, dim: int, bits: int, arch: str) -> dict[str, int]:
    """BLOCK_M, BLOCK_N, num_warps, num_stages for `packed` rows (queries x heads in a group)."""
    if arch == "interpreter":  # its time goes by programs and operations, not by their width
        return {"BLOCK_M": min(block(packed, 16), 256), "BLOCK_N": 64, "num_warps": 4, "num_stages": 1}
    if bits == 32:  # no tensor cores: small tiles, many threads
        return {"BLOCK_M": 16, "BLOCK_N": 32, "num_warps": 8, "num_stages": 2}
    tall = min(block(packed, 16), 64 if dim <= 128 else 32)
    if arch == "gfx942":  # 64 KB of shared memory
        return {"BLOCK_M": tall, "BLOCK_N": 32, "num_warps": 4, "num_stages": 1}
    # sm_90 and sm_100 multiply out of shared memory; elsewhere tall tiles need the registers of eight warps
    crowded = tall > 16 and (dim > 128 or (dim > 64 and arch not in ("sm_90", "sm_100")))
    return {
        "BLOCK_M": tall,
        "BLOCK_N": 64 if dim <= 128 else 32,
        "num_warps": 8 if crowded else 4,
        "num_stages": 3 if dim <= 64 else 2,  # a third spills on sm_90 under Triton 3.7, at any height
    }


@cache
def arch(device: int | None) -> str:
    """Which column of `PROCESSORS` describes the device best."""
    if INTERPRETED:
        return "interpreter"
    if torch.version.hip:
        return "gfx942"
    major, _ = torch.cuda.get_device_capability(device)
    return {8: "sm_80", 9: "sm_90", 10: "sm_100"}.get(major, "sm_120")


def workspace(query: Tensor, kv_heads: int, options: Mapping[str, int]) -> Workspace:
    """Room for the partial results of a launch on `query` [B, T, Hq, D] with these options."""
    rows, queries, heads, dim = query.shape
    height, splits = options["BLOCK_M"], options["splits"]
    units = rows * kv_heads * -(-queries * heads // kv_heads // height) if splits > 1 else 0
    return Workspace(
        torch.empty(units, splits, height, dim, dtype=torch.float32, device=query.device),
        torch.empty(units, splits, 2, height, dtype=torch.float32, device=query.device),
        torch.zeros(units, dtype=torch.int32, device=query.device),
    )


def launch(
    out: Tensor,
    lse: Tensor,
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
    workspace: Workspace,
    options: Mapping[str, int],
) -> None:
    """Outputs first, contiguous. Allocates nothing and does not wait: it can be captured. Arguments as in the op."""
    rows, queries, heads, dim = query.shape
    kv_heads = keys.shape[2]
    packed = queries * heads // kv_heads
    options = dict(options)
    splits, height = options.pop("splits"), options["BLOCK_M"]
    size, pages = keys.shape[1], 0 if block_table is None else block_table.shape[1]
    others = (out, lse, prefix, words, count, block_table, depths, slot_depths, *workspace)
    assert all(t is None or t.is_contiguous() for t in others)
    assert query.stride(3) == keys.stride(3) == values.stride(3) == 1
    tree_attention_kernel[(-(-packed // height), splits, rows * kv_heads)](
        out, lse, *workspace, query, keys, values, block_table, prefix, count, words,
        depths if window is not None else None, slot_depths if window is not None else None,
        scale * 1.4426950408889634, queries, kv_heads, heads // kv_heads, slots, words.shape[2],
        size if block_table is None else pages * size, pages, window or 0,
        *query.stride()[:3], *keys.stride()[:3], *values.stride()[:3],
        D=dim, BLOCK_D=block(dim), PAGE=0 if block_table is None else size, TREE_ONLY=tree_only, **options,
    )  # fmt: skip
