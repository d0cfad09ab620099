"""The margin scan and the walk that trusts it: against references and fp64, on what must never be trusted."""

from __future__ import annotations

import math
import subprocess
import sys
import textwrap

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from specdec_kernels import cascade_scalars, margin_scan, reference, trust_walk
from specdec_kernels._lang import INTERPRETED
from specdec_kernels.margin_scan import config

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore::RuntimeWarning")]  # NumPy's
INF, NAN = math.inf, math.nan
EXACT = ("token", "top1", "top2", "logit_margin")
FLOATS = ("logsumexp", "probability", "margin")
DTYPES = [torch.float32, torch.float16, *([] if INTERPRETED else [torch.bfloat16])]
odd = st.sampled_from([0.0, -0.0, 1.0, 1.0, -2.0, 3.5, 3.5, -60.0, INF, -INF, NAN])


def in_fp64(logits: torch.Tensor) -> dict[str, torch.Tensor]:
    """Of usable rows."""
    x = logits.double()
    two = torch.topk(torch.cat((x, torch.full_like(x[..., :1], -INF)), -1), 2).values
    lse = torch.logsumexp(x, -1)
    first, second = torch.exp(two - lse[..., None]).unbind(-1)
    return {"logsumexp": lse, "probability": first, "margin": first - second}


def in_torch(logits: torch.Tensor) -> dict[str, torch.Tensor]:
    """As one writes it without this package."""
    p = torch.softmax(logits.float(), -1)
    two = torch.topk(torch.cat((p, torch.zeros_like(p[..., :1])), -1), 2).values
    return {
        "logsumexp": torch.logsumexp(logits.float(), -1),
        "probability": two[..., 0],
        "margin": two[..., 0] - two[..., 1],
    }


def ulp(x: torch.Tensor) -> torch.Tensor:
    """Of fp32 numbers of the size of x."""
    _, exponent = torch.frexp(x.double().abs().clamp(min=2.0**-126))
    return torch.ldexp(torch.ones_like(x, dtype=torch.float64), exponent - 24)


def assert_exact(logits: torch.Tensor, normalise: bool = True) -> None:
    found, expected = margin_scan(logits, normalise), reference.margin_scan(logits, normalise)
    for name in found._fields:
        got, wanted = getattr(found, name), getattr(expected, name)
        assert got.dtype == wanted.dtype and got.shape == wanted.shape
        if name in EXACT or not normalise:
            assert torch.equal(got.nan_to_num(nan=-7.0), wanted.nan_to_num(nan=-7.0)), name
        else:
            torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6, equal_nan=True)


@settings(max_examples=10 if INTERPRETED else 40)
@given(rows=st.lists(st.lists(odd, min_size=5, max_size=5), min_size=1, max_size=4), normalise=st.booleans())
def test_odd_rows(device: str, rows, normalise: bool) -> None:
    """D26: ties, infinities, NaN, signed zeros; -1 or an id, and never confident without one."""
    logits = torch.tensor([rows], device=device)
    assert_exact(logits, normalise)
    found = margin_scan(logits, normalise)
    for row, token, margin in zip(rows, found.token[0].tolist(), found.margin[0].tolist(), strict=True):
        usable = not any(math.isnan(x) for x in row) and math.isfinite(max(row))
        assert token == (row.index(max(row)) if usable else -1)
        assert usable or margin == 0


@pytest.mark.parametrize("vocab", [2, 97, 1025, 5003])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ragged_vocabularies(device: str, dtype: torch.dtype, vocab: int) -> None:
    """Sizes around a tile and a block; coarse values, so that the largest comes more than once."""
    drawn = 3 * torch.randn(1, 4, vocab, generator=torch.Generator().manual_seed(vocab))
    drawn[:, 1] = drawn[:, 1].round()
    drawn[:, 2, : vocab // 2] = -INF
    drawn[:, 3] -= 1000
    assert_exact(drawn.to(dtype).to(device))


@pytest.mark.parametrize(
    ("bad", "at"), [(NAN, 0), (-NAN, 62), (NAN, 1023), (INF, 1024), (NAN, 4095), (INF, 4096), (NAN, 4999)]
)
def test_one_bad_logit_anywhere(device: str, bad: float, at: int) -> None:
    """D26: a fault is seen wherever it is, whatever comes after it, and stays within its row."""
    logits = torch.randn(1, 2, 5000, generator=torch.Generator().manual_seed(0)).to(device)
    logits[0, 0, at] = bad
    for normalise in (True, False):
        found = margin_scan(logits, normalise)
        assert found.token[0, 0] == -1 and found.margin[0, 0] == 0 and found.logit_margin[0, 0] == 0
        assert found.token[0, 1] == logits[0, 1].argmax()


def test_a_payload_does_not_hide_a_nan(device: str) -> None:
    """Arithmetic on the bits of an exponential must not turn a NaN into a number."""
    bits = torch.tensor([0x7FC00001, 0x7F800001, 0x7FFFFFFF, -1, -0x3FFFFF], dtype=torch.int32)
    logits = torch.zeros(1, 5, 300)
    logits[0, torch.arange(5), 7] = bits.view(torch.float32)
    assert (margin_scan(logits.to(device)).token == -1).all()


def test_one_entry(device: str) -> None:
    found = margin_scan(torch.tensor([[[2.5]]], device=device))
    assert [float(x) for x in found] == [0.0, 2.5, -INF, 2.5, 1.0, 1.0, INF]


def test_floats_against_fp64(device: str) -> None:
    """At most twice the error of softmax, topk and logsumexp in fp32, and one ulp."""
    generator = torch.Generator().manual_seed(1)
    rows = 12 if INTERPRETED else 80
    drawn = torch.randn(1, rows, 20_000, generator=generator) * torch.linspace(0.01, 8, rows)[None, :, None]
    drawn[0, ::4, 77] = 25  # one that is almost certain
    drawn[0, 1::4] += 300
    drawn[0, 2::4] = drawn[0, 2::4].log_softmax(-1)
    found, exact, plain = margin_scan(drawn.to(device)), in_fp64(drawn), in_torch(drawn)
    for name in FLOATS:
        ours, theirs = (abs(x.cpu().double() - exact[name]) for x in (getattr(found, name), plain[name]))
        scale = ulp(exact[name]) if name != "margin" else ulp(exact["probability"])  # a difference of two of them
        assert (ours / scale).max() <= 2 * (theirs / scale).max() + 1, name
        assert (ours / scale).mean() <= 2 * (theirs / scale).mean() + 1, name


def test_extreme_logits(device: str) -> None:
    """Rows of -3e38 (what some models mask with), of huge and of tiny spread."""
    lowest = torch.finfo(torch.float32).min
    rows = torch.full((1, 5, 1500), lowest)
    rows[0, 1, 1200] = 3e38
    rows[0, 2] = 3e38
    rows[0, 3, 5:9] = torch.tensor([1.0, 2.0, 2.0, -4.0])
    rows[0, 4] = torch.arange(1500) * -50.0  # the first is far above the rest
    assert_exact(rows.to(device))


def test_ascending_logits(device: str) -> None:
    """Every block's maximum is above all before it: the running sum is rescaled each time."""
    rows = torch.stack((torch.linspace(-300, 60, 6000), torch.linspace(60, -300, 6000)))[None].to(device)
    assert_exact(rows)


def test_repeated_launches_agree(device: str) -> None:
    """The tickets are zero again, and the sums have one order."""
    logits = torch.randn(1, 2, 3000, generator=torch.Generator().manual_seed(2)).to(device)
    one, two = margin_scan(logits), margin_scan(logits)
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_strided_input(device: str) -> None:
    logits = torch.randn(2, 700, 3, generator=torch.Generator().manual_seed(3)).to(device).transpose(1, 2)
    assert_exact(logits)


def test_beyond_2_31_elements(device: str) -> None:
    """D25: rows more than 2**31 elements apart; the pages between are never touched. Alone, since it may crash."""
    script = f"""
        import torch
        from specdec_kernels import margin_scan
        apart = 2**30 + 8
        base = torch.empty(2 * apart + 16, dtype=torch.float16, device={device!r})
        for shape, stride in (((1, 3, 16), (0, apart, 1)), ((3, 1, 16), (apart, 0, 1))):
            rows = base.as_strided(shape, stride)
            rows.copy_(torch.eye(16)[3:6].view(shape))
            assert margin_scan(rows).token.flatten().tolist() == [3, 4, 5]
            assert margin_scan(rows, False).logit_margin.eq(1).all()
        print("right")
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True)
    assert done.stdout == "right\n", done.stderr[-2000:] or done.returncode


@pytest.mark.parametrize(
    ("logits", "message"),
    [
        (torch.zeros(3, 8), r"logits \[3, 8\] torch.float32; expected \[B, N, V\]"),
        (torch.zeros(1, 3, 8).double(), r"torch.float64"),
        (torch.zeros(1, 3, 0), r"\[1, 3, 0\]"),
    ],
)
def test_other_shapes_are_refused(logits: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        margin_scan(logits)


def test_nothing_to_scan(device: str) -> None:
    assert margin_scan(torch.zeros(1, 0, 8, device=device)).token.shape == (1, 0)
    assert margin_scan(torch.zeros(0, 4, 8, device=device)).margin.shape == (0, 4)


def test_programs_cover_the_vocabulary() -> None:
    for rows in (1, 61, 600):
        for vocab in (1, 5, 32000, 151936, 262144):
            options = config(rows, vocab)
            assert options["splits"] <= 64 and options["splits"] * options["BLOCK"] < vocab + options["BLOCK"]


# --- the walk --------------------------------------------------------------------------------------------------------


@st.composite
def walks(draw) -> tuple[torch.Tensor, ...]:
    """Trees of unequal size, few tokens; margins on, below and above the threshold, and such as are never trusted."""
    rows, nodes = draw(st.integers(1, 3)), draw(st.integers(1, 10))
    parents = [[-1] + [draw(st.integers(0, i - 1)) for i in range(1, nodes)] for _ in range(rows)]
    tokens, chosen = ([[draw(st.integers(-1, 2)) for _ in range(nodes)] for _ in range(rows)] for _ in range(2))
    margin = st.sampled_from([0.5, 0.5, 0.9, 0.9, 1.0, math.nextafter(0.5, 0) - 1e-7, 0.0, NAN, INF, -INF])
    margins = [[draw(margin) for _ in range(nodes)] for _ in range(rows)]
    count = [draw(st.integers(1, nodes)) for _ in range(rows)]
    return tuple(torch.tensor(x) for x in (tokens, parents, count, chosen, margins))


def walked(tokens, parents, count, chosen, margins, threshold) -> tuple[list[int], int, int]:
    """TriSpec's round, node by node, for one row: path, bonus, escalated."""
    node, path = 0, []
    while True:
        if chosen[node] < 0 or not math.isfinite(margins[node]) or margins[node] < threshold:
            return path, -1, node
        for child in range(node + 1, count):
            if parents[child] == node and tokens[child] == chosen[node]:
                node = child
                path.append(child)
                break
        else:
            return path, chosen[node], -1


@settings(max_examples=30 if INTERPRETED else 60)
@given(case=walks(), threshold=st.sampled_from([0.5, 0.3, 0.0, -1.0, 1.01]))
def test_the_walk(device: str, case, threshold: float) -> None:
    found = trust_walk(*(x.to(device) for x in case), threshold)
    for got, expected in zip(found, reference.trust_walk(*case, threshold), strict=True):
        assert torch.equal(got.cpu(), expected)
    for row in range(len(case[0])):
        path, bonus, escalated = walked(*(x[row].tolist() for x in case), threshold)
        assert found.path[row].tolist() == path + [-1] * (found.path.shape[1] - len(path))
        assert (found.length[row], found.bonus[row], found.escalated[row]) == (len(path), bonus, escalated)


@pytest.mark.parametrize("threshold", [0.1, 0.3, 0.5, 0.7, 0.9])
def test_a_margin_on_the_threshold_is_trusted(device: str, threshold: float) -> None:
    """Both are fp32: 0.3 as a Python number lies below 0.3 as fp32."""
    tree = (torch.tensor([[1, 2]]), torch.tensor([[-1, 0]]), torch.tensor([2]), torch.tensor([[2, 7]]))
    margins = torch.tensor([[threshold, threshold]])
    found = trust_walk(*(x.to(device) for x in (*tree, margins)), threshold)
    assert (found.length.item(), found.bonus.item(), found.escalated.item()) == (1, 7, -1)
    below = torch.nextafter(margins, torch.zeros(1))
    found = trust_walk(*(x.to(device) for x in (*tree, below)), threshold)
    assert (found.length.item(), found.bonus.item(), found.escalated.item()) == (0, -1, 0)


def test_what_the_walk_refuses() -> None:
    wide = torch.zeros(1, 1025, dtype=torch.long)
    with pytest.raises(ValueError, match="1025 nodes; expected at most 1024"):
        trust_walk(wide, wide, torch.tensor([1]), wide, wide.float(), 0.5)
    four = torch.zeros(1, 4, dtype=torch.long)
    with pytest.raises(ValueError, match=r"margins are torch.float64 \[1, 4\]; expected torch.float32 \[1, 4\]"):
        trust_walk(four, four, torch.tensor([1]), four, four.double(), 0.5)


# --- SpecCascade -----------------------------------------------------------------------------------------------------


def test_cascade_scalars(device: str) -> None:
    """Against softmax; a draft vocabulary of its own, one token that the target lacks, and unusable rows."""
    generator = torch.Generator().manual_seed(4)
    draft, target = (4 * torch.randn(2, 5, n, generator=generator) for n in (300, 1000))
    token_ids = torch.randperm(1001, generator=generator)[:300]
    draft[0, 0, token_ids.argmax()] = 50
    token_ids[token_ids.argmax()] = 1000
    draft[0, 1, 4], target[0, 2, 4], draft[1, 0], target[1, 1] = NAN, NAN, -INF, -INF
    found = cascade_scalars(*(x.to(device) for x in (draft, target, token_ids)))
    for got, expected in zip(found, reference.cascade_scalars(draft, target, token_ids), strict=True):
        torch.testing.assert_close(got.cpu(), expected, rtol=1e-5, atol=1e-9)
    assert found.draft_token[0].tolist()[:2] == [1000, -1]
    assert found.agreed_probability[0].tolist()[:3] == [0, 0, 0]
    same = cascade_scalars(target.to(device), target.to(device))
    assert torch.equal(same.agreed_probability, same.target_probability)


LOGITS = torch.tensor([[[1.0, 3.0, 2.0], [0.0, 0.0, -1.0]]])
WALK = tuple(map(torch.tensor, ([[5, 7, 8, 9]], [[-1, 0, 0, 2]], [4], [[8, 1, 9, 6]], [[0.9, 0.9, 0.3, 0.9]])))


def test_opcheck() -> None:
    torch.library.opcheck(torch.ops.specdec.margin_scan.default, (LOGITS, True))
    torch.library.opcheck(torch.ops.specdec.trust_walk.default, (*WALK, 0.5))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, about itself
def test_compile_traces_it() -> None:
    for function, case in ((margin_scan, (LOGITS,)), (trust_walk, (*WALK, 0.5)), (cascade_scalars, (LOGITS, LOGITS))):
        compiled = torch.compile(function, fullgraph=True)
        for got, expected in zip(compiled(*case), function(*case), strict=True):
            torch.testing.assert_close(got, expected)
