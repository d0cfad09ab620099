"""Draws: the same words, the same noise to the last bit, and so the same token, in C++, in Triton and in torch."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import plain
from specdec_kernels import _native, greedy_tokens, reference, sample_tokens
from specdec_kernels._lang import INTERPRETED, tl, triton
from specdec_kernels.sample_tokens import _gumbel, _gumbel_bound, _referred, config

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore::RuntimeWarning")]  # NumPy's
INF, NAN = math.inf, math.nan
DTYPES = [torch.float32, torch.float16, *([] if INTERPRETED else [torch.bfloat16])]
odd = st.sampled_from([0.0, -0.0, 1.0, 1.0, -2.0, 3.5, 3.5, -60.0, INF, -INF, NAN])


@triton.jit
def _noise_kernel(noise_ptr, bound_ptr, word_ptr, n, BLOCK: tl.constexpr):
    index = tl.arange(0, BLOCK)
    word = tl.load(word_ptr + index, mask=index < n, other=0).to(tl.uint32)
    tl.store(noise_ptr + index, _gumbel(word), mask=index < n)
    tl.store(bound_ptr + index, _gumbel_bound(word), mask=index < n)


def exact_noise(word: np.ndarray) -> np.ndarray:
    """The noise of 32-bit words in extended precision (64 bits on x86), not rounded."""
    v = np.minimum((word.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-32), np.float32(1 - 2.0**-24))
    return -np.log(-np.log(1 - v.astype(np.longdouble)))


def words(n: int) -> torch.Tensor:
    """Both ends, all powers of two with their neighbours, and random ones."""
    ends = [*range(40), *range(2**32 - 600, 2**32)]
    near = [2**k + d for k in range(3, 32) for d in (-1, 0, 1)]
    drawn = torch.randint(0, 2**32, (n - len(ends) - len(near),), generator=torch.Generator().manual_seed(0))
    return torch.cat((torch.tensor(ends + near), drawn))


def test_the_noise_is_the_same_to_the_last_bit(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no bound of it is below it: what a kernel leaves out could not have won."""
    word = words(4096)
    monkeypatch.setattr(reference, "philox", lambda key, counter: word.view(1, 1, -1, 4))
    expected = reference.gumbel(torch.tensor([0]), 0, torch.tensor([[0]]), len(word)).flatten()
    assert np.array_equal(expected.numpy(), (np.round(exact_noise(word.numpy()) * 2**20) / 2**20).astype(np.float32))
    if device == "cpu" and not INTERPRETED:
        noise, bound = torch.empty(2, len(word)).unbind(0)
        _native.call("gumbel", noise, bound, word, len(word))
    else:
        noise, bound = torch.empty(2, len(word), device=device).unbind(0)
        _noise_kernel[(1,)](noise, bound, word.to(device), len(word), BLOCK=4096)
    assert torch.equal(noise.cpu(), expected)
    assert (bound >= noise).all() and (bound[4:] - noise[4:]).max() < 25


@pytest.mark.slow
def test_no_logarithm_can_move_the_noise() -> None:
    """Of all 84 million noise values none is nearer to where the rounding turns than 11 errors of a good logarithm.

    One such error: an ulp of fp64 in the outer logarithm, and one in the inner, at most 2^-52 of its value, which is as
    much as the outer one is off by. CUDA, glibc and torch stay within one ulp for each.
    """
    if np.finfo(np.longdouble).nmant < 63:
        pytest.skip("needs an extended type to measure against")
    seen, nearest = 0, math.inf
    mantissas = np.arange(2**23, 2**24, dtype=np.int64)
    parts = [np.arange(2**23, dtype=np.float64) + 0.5, *(mantissas * 2.0**k for k in range(9))]
    for chunk in itertools.chain.from_iterable(np.array_split(part, 16) for part in parts):
        v = np.minimum(chunk * 2.0**-32, 1 - 2.0**-24)
        assert np.array_equal(v, v.astype(np.float32))
        noise = -np.log(-np.log(1 - v.astype(np.longdouble)))
        scaled = noise * 2**20
        from_turn = np.abs(np.abs(scaled - np.rint(scaled)) - 0.5) / 2**20
        error = np.spacing(np.maximum(np.abs(noise), 2.0**-20).astype(np.float64)) + 2.0**-52
        nearest = min(nearest, float((from_turn / error).min()))
        seen += len(chunk)
    assert seen == 10 * 2**23
    assert nearest > 11


def test_the_words(device: str) -> None:
    """The words are Philox's, for any seed, stream and position.

    The oracle gives Random123's own known answers (test_reference.py). All logits are equal here, so the token is the
    one with the smallest word, whatever noise is made of it.
    """
    seeds = torch.tensor([0, -1, -(2**63), 0x299F31D0_A4093822])
    positions = torch.tensor([[0, 2**31 + 1, 2**32 + 5]]).expand(len(seeds), -1)
    for stream, vocab in ((0, 4), (3, 131)):
        logits = torch.zeros(*positions.shape, vocab)
        found = sample_tokens(logits.to(device), seeds.to(device), stream, positions.to(device)).cpu()
        for row, node in itertools.product(range(len(seeds)), range(positions.shape[1])):
            counters = ((int(positions[row, node]) & 0xFFFFFFFF, stream, i, 0) for i in range((vocab + 3) // 4))
            word = [w for counter in counters for w in plain.philox(counter, int(seeds[row]) & (2**64 - 1))][:vocab]
            assert found[row, node] == int(np.argmin(word))


@settings(max_examples=10 if INTERPRETED else 40)
@given(
    rows=st.lists(st.lists(odd, min_size=6, max_size=6), min_size=1, max_size=4),
    seed=st.integers(-(2**63), 2**63 - 1),
    first=st.integers(0, 2**20),
)
def test_odd_rows(device: str, rows, seed: int, first: int) -> None:
    """D26: -1, or an id of a finite logit. Greedy and drawn, equal to the reference."""
    logits = torch.tensor([rows])
    given_ = torch.tensor([seed]), 1, first + torch.arange(len(rows))[None]
    drawn = sample_tokens(logits.to(device), given_[0].to(device), 1, given_[2].to(device)).cpu()
    greedy = greedy_tokens(logits.to(device)).cpu()
    assert torch.equal(drawn, reference.sample_tokens(logits, *given_))
    assert torch.equal(greedy, reference.perturbed_argmax(logits))
    for row, token, top in zip(rows, drawn[0].tolist(), greedy[0].tolist(), strict=True):
        usable = not any(math.isnan(x) for x in row) and math.isfinite(max(row))
        assert (top == row.index(max(row)) and math.isfinite(row[token])) if usable else (token == top == -1)


def drawn_logits(vocab: int, kind: str) -> torch.Tensor:
    scores = 3 * torch.randn(2, 3, vocab, generator=torch.Generator().manual_seed(vocab))
    if kind == "ties":
        return scores.round()
    if kind == "top-k":  # most of the vocabulary is out
        return scores.masked_fill(scores < scores.topk(min(12, vocab)).values[..., -1:], -INF)
    return scores + 500 * (kind == "far from zero")


@pytest.mark.parametrize(
    ("vocab", "kind"),
    [
        (1, "plain"),
        (3, "ties"),
        (97, "plain"),
        (1023, "top-k"),
        (1029, "far from zero"),
        (1500, "ties"),
        (2600, "plain"),
    ],
)
def test_ragged_vocabularies(device: str, vocab: int, kind: str) -> None:
    """The same token as the reference, always: logits and noise are the same bits, and they are added once."""
    for dtype in DTYPES:
        logits = drawn_logits(vocab, kind).to(dtype)
        seeds, positions = torch.tensor([11, 2**40 + 1]), torch.tensor([[5, 6, 6], [0, 1, 0]])
        found = sample_tokens(logits.to(device), seeds.to(device), 2, positions.to(device))
        assert torch.equal(found.cpu(), reference.sample_tokens(logits, seeds, 2, positions))
        assert torch.equal(greedy_tokens(logits.to(device)).cpu(), reference.perturbed_argmax(logits))


@pytest.mark.parametrize(("bad", "at"), [(NAN, 0), (INF, 127), (NAN, 128), (NAN, 1023), (INF, 1024), (NAN, 2999)])
def test_one_bad_logit_anywhere(device: str, bad: float, at: int) -> None:
    """D26: also among tokens for which no noise is made, since they cannot win."""
    logits = torch.full((1, 2, 3000), -INF, device=device)
    logits[0, :, 1500] = 100.0
    logits[0, 0, at] = bad
    assert greedy_tokens(logits).tolist() == [[-1, 1500]]
    positions = torch.tensor([[1, 2]], device=device)
    assert sample_tokens(logits, torch.tensor([1], device=device), 0, positions).tolist() == [[-1, 1500]]


def test_without_the_native_code(device: str) -> None:
    """The fallback makes the noise of a position once: the same draws."""
    logits, seeds = drawn_logits(60, "plain"), torch.tensor([11, 12])
    positions = torch.tensor([[5, 6, 6], [0, 1, 6]])
    expected = reference.sample_tokens(logits, seeds, 2, positions)
    assert torch.equal(_referred(logits, seeds, 2, positions), expected)
    assert torch.equal(_referred(logits, None, 0, None), reference.perturbed_argmax(logits))


def test_strided_input(device: str) -> None:
    """As a slice of a wider head, as columns, and with inputs that are expanded."""
    wide = drawn_logits(130, "plain")
    seeds, positions = torch.tensor([3]).expand(2), torch.tensor([4]).expand(2, 3)
    for logits in (wide[..., :97], wide[:, 1:], wide.mT.contiguous().mT):
        at = positions[:, : logits.shape[1]]
        found = sample_tokens(logits.to(device), seeds.to(device), 0, at.to(device))
        assert torch.equal(found.cpu(), reference.sample_tokens(logits, seeds, 0, at))


def test_repeated_launches_agree(device: str) -> None:
    logits = drawn_logits(3000, "plain").to(device)
    given_ = torch.tensor([1, 2], device=device), 0, torch.arange(6, device=device).view(2, 3)
    assert torch.equal(sample_tokens(logits, *given_), sample_tokens(logits, *given_))


def test_beyond_2_31_elements(device: str) -> None:
    """D25: rows more than 2**31 elements apart; the pages between are never touched. Alone, since it may crash."""
    script = f"""
        import torch
        from specdec_kernels import greedy_tokens, sample_tokens
        apart = 2**30 + 8
        base = torch.empty(2 * apart + 16, dtype=torch.float16, device={device!r})
        for shape, stride in (((1, 3, 16), (0, apart, 1)), ((3, 1, 16), (apart, 0, 1))):
            rows = base.as_strided(shape, stride)
            rows.copy_(100 * torch.eye(16)[3:6].view(shape))
            seeds, positions = torch.arange(shape[0]).to(rows.device), torch.arange(3).view(shape[:2]).to(rows.device)
            assert greedy_tokens(rows).flatten().tolist() == [3, 4, 5]
            assert sample_tokens(rows, seeds, 0, positions).flatten().tolist() == [3, 4, 5]
        print("right")
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True)
    assert done.stdout == "right\n", done.stderr[-2000:] or done.returncode


def test_other_shapes_are_refused() -> None:
    logits, seeds, positions = torch.zeros(2, 3, 8), torch.zeros(2).long(), torch.zeros(2, 3).long()
    with pytest.raises(ValueError, match=r"greedy_tokens: logits \[3, 8\] torch.float32; expected \[B, M, V\]"):
        greedy_tokens(logits[0])
    with pytest.raises(ValueError, match=r"torch.float64"):
        sample_tokens(logits.double(), seeds, 0, positions)
    with pytest.raises(ValueError, match=r"seeds is torch.int64 \[1\]; expected torch.int64 \[2\]"):
        sample_tokens(logits, seeds[:1], 0, positions)
    with pytest.raises(ValueError, match=r"positions is torch.int32 \[2, 3\]; expected torch.int64 \[2, 3\]"):
        sample_tokens(logits, seeds, 0, positions.int())


def test_nothing_to_draw(device: str) -> None:
    assert greedy_tokens(torch.zeros(1, 0, 8, device=device)).shape == (1, 0)
    none = torch.zeros(0, device=device).long()
    assert sample_tokens(torch.zeros(0, 4, 8, device=device), none, 0, none.view(0, 4)).shape == (0, 4)


def test_programs_cover_the_vocabulary() -> None:
    for rows in (1, 61, 600):
        for vocab in (1, 5, 32000, 151936, 262144):
            options = config(rows, vocab)
            assert options["splits"] <= 64 and options["splits"] * options["BLOCK"] < vocab + options["BLOCK"]


CASE = torch.tensor([[[1.0, 3.0, 2.0], [0.0, 0.0, -1.0]]]), torch.tensor([5]), 1, torch.tensor([[7, 8]])


def test_opcheck() -> None:
    torch.library.opcheck(torch.ops.specdec.sample_tokens.default, CASE)
    torch.library.opcheck(torch.ops.specdec.sample_tokens.default, (CASE[0], None, 0, None))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, about itself
def test_compile_traces_it() -> None:
    assert torch.equal(torch.compile(sample_tokens, fullgraph=True)(*CASE), sample_tokens(*CASE))
    assert torch.equal(torch.compile(greedy_tokens, fullgraph=True)(CASE[0]), greedy_tokens(CASE[0]))
