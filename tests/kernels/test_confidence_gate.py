"""TALON's gate against the reference: exactly, given log-probabilities; from logits but for proven near-ties."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from near_ties import assert_same_ranking
from specdec_kernels import _native, confidence_gate, reference
from specdec_kernels._lang import INTERPRETED

module, topk_module = (sys.modules[f"specdec_kernels.{name}"] for name in ("confidence_gate", "topk_logprobs"))
# numpy, which interprets the kernels, warns of inf - inf
pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore::RuntimeWarning")]
INF, NAN = float("inf"), float("nan")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.fixture(scope="module", autouse=True)
def narrow_blocks() -> Iterator[None]:
    """A parent's hundred children are cut, as a hundred thousand would be."""
    with pytest.MonkeyPatch.context() as patch:
        for at in (module, topk_module):
            patch.setattr(at, "config", lambda vocab: {"BLOCK": 64, "num_warps": 2})
        yield


def on(device: str, *values):
    return tuple(x.to(device) if isinstance(x, torch.Tensor) else x for x in values)


def assert_equal(device: str, *arguments) -> None:
    """The same arrays, padding included."""
    found = confidence_gate(*on(device, *arguments))
    for got, expected in zip(found, reference.confidence_gate(*arguments), strict=True):
        assert torch.equal(got.cpu(), expected), (got, expected)


@st.composite
def pools(draw) -> tuple:
    """logits, parent scores, mu, budgets, width: many ties, parents that do not exist, odd values."""
    rows, parents, vocab = (
        draw(st.integers(1, 2)),
        draw(st.integers(1, 3)),
        draw(st.sampled_from((1, 5, 63, 64, 65, 97))),
    )
    values = draw(
        st.sampled_from(([-1.0, -2.0, -2.5], [-0.0, 0.0, -3.5, -INF], [-INF], [-1.0, -9.0, NAN], [-2.0, INF, -1.0]))
    )
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    logits = torch.tensor(values)[torch.randint(len(values), (rows, parents, vocab), generator=generator)]
    if draw(st.booleans()):
        logits[0, -1] = torch.randn(vocab, generator=generator) * draw(st.sampled_from((0.01, 4.0)))
    scores = torch.tensor([0.0, -0.0, -1.0, -1.0, -7.5, -INF, NAN])
    parent_scores = scores[torch.randint(len(scores), (rows, parents), generator=generator)]
    width = draw(st.integers(1, min(parents * vocab, 40)))
    budget = torch.randint(-1, width + 3, (rows,), generator=generator)
    mu = draw(st.sampled_from((0.0, 0.01, 0.03, 0.3, 1.0)))
    return logits.to(draw(st.sampled_from(DTYPES))), parent_scores, mu, budget, width


@given(pools())
@settings(max_examples=15 if INTERPRETED else 300)
def test_from_logprobs_equal_to_the_reference(device: str, case) -> None:
    assert_equal(device, *case, True)


@given(pools())
@settings(max_examples=15 if INTERPRETED else 300)
def test_from_logits_equal_but_for_near_ties(device: str, case) -> None:
    logits, parent_scores, mu, _, width = case
    vocab = logits.shape[-1]
    parent, token, score, count = (x.cpu() for x in confidence_gate(*on(device, *case)))
    wanted_parent, wanted_token, wanted_score, wanted_count = reference.confidence_gate(*case)
    exact = (torch.log_softmax(logits.double(), -1) + parent_scores.double()[..., None]).flatten(1)
    exact = exact.nan_to_num(nan=-INF, neginf=-INF)
    for row, (kept, wanted) in enumerate(zip(count.tolist(), wanted_count.tolist(), strict=True)):
        found = (parent * vocab + token)[row, :kept].tolist()
        expected = (wanted_parent * vocab + wanted_token)[row, :wanted].tolist()
        threshold = float(exact[row].max()) + (math.log(mu) if mu else -INF)
        assert_same_ranking(found, expected, exact[row], threshold)
        both = min(kept, wanted)
        torch.testing.assert_close(score[row, :both], wanted_score[row, :both], rtol=1e-6, atol=1e-6)
        order = [(-s, i) for s, i in zip(score[row, :kept].tolist(), found, strict=True)]
        assert order == sorted(order), "by its own score, then parent, then token"
        assert not parent[row, kept:].any() and not token[row, kept:].any()
        assert score[row, kept:].tolist() == [-INF] * (width - kept)


# --- more than there is room for -------------------------------------------------------------------------------------

FLAT = {
    "equal": lambda n: torch.full((n,), -5.0),
    "ascending": lambda n: torch.arange(n) * 1e-3 - 9,
    "descending": lambda n: -torch.arange(n) * 1e-3 - 5,
    "noise": lambda n: torch.randn(n, generator=torch.Generator().manual_seed(n)) * 0.1 - 6,
    "ties": lambda n: -torch.randint(1, 9, (n,), generator=torch.Generator().manual_seed(n)).float(),
}


@pytest.mark.parametrize("mu", [0.0, 0.01])
@pytest.mark.parametrize("shape", FLAT)
@pytest.mark.parametrize("width", [1, 60, 256])
def test_far_more_than_the_width_pass(device: str, shape: str, width: int, mu: float) -> None:
    """Chunks cut to their best, and the row's last program cuts a thousand of those: exactly, ties by index."""
    if INTERPRETED and (width == 1 or (mu, width) == (0.0, 60) or shape == "descending"):
        pytest.skip("slow to interpret; the others go the same ways")
    rows = 1 if INTERPRETED else 2
    logprobs = FLAT[shape](rows * 4 * 300).view(rows, 4, 300)
    parent_scores = torch.tensor([[-1.0, -1.0, -1.5, -0.5]]).repeat(rows, 1)
    assert_equal(device, logprobs, parent_scores, mu, torch.full((rows,), width), width, True)


@pytest.mark.parametrize("vocab", [4101, 32000, 152064])
def test_vocabularies_of_real_models(device: str, monkeypatch, vocab: int) -> None:
    """The blocks of a real launch; Zipf's law, as in the benchmarks."""
    if INTERPRETED and vocab > 4101:
        pytest.skip("slow to interpret")
    for at in (module, topk_module):
        monkeypatch.setattr(at, "config", CONFIG)
    generator = torch.Generator().manual_seed(vocab)
    for alpha in (0.7, 5.0):
        zipf = -alpha * torch.arange(1, vocab + 1).log()
        logits = torch.stack([zipf[torch.randperm(vocab, generator=generator)] for _ in range(3)])[None]
        parent_scores, budget = torch.tensor([[0.0, -0.4, -INF]]), torch.tensor([60])
        assert_equal(device, torch.log_softmax(logits, -1), parent_scores, 0.03, budget, 60, True)
        _, token, _, count = confidence_gate(*on(device, logits, parent_scores, 0.03, budget, 60))
        _, wanted, _, wanted_count = reference.confidence_gate(logits, parent_scores, 0.03, budget, 60)
        assert torch.equal(count.cpu(), wanted_count)
        # ranks of Zipf's law lie far more than 4 ulp apart, but for parents that meet
        assert (token.cpu() != wanted).sum() <= 4


CONFIG = topk_module.config  # as it is without the fixture


def test_a_vocabulary_beyond_the_kept_maxima() -> None:
    """The C++ code keeps the maxima of 1024 blocks of 256 between its passes, and looks again where there are more."""
    logits = torch.randn(1, 1, 300_000, generator=torch.Generator().manual_seed(5))
    found = confidence_gate(logits, torch.zeros(1, 1), 0.0, torch.tensor([20]), 20)
    expected = reference.confidence_gate(logits, torch.zeros(1, 1), 0.0, torch.tensor([20]), 20)
    assert torch.equal(found[1], expected[1])


# --- D24 -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_mu_one_keeps_only_the_best(device: str, dtype: torch.dtype) -> None:
    """And what ties with it; never nothing."""
    logits = torch.tensor([[[1.0, 3.0, 0.0], [3.0, 2.0, 3.0]], [[0.0, 1.0, 2.0], [9.0, 0.0, 0.0]]], dtype=dtype)
    parent_scores = torch.tensor([[-INF, -1.0], [0.0, -INF]])
    parent, token, _, count = confidence_gate(*on(device, logits, parent_scores, 1.0, torch.tensor([9, 9]), 4))
    assert count.tolist() == [2, 1]
    assert (parent[0, :2].tolist(), token[0, :2].tolist()) == ([1, 1], [0, 2])
    assert (parent[1, 0].item(), token[1, 0].item()) == (0, 2)


@given(st.integers(0, 2**31), st.sampled_from((0.0, 0.03, 0.3, 1.0)), st.booleans())
@settings(max_examples=5 if INTERPRETED else 60)
def test_never_zero_nodes(device: str, seed: int, mu: float, normalized: bool) -> None:
    logits = torch.randn(1, 2, 70, generator=torch.Generator().manual_seed(seed)) * 3
    assert (
        1 <= int(confidence_gate(*on(device, logits, torch.zeros(1, 2), mu, torch.tensor([5]), 5, normalized))[3]) <= 5
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_exactly_at_the_threshold(device: str, dtype: torch.dtype) -> None:
    """log(0.3) in bf16 is a little more than in fp32, and the next below it a little less: fp32 decides."""
    mu = torch.tensor(0.3).log()
    rounded = mu.to(dtype)
    below = torch.nextafter(rounded, torch.tensor(-INF, dtype=dtype))
    row = torch.stack((torch.zeros((), dtype=dtype), rounded, below, rounded))[None, None]
    kept = [0] + [i for i in (1, 2, 3) if row[0, 0, i].float() >= mu]
    case = row, torch.zeros(1, 1), 0.3, torch.tensor([9]), 4, True
    _, token, _, count = confidence_gate(*on(device, *case))
    assert sorted(token[0, : int(count)].tolist()) == kept
    assert_equal(device, *case)
    # as fp32, moved by the parents' scores: on the threshold, and one ulp below it
    exactly = torch.tensor([[[0.0], [float(mu)], [float(torch.nextafter(mu, torch.tensor(-INF)))]]])
    parent, _, _, count = confidence_gate(*on(device, exactly, torch.zeros(1, 3), 0.3, torch.tensor([9]), 3, True))
    assert int(count) == 2
    assert parent[0, :2].tolist() == [0, 1]


@pytest.mark.parametrize("bad", [NAN, INF])
def test_nan_is_never_confident(device: str, bad: float) -> None:
    """One bad logit takes its parent's row with it, and a parent without a score counts as none; the others stay."""
    logits = torch.tensor([[[1.0, bad, 0.0], [2.0, 1.0, 0.0], [9.0, 0.0, 0.0]]])
    case = logits, torch.tensor([[0.0, -1.0, NAN]]), 0.01, torch.tensor([9]), 9
    parent, token, _, count = confidence_gate(*on(device, *case))
    assert int(count) == 3
    assert (parent[0, :3].tolist(), token[0, :3].tolist()) == ([1, 1, 1], [0, 1, 2])
    assert int(confidence_gate(*on(device, logits[:, :1], torch.zeros(1, 1), 0.01, torch.tensor([9]), 3))[3]) == 0
    if math.isnan(bad):  # of log-probabilities, only the one that is not a number
        assert_equal(device, *case, True)


# --- D25, D26, and how it is called -----------------------------------------------------------------------------------


@pytest.mark.parametrize("row", [[NAN] * 3, [NAN] * 64, [NAN, 6.0, 8.0], [1.0] * 96 + [NAN], [INF] * 65, [-INF] * 65])
@pytest.mark.parametrize("normalized", [False, True])
def test_no_id_beyond_the_vocabulary(device: str, row: list[float], normalized: bool) -> None:
    """D26: what is not kept is 0, 0, -inf in every implementation."""
    logits = torch.tensor([[row]])
    case = logits, torch.zeros(1, 1), 0.0, torch.tensor([3]), 3, normalized
    assert_equal(device, *case)
    assert confidence_gate(*on(device, *case))[1].max() < len(row)


FAR = """
import sys, torch
from specdec_kernels import confidence_gate
device, step = sys.argv[1], 2**30 + 8
base = torch.empty(2 * step + 16, dtype=torch.float16, device=device)
for shape, strides in (((1, 3, 16), (0, step, 1)), ((3, 1, 16), (step, 16, 1))):
    rows = base.as_strided(shape, strides)
    for row in range(3):
        rows[(0, row) if shape[0] == 1 else (row, 0)] = row + 1.0
        rows[(0, row) if shape[0] == 1 else (row, 0)][4 + row] = 9.0
    for normalized in (False, True):
        scores, budget = torch.zeros(shape[:2], device=device), torch.full(shape[:1], 3, device=device)
        parent, token, _, count = confidence_gate(rows, scores, 0.5, budget, 3, normalized)
        if shape[0] == 1:
            assert (count.item(), parent.tolist()) == (3, [[0, 1, 2]]), (count, parent)
            assert token.tolist() == [[4, 5, 6]], token
        else:
            assert (count.tolist(), token[:, 0].tolist()) == ([1, 1, 1], [4, 5, 6]), (count, token)
"""


def test_offsets_past_two_to_the_31(device: str) -> None:
    """D25: a program's row times an int32 stride read before the tensor. 4.3 GB of addresses, three pages of memory."""
    subprocess.run([sys.executable, "-c", FAR, device], check=True, timeout=240)


def workspace(device: str, *shape: int) -> tuple[torch.Tensor, ...]:
    counters, keys, floats = module.workspace_size(*shape)
    return (
        torch.zeros(counters, dtype=torch.long, device=device),
        torch.empty(keys, dtype=torch.long, device=device),
        torch.empty(floats, device=device),
    )


def test_a_launch_leaves_its_workspace_as_it_was(device: str) -> None:
    if device == "cpu" and not INTERPRETED:
        pytest.skip("the native code has no workspace")
    logits = torch.randn(2, 2, 100, generator=torch.Generator().manual_seed(2)).to(device)
    inputs = logits, torch.zeros(2, 2, device=device), 0.1, torch.tensor([5, 3], device=device)
    space = workspace(device, 2, 2, 100, 5)
    expected = confidence_gate(*inputs, 5)
    for _ in range(2):
        out = tuple(torch.empty_like(x) for x in expected)
        module.launch(*out, *inputs, False, *space)
        assert not space[0].any()
        assert all(torch.equal(a, b) for a, b in zip(out, expected, strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("normalized", [False, True])
def test_in_a_graph(normalized: bool) -> None:
    """Captured once, replayed on other inputs; from run to run the same bits, flat distributions included."""
    shape = 2, 10, 9000, 60
    logits = torch.zeros(shape[:3], device="cuda", dtype=torch.bfloat16)
    inputs = logits, torch.zeros(2, 10, device="cuda"), 0.01, torch.full((2,), 60, device="cuda")
    space, out = workspace("cuda", *shape), confidence_gate(*inputs, 60, normalized)
    module.launch(*out, *inputs, normalized, *space)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        module.launch(*out, *inputs, normalized, *space)
    for spread in (0.0, 0.1, 5.0):
        logits.copy_(torch.randn(shape[:3]) * spread - 6)
        graph.replay()
        first = [x.clone() for x in out]
        for _ in range(20):
            graph.replay()
            assert all(torch.equal(a, b) for a, b in zip(out, first, strict=True))
        expected = confidence_gate(*inputs, 60, normalized)
        assert all(torch.equal(a, b) for a, b in zip(out, expected, strict=True))


def test_strides(device: str) -> None:
    base = torch.randn(2, 2, 2, 12, generator=torch.Generator().manual_seed(1)).to(device)
    for view in (base[:, ::2, 1], base[:, 0].transpose(0, 1), base[:1, 0].transpose(1, 2)):
        scores = torch.zeros(view.shape[1], view.shape[0], device=device).t()
        arguments = scores, 0.2, torch.full((view.shape[0],), 4, device=device), 4
        found, expected = confidence_gate(view, *arguments), confidence_gate(view.contiguous(), *arguments)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_large_width_goes_to_the_reference(device: str) -> None:
    logits = torch.randn(1, 3, 100, generator=torch.Generator().manual_seed(3))
    assert_equal(device, logits, torch.zeros(1, 3), 0.0, torch.tensor([257]), 257)


def test_no_rows(device: str) -> None:
    empty = torch.zeros(0, 2, 5, device=device), torch.zeros(0, 2, device=device), 0.5
    found = confidence_gate(*empty, torch.zeros(0, dtype=torch.long, device=device), 3)
    assert [list(x.shape) for x in found] == [[0, 3]] * 3 + [[0]]


GOOD = {
    "logits": torch.arange(12.0).view(1, 2, 6),
    "parent_scores": torch.zeros(1, 2),
    "mu": 0.1,
    "budget": torch.tensor([3]),
    "width": 3,
}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"logits": torch.zeros(2, 6)}, r"logits \[2, 6\] torch.float32; expected \[B, P, V\]"),
        ({"logits": torch.zeros(1, 2, 6).double()}, "torch.float64; expected"),
        (
            {"parent_scores": torch.zeros(2, 1)},
            r"parent_scores \[2, 1\] torch.float32; expected \[1, 2\] torch.float32",
        ),
        ({"parent_scores": torch.zeros(1, 2).half()}, r"parent_scores \[1, 2\] torch.float16"),
        ({"budget": torch.tensor(3)}, r"budget \[\] torch.int64; expected \[1\]"),
        ({"budget": torch.tensor([3.0])}, "budget .* torch.float32; expected"),
        ({"mu": 1.01}, "mu is 1.01; expected"),
        ({"mu": -0.1}, "mu is -0.1"),
        ({"mu": NAN}, "mu is nan"),
        ({"width": 0}, "width 0 of a pool of 2 x 6"),
        ({"width": 13}, "width 13 of a pool of 2 x 6"),
    ],
    ids=str,
)
def test_refusals(wrong: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        confidence_gate(**{**GOOD, **wrong})


@pytest.mark.parametrize("normalized", [False, True])
def test_opcheck(normalized: bool) -> None:
    torch.library.opcheck(torch.ops.specdec.confidence_gate.default, (*GOOD.values(), normalized))


def test_without_the_native_code(monkeypatch) -> None:
    monkeypatch.setattr(_native, "library", None)
    monkeypatch.setattr(module, "INTERPRETED", False)
    assert_equal("cpu", *GOOD.values())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, about itself
def test_compile_traces_it() -> None:
    compiled = torch.compile(confidence_gate, fullgraph=True)
    assert [x.tolist() for x in compiled(**GOOD)] == [x.tolist() for x in confidence_gate(**GOOD)]
