"""Log-softmax and top-k against the reference and fp64: ties, infinities, NaN, ragged vocabularies, far offsets."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from near_ties import assert_same_ranking, ulp
from specdec_kernels import _native, reference, topk_logprobs
from specdec_kernels._lang import INTERPRETED

module = sys.modules["specdec_kernels.topk_logprobs"]
# numpy, which interprets the kernels, warns of inf - inf
pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore::RuntimeWarning")]
INF, NAN = float("inf"), float("nan")
CONFIG = module.config  # as it is without the fixture below
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.fixture(scope="module", autouse=True)
def narrow_blocks() -> Iterator[None]:
    """A row of a hundred entries is cut, as one of a hundred thousand would be."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "config", lambda vocab: {"BLOCK": 32, "num_warps": 1})
        yield


@st.composite
def rows(draw) -> tuple[torch.Tensor, int]:
    """Few values, so that most of them tie, odd ones among them."""
    outer, inner, vocab = (
        draw(st.integers(1, 2)),
        draw(st.integers(1, 3)),
        draw(st.sampled_from((1, 2, 31, 32, 33, 97))),
    )
    values = draw(
        st.sampled_from(([0.0, 1.0, -2.0], [-0.0, 0.0, 3.5, -INF], [-INF], [0.0, 1.0, NAN], [2.0, INF, -1.0]))
    )
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    picked = torch.tensor(values)[torch.randint(len(values), (outer, inner, vocab), generator=generator)]
    if draw(st.booleans()):
        picked[0, 0] = torch.randn(vocab, generator=generator) * 4
    return picked.to(draw(st.sampled_from(DTYPES))), draw(st.integers(1, min(vocab, 16)))


@given(rows())
@settings(max_examples=20 if INTERPRETED else 200)
def test_equal_to_the_reference(device: str, case) -> None:
    """Ranks, and the order within what this implementation found: by its own log-probability, then by token id."""
    logits, k = case
    logprobs, token = (x.cpu() for x in topk_logprobs(logits.to(device), k))
    wanted, wanted_token = reference.topk_logprobs(logits, k)
    exact = torch.log_softmax(logits.double(), -1).nan_to_num(nan=-INF, neginf=-INF)
    assert torch.equal(logprobs.isneginf(), wanted.isneginf())
    torch.testing.assert_close(logprobs, wanted, rtol=1e-6, atol=1e-6)
    for at in torch.cartesian_prod(torch.arange(logits.shape[0]), torch.arange(logits.shape[1])).tolist():
        found, values = token[tuple(at)].tolist(), logprobs[tuple(at)].tolist()
        assert_same_ranking(found, wanted_token[tuple(at)].tolist(), exact[tuple(at)])
        order = [(-value, token) for value, token in zip(values, found, strict=True)]
        assert order == sorted(order)


@pytest.mark.parametrize("vocab", [97, 4099, pytest.param(151936, marks=pytest.mark.slow)])
@pytest.mark.parametrize("shape", ["normal", "zipf", "spike"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_error_against_fp64(device: str, monkeypatch, vocab: int, shape: str, dtype: torch.dtype) -> None:
    """At most twice that of torch's own fp32 log-softmax, and an ulp."""
    monkeypatch.setattr(module, "config", CONFIG)
    generator = torch.Generator().manual_seed(vocab)
    spread = torch.randn(1, 2, vocab, generator=generator) * 3
    if shape == "zipf":
        spread = -1.35 * torch.arange(1, vocab + 1).log()[torch.randperm(vocab, generator=generator)].expand(1, 2, -1)
    elif shape == "spike":  # one likely token, and the rest of the mass on equal ones, whose errors add up
        spread = torch.full((1, 2, vocab), -math.log(vocab))
        spread[..., vocab // 2] = 0.3
    logits = spread.to(dtype)
    logprobs, token = (x.cpu() for x in topk_logprobs(logits.to(device), 16))
    exact = torch.log_softmax(logits.double(), -1).gather(-1, token)
    torch_error = (torch.log_softmax(logits.float(), -1).gather(-1, token) - exact).abs().max()
    assert (logprobs - exact).abs().max() <= 2 * torch_error + ulp(float(exact.abs().max()))


@pytest.mark.parametrize(
    "row",
    [[NAN] * 3, [NAN] * 4, [NAN, 6.0, 8.0], [INF, 1.0, 2.0], [-INF] * 5, [1.0] * 96 + [NAN], [-INF] * 90 + [0.0, NAN]],
)
def test_no_id_beyond_the_vocabulary(device: str, row: list[float]) -> None:
    """D26: padding by -inf and an argmax over NaN gave the id V. Such a row has ids, but nothing in it is likely."""
    k = min(4, len(row))
    logprobs, token = topk_logprobs(torch.tensor([[row, [0.0] * len(row)]], device=device), k)
    assert token.tolist() == [[list(range(k))] * 2]
    assert logprobs[0, 0].tolist() == [-INF] * k
    assert logprobs[0, 1].isfinite().all()


def test_what_is_impossible_comes_last(device: str) -> None:
    row = [-INF] * 40
    row[35], row[3] = 0.0, 1.0
    logprobs, token = topk_logprobs(torch.tensor([[row]], device=device), 5)
    assert token.tolist() == [[[3, 35, 0, 1, 2]]]
    assert logprobs[0, 0, 2:].tolist() == [-INF] * 3


def test_strides(device: str) -> None:
    base = torch.randn(2, 2, 3, 40, generator=torch.Generator().manual_seed(1)).to(device)
    for view in (base[1:, ::2, 1], base[:1, 0].transpose(0, 1), base[:1, 0, :, :5].transpose(1, 2)):
        found, expected = topk_logprobs(view, 3), topk_logprobs(view.contiguous(), 3)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


FAR = """
import sys, torch
from specdec_kernels import topk_logprobs
step = 2**30 + 8
base = torch.empty(2 * step + 16, dtype=torch.float16, device=sys.argv[1])
for shape, strides in (((1, 3, 16), (0, step, 1)), ((3, 1, 16), (step, 16, 1))):
    rows = base.as_strided(shape, strides)
    for row, place in enumerate((4, 9, 14)):
        at = (0, row) if shape[0] == 1 else (row, 0)
        rows[at] = 0.0
        rows[at][place] = 5.0
    assert topk_logprobs(rows, 1)[1].flatten().tolist() == [4, 9, 14]
"""


def test_offsets_past_two_to_the_31(device: str) -> None:
    """D25: a program's row times an int32 stride read before the tensor. 4.3 GB of addresses, three pages of memory."""
    subprocess.run([sys.executable, "-c", FAR, device], check=True, timeout=240)


def test_a_launch_leaves_its_workspace_as_it_was(device: str) -> None:
    if device == "cpu" and not INTERPRETED:
        pytest.skip("the native code has no workspace")
    logits = torch.randn(2, 2, 100, generator=torch.Generator().manual_seed(2)).to(device)
    sizes = module.workspace_size(4, 100, 5)
    counters = torch.zeros(sizes[0], dtype=torch.long, device=device)
    keys, floats = torch.empty(sizes[1], dtype=torch.long, device=device), torch.empty(sizes[2], device=device)
    results = []
    for _ in range(2):
        out = logits.new_empty(2, 2, 5), counters.new_empty(2, 2, 5)
        module.launch(*out, logits, counters, keys, floats)
        results.append(out)
        assert not counters.any()
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert torch.equal(results[0][1], topk_logprobs(logits, 5)[1])


def test_the_table_of_sizes() -> None:
    """What a launch would take for the vocabularies of real models."""
    assert CONFIG(151936) == {"BLOCK": 2048, "num_warps": 8}
    assert CONFIG(100) == {"BLOCK": 256, "num_warps": 4}


def test_a_large_k_goes_to_the_reference() -> None:
    logits = torch.randn(1, 2, 40, generator=torch.Generator().manual_seed(3))
    found, expected = topk_logprobs(logits, 17), reference.topk_logprobs(logits, 17)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_no_rows(device: str) -> None:
    assert [list(x.shape) for x in topk_logprobs(torch.zeros(0, 2, 5, device=device), 2)] == [[0, 2, 2]] * 2


@pytest.mark.parametrize(
    ("logits", "k", "message"),
    [
        (torch.zeros(1, 1, 8), 10, "k is 10, the vocabulary 8"),
        (torch.zeros(1, 1, 8), 0, "k is 0, the vocabulary 8"),
        (torch.zeros(1, 8), 1, r"logits \[1, 8\] torch.float32; expected \[B, P, V\]"),
        (torch.zeros(1, 1, 8, dtype=torch.float64), 1, "torch.float64; expected"),
    ],
)
def test_refusals(logits: torch.Tensor, k: int, message: str) -> None:
    """D23: the op does not guess."""
    with pytest.raises(ValueError, match=message):
        topk_logprobs(logits, k)


def test_opcheck() -> None:
    torch.library.opcheck(torch.ops.specdec.topk_logprobs.default, (torch.arange(12.0).view(1, 2, 6), 3))


def test_without_the_native_code(monkeypatch) -> None:
    monkeypatch.setattr(_native, "library", None)
    monkeypatch.setattr(module, "INTERPRETED", False)
    logits = torch.arange(12.0).view(1, 2, 6)
    assert torch.equal(topk_logprobs(logits, 3)[1], reference.topk_logprobs(logits, 3)[1])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, about itself
def test_compile_traces_it() -> None:
    logits = torch.arange(12.0).view(1, 2, 6)
    found, expected = torch.compile(topk_logprobs, fullgraph=True)(logits, 3), topk_logprobs(logits, 3)
    assert [x.tolist() for x in found] == [x.tolist() for x in expected]
