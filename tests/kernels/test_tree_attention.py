"""Tree attention against fp64, and the failures that other tree kernels have had: D18, D19, D20, D25."""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from specdec_kernels import ancestor_words, ancestors, merge_attention, reference, tree_attention
from specdec_kernels._lang import INTERPRETED
from specdec_kernels.aot import TARGETS
from specdec_kernels.tree_attention_kernel import PROCESSORS, config, launch, workspace

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    # the interpreter of Triton 3.6 in a loop whose bounds are found on the device; it wants numpy below 2.4 for those
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
]

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16


class Case:
    """Random trees behind ragged prefixes in a cache whose entries behind the stream are NaN.

    `arguments` and `options` are those of the op; `seen` [B, T, S] is which entries each query sees, `window` left out.
    """

    def __init__(self, heads=(4, 2), dim=64, nodes=17, prefix=(31,), dtype=FP32, queries=None, device="cpu", seed=0):
        made = torch.Generator().manual_seed(seed)
        rows, queries = len(prefix), nodes if queries is None else queries
        parents = torch.tensor([[-1] + [int(torch.rand(1, generator=made) * i) for i in range(1, nodes)]] * rows)
        self.visible = ancestors(parents)[:, nodes - queries :]
        self.depths = ancestors(parents).sum(-1) - 1
        self.capacity = max(prefix) + nodes + 5
        # keys and values as the decoder's cache holds them: [planes, B, S, Hkv, D], and one head too many
        cache = torch.randn(4, rows, self.capacity, heads[1] + 1, dim, generator=made)
        for row, length in enumerate(prefix):
            cache[:, row, max(length + nodes, 0) :] = float("nan")
        cache = cache.to(dtype).to(device)
        query = torch.randn(rows, heads[0], queries, dim, generator=made).to(dtype).to(device).transpose(1, 2)
        self.prefix = torch.tensor(prefix, device=device)
        words = ancestor_words(self.visible.to(device))
        self.arguments = [query, cache[1, :, :, 1:], cache[3, :, :, 1:], self.prefix, words, nodes]
        self.seen = torch.zeros(rows, queries, self.capacity, dtype=torch.bool)
        for row, length in enumerate(prefix):
            self.seen[row, :, : max(length, 0)] = True
            first = max(-length, 0)
            self.seen[row, :, length + first : length + nodes] = self.visible[row, :, first:]

    def expected(self, seen=None, dtype=torch.float64):
        """Output and LSE by dense products in `dtype`, over what is seen."""
        query, keys, values = (x.cpu().to(dtype) for x in self.arguments[:3])
        seen = (self.seen if seen is None else seen)[:, :, None]
        groups = query.shape[2] // keys.shape[2]
        keys, values = (x.nan_to_num().repeat_interleave(groups, dim=2) for x in (keys, values))
        score = torch.einsum("bthd,bnhd->bthn", query, keys) / math.sqrt(query.shape[-1])
        score = score.masked_fill(~seen, float("-inf"))
        lse = score.logsumexp(-1)
        return torch.einsum("bthn,bnhd->bthd", score.softmax(-1).nan_to_num(), values), lse

    def sdpa(self):
        """torch's own attention in the same dtype."""
        query, keys, values = (x.cpu().nan_to_num().transpose(1, 2) for x in self.arguments[:3])
        out = F.scaled_dot_product_attention(query, keys, values, attn_mask=self.seen[:, None], enable_gqa=True)
        return out.transpose(1, 2)

    def check(self, got, seen=None):
        out, lse = (x.cpu() for x in got)
        expected, expected_lse = self.expected(seen)
        if out.dtype == FP32:
            assert (out - expected).abs().max() < 1e-5
        else:
            ulp = torch.finfo(out.dtype).eps * expected.abs().max()
            if seen is None:
                ulp += 2 * (self.sdpa() - self.expected()[0]).nan_to_num().abs().max()
            else:
                ulp *= 4
            assert (out - expected).abs().max() <= ulp
        empty = expected_lse == float("-inf")
        assert torch.equal(lse == float("-inf"), empty)
        assert (
            (lse - expected_lse)[~empty].abs().amax() < (1e-5 if out.dtype == FP32 else 1e-3) if not empty.all() else 1
        )
        assert (out[empty] == 0).all()


COVERING = [  # heads, head size, nodes, prefix
    ((4, 4), 16, 1, 0),
    ((4, 4), 80, 17, 257),
    ((4, 2), 64, 5, 31),
    ((4, 2), 128, 33, 1),
    ((4, 2), 96, 64, 0),
    ((8, 1), 64, 17, 257),
    ((8, 1), 80, 31, 1),
    ((8, 1), 128, 64, 31),
    ((7, 1), 16, 33, 257),
    ((7, 1), 96, 5, 1),
    ((7, 1), 64, 32, 0),
    ((7, 1), 128, 1, 257),
    ((2, 1), 256, 5, 31),
    ((2, 2), 20, 17, 33),
]


@pytest.mark.parametrize(("heads", "dim", "nodes", "prefix"), COVERING)
@pytest.mark.parametrize("dtype", [FP32, FP16, BF16], ids=["fp32", "fp16", "bf16"])
def test_against_fp64(device: str, heads, dim, nodes, prefix, dtype) -> None:
    if dtype == BF16 and device == "cpu" and INTERPRETED:
        pytest.skip("bf16 arithmetic is wrong in the interpreter")
    case = Case(heads, dim, nodes, [prefix], dtype, device=device)
    case.check(tree_attention(*case.arguments))


@pytest.mark.parametrize("splits", [1, 2, 3, 7])
@pytest.mark.parametrize("prefix", [[257, 1, 100], [0, 2, 0], [-3, 31, -17]], ids=str)
def test_ragged_rows_and_splits(device: str, prefix, splits: int) -> None:
    """Seven parts of one to five tiles: some have no entry, and the second row's first has none of the tree's."""
    case = Case((4, 1), 32, 17, prefix, queries=3, device=device)
    case.check(tree_attention(*case.arguments, splits=splits))


def test_count_on_the_device(device: str) -> None:
    """Slots behind the row's count are neither seen nor read, whatever their bits are."""
    case = Case(prefix=[40, 0, 7], nodes=9, device=device)
    count = [9, 4, 0]
    for row, (length, exist) in enumerate(zip([40, 0, 7], count, strict=True)):
        case.seen[row, :, length + exist :] = False
        for x in case.arguments[1:3]:
            x[row, length + exist :] = float("nan")
    case.arguments[4].fill_(-1)
    for row, (length, exist) in enumerate(zip([40, 0, 7], count, strict=True)):
        case.seen[row, :, length : length + exist] = True
    case.check(tree_attention(*case.arguments, count=torch.tensor(count, device=device)))


@pytest.mark.parametrize("size", [16, 24, 128])
def test_pages_equal_contiguous(device: str, size: int) -> None:
    """Pages in any order, smaller than a tile or larger; those that no row uses hold NaN."""
    case = Case(prefix=[100, 33], nodes=17, device=device)
    query, keys, values, *rest = case.arguments
    per_row = -(-case.capacity // size)
    pages = torch.randperm(2 * per_row + 3, generator=torch.Generator().manual_seed(1))
    table = pages[: 2 * per_row].view(2, per_row)
    padded = (
        F.pad(x.cpu(), (0, 0, 0, 0, 0, per_row * size - case.capacity), value=float("nan")) for x in (keys, values)
    )
    paged = []
    for x in padded:
        store = x.new_full((len(pages), size, *x.shape[2:]), float("nan"))
        store[table] = x.unflatten(1, (per_row, size))
        paged.append(store.to(device))
    table = table.int().to(device)
    got = tree_attention(query, *paged, *rest, block_table=table)
    case.check(got)
    for x, y in zip(got, tree_attention(*case.arguments), strict=True):
        assert torch.allclose(x, y, rtol=0, atol=1e-6)


@pytest.mark.parametrize("nodes", [1, 31, 32, 33, 63, 64, 65])
def test_visible_set_read_off_the_output(device: str, nodes: int) -> None:
    """D19. Equal scores and one-hot values: what is not zero in the output is what was seen."""
    case = Case((2, 1), 128, nodes, [3, 40], device=device)
    query, keys, _, *rest = case.arguments
    one_hot = torch.eye(case.capacity, 128, device=device).expand(2, 1, -1, -1).transpose(1, 2)
    out, lse = tree_attention(torch.zeros_like(query), torch.zeros_like(keys), one_hot, *rest)
    for head in range(2):
        assert torch.equal(out[:, :, head, : case.capacity].cpu() > 0, case.seen)
        assert torch.allclose(lse[:, :, head].cpu(), case.seen.sum(-1).float().log())


def test_a_layer_of_the_tree_equals_its_rows_of_the_whole(device: str) -> None:
    """A draft layer's queries are a subset of the nodes, in any number."""
    case = Case(nodes=21, prefix=[45], device=device)
    query, keys, values, prefix, words, nodes = case.arguments
    whole = tree_attention(*case.arguments)
    part = tree_attention(query[:, 6:13], keys, values, prefix, words[:, 6:13], nodes)
    for x, y in zip(whole, part, strict=True):
        assert torch.allclose(x[:, 6:13], y, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("window", "splits"), [(1, 1), (3, 3), (40, 3), (100, 1), (1000, 3)])
def test_window_in_positions(device: str, window: int, splits: int) -> None:
    """Siblings share a position, so a slot's distance is one of depths, not of entries."""
    case = Case((4, 2), 32, 19, [150, 50, 0], device=device)
    for row, query in itertools.product(range(3), range(19)):
        length = int(case.prefix[row])
        here = length + int(case.depths[row, query])
        for entry in range(case.capacity):
            slot = entry - length
            position = entry if slot < 0 else length + int(case.depths[row, min(slot, 18)])
            case.seen[row, query, entry] &= here - position < window
    depths = case.depths.to(device)
    got = tree_attention(*case.arguments, window=window, depths=depths, slot_depths=depths, splits=splits)
    case.check(got)


@pytest.mark.parametrize("splits", [1, 3])
def test_scores_far_below_any_sentinel(device: str, splits: int) -> None:
    """D20. All visible scores are -1e5: the output is the mean of the visible values all the same."""
    case = Case((4, 2), 16, 9, [70], device=device)
    query, keys, values, *rest = case.arguments
    query, keys = torch.zeros_like(query), torch.zeros_like(keys)
    query[..., 0], keys[..., 0] = -1e5, 1.0
    out, lse = tree_attention(query, keys, values, *rest, scale=1.0, splits=splits)
    weight = case.seen.double() / case.seen.sum(-1, keepdim=True)
    mean = torch.einsum("btn,bnhd->bthd", weight, values.cpu().double().nan_to_num()).repeat_interleave(2, dim=2)
    assert (out.cpu() - mean).abs().max() < 1e-5
    assert (lse + 1e5).abs().max() < 10


@pytest.mark.parametrize("splits", [1, 3])
def test_nothing_to_see(device: str, splits: int) -> None:
    """D20. No prefix and no bit: output 0 and LSE -inf, and the rows beside it are right."""
    case = Case(prefix=[0, 65], nodes=5, device=device)
    case.arguments[4][:, 2] = 0
    case.seen[0, 2] = False
    case.seen[1, 2, 65:] = False
    case.check(tree_attention(*case.arguments, splits=splits))


def test_merge(device: str) -> None:
    """Over two disjoint sets; an empty part changes nothing, even where its output is NaN."""
    made = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, 3, 5, 7, 24, generator=made).to(device)
    lse_a, lse_b = 5 * torch.randn(2, 3, 5, 7, generator=made).to(device)
    nothing, dead = torch.full_like(lse_a, float("-inf")), torch.full_like(a, float("nan"))
    out, lse = merge_attention(a, lse_a, b, lse_b)
    weight = torch.sigmoid(lse_a.double() - lse_b.double())[..., None]
    assert (out - (weight * a + (1 - weight) * b)).abs().max() < 1e-6
    assert (lse - torch.logaddexp(lse_a.double(), lse_b.double())).abs().max() < 2e-6
    for got, expected in zip(reference.merge_attention(a, lse_a, b, lse_b), (out, lse), strict=True):
        assert torch.allclose(got, expected, atol=2e-6)
    for got in (merge_attention(a, lse_a, dead, nothing), merge_attention(dead, nothing, a, lse_a)):
        assert torch.equal(got[0], a) and torch.equal(got[1], lse_a)
    out, lse = merge_attention(dead, nothing, dead, nothing)
    assert (out == 0).all() and torch.equal(lse, nothing)
    broken = merge_attention(a, torch.full_like(lse_a, float("nan")), b, lse_b)
    assert broken[0].isnan().all() and broken[1].isnan().all()


def flash_attn_with_kvcache(
    q, k_cache, v_cache, *, cache_seqlens, block_table, softmax_scale, causal, return_softmax_lse
):
    """flash-attn's contract: LSE [B, Hq, T], and +inf of a query without a key."""
    assert cache_seqlens.dtype == torch.int32 and not causal and return_softmax_lse and block_table is None
    words = torch.zeros(*q.shape[:2], 1, dtype=torch.int32, device=q.device)
    out, lse = reference.tree_attention(q, k_cache, v_cache, cache_seqlens.long(), words, 1, softmax_scale)
    return out, lse.masked_fill(lse == float("-inf"), float("inf")).transpose(1, 2)


@pytest.mark.parametrize("dtype", [FP32, FP16])
def test_flash_backend(device: str, dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The prefix by (a stand-in for) flash-attn, the tree by the kernel, merged."""
    stand_in = SimpleNamespace(flash_attn_with_kvcache=flash_attn_with_kvcache)
    monkeypatch.setitem(sys.modules, "flash_attn", stand_in)
    case = Case((4, 2), 64, 33, [70, 0], dtype, device=device)
    case.check(tree_attention(*case.arguments, backend="flash"))


def test_flash_backend_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    case = Case()
    with pytest.raises(ImportError, match="pip install flash-attn"):
        tree_attention(*case.arguments, backend="flash")
    zeros = torch.zeros(1, 17, dtype=torch.long)
    with pytest.raises(ValueError, match="window in entries"):
        tree_attention(*case.arguments, backend="flash", window=4, depths=zeros, slot_depths=zeros)


def test_wrong_shapes_are_refused() -> None:
    """D19. Every argument, one column less, transposed, or of another batch."""
    query, keys, values, prefix, words, nodes = Case(nodes=33, prefix=[3, 5]).arguments
    depths = torch.zeros(2, 33, dtype=torch.long)
    windowed = {"window": 4, "depths": depths, "slot_depths": depths}
    for arguments, options, match in [
        ((query[..., :-1], keys, values, prefix, words, nodes), {}, "keys"),
        ((query[0], keys, values, prefix, words, nodes), {}, "query"),
        ((query, keys, values[:, 1:], prefix, words, nodes), {}, "values"),
        ((query[:, :, :3], keys, values, prefix, words, nodes), {}, "3 query heads on 2 key heads"),
        ((query[..., :8], keys[..., :8], values[..., :8], prefix, words, nodes), {}, "size 8"),
        ((query.half(), keys, values, prefix, words, nodes), {}, "torch.float16"),
        ((query, keys[:1], values[:1], prefix, words, nodes), {}, "keys"),
        ((query, keys, values, prefix[:1], words, nodes), {}, "prefix"),
        ((query, keys, values, prefix.float(), words, nodes), {}, "prefix of torch.float32"),
        ((query, keys, values, prefix, words[..., :1], nodes), {}, r"words \[2, 33, 1\]; expected \[2, 33, 2\]"),
        ((query, keys, values, prefix, words[:, 1:], nodes), {}, "words"),
        ((query, keys, values, prefix, words.transpose(1, 2), nodes), {}, "words"),
        ((query, keys, values, prefix, words[:1], nodes), {}, "words"),
        ((query, keys, values, prefix, words.long(), nodes), {}, "words of torch.int64"),
        ((query, keys, values, prefix, words, 65), {}, "words"),
        ((query, keys, values, prefix, words, nodes), {"count": prefix[:1]}, "count"),
        ((query, keys, values, prefix, words, nodes), {"block_table": prefix}, "block_table"),
        ((query, keys, values, prefix, words, nodes), {"window": 4}, "with depths"),
        ((query, keys, values, prefix, words, nodes), {**windowed, "depths": depths[:, 1:]}, "depths"),
        ((query, keys, values, prefix, words, nodes), {**windowed, "slot_depths": depths[:1]}, "slot_depths"),
        ((query, keys, values, prefix, words, nodes), {**windowed, "window": 0}, "window 0"),
        ((query, keys, values, prefix, words, nodes), {"backend": "sdpa"}, "'triton' or 'flash'"),
    ]:
        with pytest.raises(ValueError, match=match):
            tree_attention(*arguments, **options)
    zeros = torch.zeros(2, 3)
    with pytest.raises(ValueError, match="twice"):
        merge_attention(zeros, zeros[:, 0], zeros, zeros)
    with pytest.raises(ValueError, match="LSEs of float32"):
        merge_attention(zeros, zeros[:, 0], zeros, zeros[:, 0].double())


@given(slots=st.integers(1, 70), seed=st.integers(0, 99))
def test_words(slots: int, seed: int) -> None:
    visible = torch.rand(2, 3, slots, generator=torch.Generator().manual_seed(seed)) < 0.5
    words = ancestor_words(visible)
    assert words.shape == (2, 3, -(-slots // 32)) and words.dtype == torch.int32
    for row, query in itertools.product(range(2), range(3)):
        value = sum((word % 2**32) << (32 * i) for i, word in enumerate(words[row, query].tolist()))
        assert [value >> s & 1 for s in range(32 * words.shape[2])][:slots] == visible[row, query].int().tolist()
        assert value < 2**slots


@pytest.mark.parametrize("paged", [False, True])
def test_reference(paged: bool) -> None:
    """The specification itself, and the mask that the CPU's path uses."""
    case = Case(prefix=[12, 0, -2], nodes=9)
    if paged:
        table = torch.arange(3)[:, None].int()
        case.check(reference.tree_attention(*case.arguments, 1 / 8, block_table=table))
    else:
        case.check(reference.tree_attention(*case.arguments, 1 / 8))
    seen = reference.visible_entries(*case.arguments[3:], case.capacity)
    assert torch.equal(seen, case.seen)
    tree = reference.visible_entries(*case.arguments[3:], case.capacity, tree_only=True)
    before = torch.arange(case.capacity) < case.prefix[:, None]
    assert torch.equal(tree, case.seen & ~before[:, None])


@pytest.mark.parametrize("height", [16, 64])
def test_launch_can_be_repeated(device: str, height: int) -> None:
    """The same bits from the same workspace, whose counters are zero again; rows of the product in several blocks."""
    if device == "cpu" and not INTERPRETED:
        pytest.skip("a Triton launch needs a GPU or the interpreter")
    case = Case((7, 1), 32, 5, [90, 3], device=device)
    options = {"BLOCK_M": height, "BLOCK_N": 32, "num_warps": 4, "num_stages": 2, "splits": 3}
    room = workspace(case.arguments[0], 1, options)
    results = []
    for _ in range(2):
        out, lse = torch.full_like(case.arguments[0], float("nan")).contiguous(), torch.full((2, 5, 7), float("nan"))
        out, lse = out.to(device), lse.to(device)
        launch(out, lse, *case.arguments, 1 / math.sqrt(32), None, None, None, None, None, False, room, options)
        results.append((out, lse))
        assert (room.arrived == 0).all() and len(room.arrived) == 2 * -(-35 // height)
    case.check(results[0])
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))


@pytest.mark.parametrize("arch", TARGETS)
def test_config(arch: str) -> None:
    """Every choice is one that the kernel takes, and fills the machine without more parts than it has tiles for."""
    for queries, capacity, dim, bits in itertools.product((1, 16, 61), (64, 2048, 32768), (16, 80, 128, 256), (16, 32)):
        found = config(1, queries, 32, 8, capacity, dim, bits, arch)
        assert found["BLOCK_M"] in (16, 32, 64, 128) and found["BLOCK_N"] in (32, 64, 128)
        assert 1 <= found["splits"] <= max(capacity // found["BLOCK_N"], 1)
        units = 8 * -(-queries * 4 // found["BLOCK_M"])
        assert found["splits"] == 1 or units * found["splits"] <= 2 * PROCESSORS[arch]
    assert config(64, 61, 32, 8, 32768, 128, 16, arch)["splits"] == 1


FAR = """
import torch
from specdec_kernels import ancestor_words, tree_attention
stride = 2**30 + 8
base = torch.empty(2 * stride + 16, dtype=torch.float16)  # 4.3 GB of pages that nothing touches
entries = base.as_strided((1, 3, 1, 16), (0, stride, 16, 1))
for entry in range(3):
    entries[0, entry] = entry + 1
words = ancestor_words(torch.ones(1, 1, 1, dtype=torch.bool))
query = torch.zeros(1, 1, 1, 16, dtype=torch.float16)
prefix = torch.tensor([2])
out, _ = tree_attention(query, entries, entries, prefix, words, 1)
assert (out == 2).all(), out
paged = base.as_strided((3, 1, 1, 16), (stride, 16, 16, 1))
table = torch.tensor([[2, 0, 1]], dtype=torch.int32)
out, _ = tree_attention(query, paged, paged, prefix, words, 1, block_table=table)
assert (out == 2).all(), out
"""


@pytest.mark.kernel
def test_offsets_past_two_to_the_31() -> None:
    """D25, in a process of its own: with 32-bit offsets it would die."""
    done = subprocess.run([sys.executable, "-c", FAR], capture_output=True, text=True, env=os.environ)
    assert done.returncode == 0, done.stderr[-2000:]


def test_opcheck() -> None:
    query, keys, values, prefix, words, nodes = Case().arguments
    case = query, keys, values, prefix, words, nodes, 0.125, None, None, None, None, None, False, 0
    torch.library.opcheck(torch.ops.specdec.tree_attention.default, case)
    zeros = torch.zeros(3, 16)
    torch.library.opcheck(torch.ops.specdec.merge_attention.default, (zeros, zeros[:, 0], zeros, zeros[:, 0]))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, about itself
def test_compile_traces_it() -> None:
    case = Case()
    compiled = torch.compile(tree_attention, fullgraph=True)
    case.check(compiled(*case.arguments))
