"""Accepted cache entries into place: one launch for the keys and values of all layers.

    cache[:, b, start[b] + i] = cache[:, b, source[b, i]]   for i < count[b], as if all were read before any is written

An accepted path is scattered over the tree's slots and may overlap the slots that it moves to, in any order. A program
takes one row of one layer and a few columns of its entries, for all moves: it reads them into registers, waits, and
writes, so no order of sources can hurt. With a block table [B, pages], slot s of row b is entry s % page_size of page
block_table[b, s // page_size] (a paged cache, [L, pages, page_size, H, D]).

Entries are moved as integers, bit for bit, whatever their dtype (1, 2, 4 or 8 bytes). The cache may be a view with any
strides of layers, rows and slots; what belongs to one slot has to lie in one piece. A move from or to a slot that does
not exist is left out, so no padding reads or writes beyond the cache. Reads and writes L count H D elements each: 36
layers of 8 heads of 128 in bf16 and 8 accepted tokens are 2.4 MB, 0.55 us at 4.3 TB/s (EAGLE's
`update_inference_inputs`: 72 index copies there). Declines more than 1024 moves a row.
"""

import math

import torch
from specdec_kernels import _native, reference
from specdec_kernels._lang import INTERPRETED, block, tl, triton
from specdec_kernels.aot import Variant
from torch import Tensor

MAX_MOVES = 1024
WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


@triton.jit
def _entry(slot, row, used, table_ptr, table_width, page_size, stride_row, stride_slot):
    """Offsets of the entries of `slot` in one layer; without a table a row is one long page."""
    if table_ptr is not None:
        row = tl.load(table_ptr + row * table_width + slot // page_size, mask=used, other=0)
        slot = slot % page_size
    return row * stride_row + slot * stride_slot


@triton.jit
def _commit_kernel(
    cache_ptr,  # [L, B or pages, S or page_size, words], in words
    source_ptr, start_ptr, count_ptr, table_ptr,  # [B, M], [B], [B], [B, table_width] or None
    moves, slots, words, table_width, page_size,
    stride_layer, stride_row, stride_slot,  # in words
    BLOCK_MOVES: tl.constexpr, BLOCK_WORDS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    move = tl.arange(0, BLOCK_MOVES)
    used = move < tl.minimum(tl.load(count_ptr + row), moves)
    source = tl.load(source_ptr + row * moves + move, mask=used, other=-1)
    target = tl.load(start_ptr + row) + move
    used = used & (source >= 0) & (source < slots) & (target >= 0) & (target < slots) & (source != target)
    source = _entry(source, row, used, table_ptr, table_width, page_size, stride_row, stride_slot)
    target = _entry(target, row, used, table_ptr, table_width, page_size, stride_row, stride_slot)

    column = tl.program_id(0) * BLOCK_WORDS + tl.arange(0, BLOCK_WORDS)
    used = used[:, None] & (column < words)[None, :]
    cache_ptr += tl.program_id(2).to(tl.int64) * stride_layer
    entries = tl.load(cache_ptr + source[:, None] + column[None, :], mask=used)
    tl.debug_barrier()  # nothing is written until everybody has read
    tl.store(cache_ptr + target[:, None] + column[None, :], entries, mask=used)


def config(moves: int, words: int) -> dict[str, int]:
    """Blocks of at most 8192 words, 64 a thread, in registers."""
    moves = block(moves)
    return {"BLOCK_MOVES": moves, "BLOCK_WORDS": min(block(words), max(8192 // moves, 4), 512)}


def launch(cache: Tensor, source: Tensor, start: Tensor, count: Tensor, block_table: Tensor | None = None) -> None:
    """As `kv_commit`, without its checks. Allocates nothing and does not wait: it can be captured."""
    layers, _, page_size, heads, width = cache.shape
    rows, moves = source.shape
    assert all(t.is_contiguous() for t in (source, start, count)) and (
        block_table is None or block_table.is_contiguous()
    )
    # the widest integers that the sizes, the strides and the address allow
    place = (heads * width, cache.storage_offset(), *cache.stride()[:3])
    size = math.gcd(4, cache.data_ptr(), *(n * cache.element_size() for n in place))
    entries = cache.as_strided((*cache.shape[:3], heads * width), (*cache.stride()[:3], 1)).view(WORDS[size])
    words, table_width = entries.shape[-1], 1 if block_table is None else block_table.shape[1]
    blocks = config(moves, words)
    _commit_kernel[(triton.cdiv(words, blocks["BLOCK_WORDS"]), rows, layers)](
        entries, source, start, count, block_table, moves, table_width * page_size, words, table_width, page_size,
        *entries.stride()[:3], **blocks, num_warps=4,
    )  # fmt: skip


@torch.library.custom_op("specdec::kv_commit", mutates_args=("cache",), device_types="cuda")
def _op(cache: Tensor, source: Tensor, start: Tensor, count: Tensor, block_table: Tensor | None) -> None:
    source, start, count = (t.contiguous() for t in (source, start, count))
    launch(cache, source, start, count, None if block_table is None else block_table.contiguous())


@_op.register_kernel("cpu")
def _cpu(cache: Tensor, source: Tensor, start: Tensor, count: Tensor, block_table: Tensor | None) -> None:
    if not (INTERPRETED or _native.library):
        return reference.kv_commit(cache, source, start, count, block_table)
    source, start, count = (t.contiguous() for t in (source, start, count))
    block_table = None if block_table is None else block_table.contiguous()
    if INTERPRETED:
        return launch(cache, source, start, count, block_table)
    size, (layers, _, page_size, heads, width) = cache.element_size(), cache.shape
    strides = (n * size for n in cache.stride()[:3])
    table_width = 1 if block_table is None else block_table.shape[1]
    return _native.call(
        "kv_commit", cache.data_ptr(), source, start, count, block_table,
        layers, *source.shape, table_width, page_size, heads * width * size, *strides,
    )  # fmt: skip


@_op.register_fake
def _fake(cache: Tensor, source: Tensor, start: Tensor, count: Tensor, block_table: Tensor | None) -> None:
    return None


def kv_commit(cache: Tensor, source: Tensor, start: Tensor, count: Tensor, block_table: Tensor | None = None) -> None:
    """Moves accepted cache entries into place, in place; see the module's docstring.

    Args:
        cache: [L, B, S, H, D] (L = all layers, keys and values alike), or [L, pages, page_size, H, D] with a block
            table; any dtype of 1, 2, 4 or 8 bytes, any strides of the first three dimensions.
        source: [B, M] int64, slots to move, in path order; start: [B] int64, the first slot to fill; count: [B] int64,
            how many of them, the others are padding.
        block_table: [B, pages of a row] int64; those of the slots in use have to exist.
    Raises:
        ValueError: shapes that do not fit, entries that are not contiguous, more than 1024 moves.

    >>> cache = torch.arange(6).view(1, 1, 6, 1, 1)
    >>> kv_commit(cache, torch.tensor([[3, 5]]), torch.tensor([2]), torch.tensor([2]))
    >>> cache.flatten()
    tensor([0, 1, 3, 5, 4, 5])
    """
    rows, moves = source.shape
    if cache.dim() != 5 or (block_table is None and cache.shape[1] != rows) or cache.element_size() not in (1, 2, 4, 8):
        raise ValueError(
            f"kv_commit: the cache is {cache.dtype} {list(cache.shape)}; expected [L, {rows}, S, H, D] of 1, 2, 4 or 8 "
            f"bytes each, for source {list(source.shape)}"
        )
    if any(n > 1 and s != t for n, s, t in zip(cache.shape[3:], cache.stride()[3:], (cache.shape[4], 1), strict=True)):
        raise ValueError(f"kv_commit: the cache has strides {cache.stride()}; expected contiguous [H, D] entries")
    expected = {"start": (start, [rows]), "count": (count, [rows])}
    if block_table is not None:
        expected["block_table"] = (block_table, [rows, block_table.shape[-1]])
    for name, (tensor, shape) in {"source": (source, [rows, moves]), **expected}.items():
        if list(tensor.shape) != shape or tensor.dtype != torch.int64:
            raise ValueError(f"kv_commit: {name} is {tensor.dtype} {list(tensor.shape)}; expected int64 {shape}")
    if moves > MAX_MOVES:
        raise ValueError(f"kv_commit: {moves} moves; expected at most {MAX_MOVES}")
    if moves and cache.numel():
        _op(cache, source, start, count, block_table)


_ARGUMENTS = {
    "cache_ptr": "*i32:16",
    **dict.fromkeys(("source_ptr", "start_ptr", "count_ptr"), "*i64:16"),
    **dict.fromkeys(("moves", "slots"), "i32"),
    "words": "i32:16",
    **dict.fromkeys(("table_width", "page_size"), "i32"),
    **dict.fromkeys(("stride_layer", "stride_row", "stride_slot"), "i64:16"),
}
_TABLE = {"": ({}, {"table_ptr": None}), "_paged": ({"table_ptr": "*i64:16"}, {})}
VARIANTS = [
    Variant(
        f"kv_commit{suffix}",
        _commit_kernel,
        {**_ARGUMENTS, **argument},
        {**constant, **config(64, 512)},
        wide_loads=True,
        grid=("cdiv(words, BLOCK_WORDS)", "rows", "layers"),
    )
    for suffix, (argument, constant) in _TABLE.items()
]
