"""Moving cache entries: against loops, for any order of sources, any strides, every dtype, and pages."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from specdec_kernels import kv_commit, reference
from specdec_kernels.kv_commit import config

pytestmark = pytest.mark.usefixtures("one_thread")
DTYPES = (
    torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.bool, torch.complex64,
    torch.float8_e4m3fn,
)  # fmt: skip


def random_cache(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Random bits, NaNs of all kinds among them; bools are 0 or 1."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.empty(0, dtype=dtype).element_size()
    high = 2 if dtype == torch.bool else 256
    bits = torch.randint(0, high, (*shape[:-1], shape[-1] * size), dtype=torch.uint8, generator=generator)
    return bits.view(dtype)


def bits(cache: torch.Tensor) -> torch.Tensor:
    return cache.contiguous().view(torch.uint8).cpu()


def moved(cache, source, start, count, block_table=None):
    """The definition, as loops."""
    new, page = cache.clone(), cache.shape[2]

    def place(row, slot):
        return (row, slot) if block_table is None else (int(block_table[row, slot // page]), slot % page)

    slots = page if block_table is None else page * block_table.shape[1]
    for row in range(len(start)):
        for i in range(min(int(count[row]), source.shape[1])):
            old, target = int(source[row, i]), int(start[row]) + i
            if 0 <= old < slots and 0 <= target < slots:
                (a, b), (c, d) = place(row, old), place(row, target)
                new[:, c, d] = cache[:, a, b]
    return new


@st.composite
def moves(draw, rows: int, slots: int):
    """Sources in any order, doubled, and outside the row; counts beyond the width."""
    width = draw(st.integers(1, 6))
    source = draw(st.lists(st.integers(-2, slots + 1), min_size=rows * width, max_size=rows * width))
    start = draw(st.lists(st.integers(-1, slots), min_size=rows, max_size=rows))
    count = draw(st.lists(st.integers(-1, width + 1), min_size=rows, max_size=rows))
    return torch.tensor(source).view(rows, width), torch.tensor(start), torch.tensor(count)


VIEWS = {
    "all": lambda cache: cache,
    "rows": lambda cache: cache[:, 1:],
    "slots": lambda cache: cache[:, :, 1:-1],
    "layers last": lambda cache: cache.permute(2, 0, 1, 3, 4),
}


@settings(max_examples=40)
@given(data=st.data(), dtype=st.sampled_from(DTYPES), heads=st.integers(1, 3), width=st.sampled_from([1, 3, 8, 16]))
def test_moves(device: str, data, dtype: torch.dtype, heads: int, width: int) -> None:
    """D10: moves that overlap, in views of a larger buffer; every other bit stays."""
    buffer = random_cache((3, data.draw(st.integers(2, 3)), data.draw(st.integers(3, 9)), heads, width), dtype, width)
    view = VIEWS[data.draw(st.sampled_from(sorted(VIEWS)))]
    rows, slots = view(buffer).shape[1:3]
    case = data.draw(moves(rows, slots))
    expected = buffer.clone()
    view(expected).copy_(moved(view(buffer), *case))
    buffer = buffer.to(device)
    kv_commit(view(buffer), *(x.to(device) for x in case))
    assert torch.equal(bits(buffer), bits(expected))


@settings(max_examples=30)
@given(data=st.data(), dtype=st.sampled_from(DTYPES[:3]), page=st.sampled_from([1, 2, 4]), pages=st.integers(1, 3))
def test_pages(device: str, data, dtype: torch.dtype, page: int, pages: int) -> None:
    rows = data.draw(st.integers(1, 3))
    cache = random_cache((2, rows * pages + 2, page, 2, 4), dtype, seed=page)
    table = torch.tensor(data.draw(st.permutations(range(rows * pages + 2)))[: rows * pages]).view(rows, pages)
    case = data.draw(moves(rows, page * pages))
    expected = moved(cache, *case, table)
    held = cache.clone()
    reference.kv_commit(held, *case, table)
    assert torch.equal(bits(held), bits(expected))
    cache = cache.to(device)
    kv_commit(cache, *(x.to(device) for x in (*case, table)))
    assert torch.equal(bits(cache), bits(expected))


@settings(max_examples=30)
@given(case=moves(2, 7))
def test_the_reference(case) -> None:
    cache = random_cache((2, 2, 7, 1, 3), torch.float32, 0)
    expected = moved(cache, *case)
    reference.kv_commit(cache, *case)
    assert torch.equal(bits(cache), bits(expected))


@pytest.mark.parametrize(("width", "count"), [(60, 60), (64, 7), (1024, 1000)])
def test_a_rotation(device: str, width: int, count: int) -> None:
    """Every slot is both read and written, at the largest sizes; entries wider than a block and than the C++ buffer."""
    cache = random_cache((1, 2, width + 1, 2, 300 if width < 100 else 24), torch.float16, 1).to(device)
    source = ((torch.arange(width) * 7 + 3) % count).repeat(2, 1).to(device)
    case = source, torch.zeros(2, dtype=torch.long, device=device), torch.tensor([count, 0], device=device)
    expected = moved(cache, *case)
    kv_commit(cache, *case)
    assert torch.equal(bits(cache), bits(expected))


def test_offsets_beyond_int32(device: str) -> None:
    """D25: planes more than 2**31 elements apart; the pages between are never touched."""
    stride = 2**31 + 16
    base = torch.empty(stride + 64, dtype=torch.int8, device=device)
    cache = base.as_strided((2, 1, 4, 1, 16), (stride, 64, 16, 16, 1))
    cache.copy_(torch.arange(8, device=device).view(2, 1, 4, 1, 1).expand_as(cache))
    kv_commit(cache, *(torch.tensor(x, device=device) for x in ([[3, 0]], [1], [2])))
    assert cache[..., 0].flatten().tolist() == [0, 3, 0, 3, 4, 7, 4, 7]


def test_blocks_fit_in_registers() -> None:
    for width in (1, 2, 7, 60, 64, 100, 1024):
        blocks = config(width, 5000)
        assert width <= blocks["BLOCK_MOVES"] and blocks["BLOCK_MOVES"] * blocks["BLOCK_WORDS"] <= 8192


def test_what_does_not_fit_is_refused() -> None:
    cache, slots, row = torch.zeros(2, 1, 4, 2, 8), torch.tensor([[1]]), torch.tensor([0])
    with pytest.raises(ValueError, match=r"the cache is torch.float32 \[2, 1, 4, 16\]; expected \[L, 1, S, H, D\]"):
        kv_commit(cache.flatten(3), slots, row, row)
    with pytest.raises(ValueError, match=r"expected \[L, 2, S, H, D\]"):
        kv_commit(cache, slots.repeat(2, 1), row.repeat(2), row.repeat(2))
    with pytest.raises(ValueError, match=r"complex128"):
        kv_commit(cache.to(torch.complex128), slots, row, row)
    with pytest.raises(ValueError, match=r"expected contiguous \[H, D\] entries"):
        kv_commit(cache[..., ::2], slots, row, row)
    with pytest.raises(ValueError, match=r"start is torch.int32 \[1\]; expected int64 \[1\]"):
        kv_commit(cache, slots, row.int(), row)
    with pytest.raises(ValueError, match=r"block_table is torch.int64 \[2, 1\]; expected int64 \[1, 1\]"):
        kv_commit(cache, slots, row, row, torch.zeros(2, 1, dtype=torch.long))
    with pytest.raises(ValueError, match="1025 moves; expected at most 1024"):
        kv_commit(cache, slots.repeat(1, 1025), row, row)


def test_nothing_to_move() -> None:
    cache = torch.ones(2, 1, 4, 2, 8)
    kv_commit(cache, torch.zeros(1, 0, dtype=torch.long), torch.tensor([0]), torch.tensor([0]))
    kv_commit(cache[:, :, :0], torch.tensor([[1]]), torch.tensor([0]), torch.tensor([1]))
    assert (cache == 1).all()


CASE = torch.tensor([[3, 2], [1, -1]]), torch.tensor([1, 0]), torch.tensor([2, 1])


@pytest.mark.parametrize("table", [None, torch.tensor([[0], [1]])])
def test_opcheck(table) -> None:
    torch.library.opcheck(torch.ops.specdec.kv_commit.default, (torch.randn(2, 2, 4, 1, 2), *CASE, table))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, about itself
def test_compile_traces_it() -> None:
    cache = torch.randn(2, 2, 4, 1, 2)
    expected = moved(cache, *CASE)
    torch.compile(kv_commit, fullgraph=True)(cache, *CASE)
    assert torch.equal(cache, expected)
