"""Multi-step rejection: against its reference, against the rule as published, and its law (with negative controls)."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from specdec_kernels import reference, rejection_walk, uniforms
from torch import Tensor

pytestmark = pytest.mark.usefixtures("one_thread")
INF, NAN = float("inf"), float("nan")


def probabilities(shape: tuple[int, ...], seed: int, sharpness: float = 2.0) -> Tensor:
    return torch.softmax(sharpness * torch.randn(shape, generator=torch.Generator().manual_seed(seed)), -1)


def random_case(rows: int, nodes: int, vocab: int, seed: int) -> tuple[Tensor, ...]:
    """Trees of unequal size whose tokens are drawn from q, duplicates among them, and noise as a decoder makes it."""
    generator = torch.Generator().manual_seed(seed)
    parents = torch.tensor([[-1] + [int(torch.randint(0, i, (), generator=generator)) for i in range(1, nodes)]] * rows)
    p, q = probabilities((rows, nodes, vocab), seed), probabilities((rows, nodes, vocab), seed + 1)
    drawn = q[torch.arange(rows)[:, None], parents.clamp(min=0)]
    tokens = torch.multinomial(drawn.view(-1, vocab), 1, generator=generator).view(rows, nodes)
    count = torch.randint(1, nodes + 1, (rows,), generator=generator)
    seeds, position = torch.arange(rows) + seed, torch.full((rows, 1), 9)
    coins, draw = uniforms(seeds, 2, position, nodes)[:, 0], uniforms(seeds, 0, position, 1)[:, 0, 0]
    return tokens, parents, count, p, q, coins, draw


def check(device: str, case: tuple[Tensor, ...], replacement: bool) -> tuple[Tensor, ...]:
    expected = reference.rejection_walk(*case, replacement)
    got = rejection_walk(*(x.to(device) for x in case), replacement)
    for ours, right in zip(got, expected, strict=True):
        assert torch.equal(ours.cpu(), right)
    return expected


@settings(max_examples=20)
@given(st.integers(1, 3), st.integers(1, 8), st.sampled_from([1, 2, 5, 17, 33]), st.integers(0, 2**30), st.booleans())
def test_equal_to_the_reference(device: str, rows, nodes, vocab, seed, replacement) -> None:
    check(device, random_case(rows, nodes, vocab, seed), replacement)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, in the interpreter
@settings(max_examples=25)
@given(st.data(), st.booleans())
def test_odd_numbers(device: str, data, replacement) -> None:
    """NaN, infinities, rows without mass, tokens outside the vocabulary: no id outside, no endless loop."""
    nodes, vocab = 4, 3
    odd = st.sampled_from([0.0, 0.25, 0.25, 0.5, 1.0, 1e-30, NAN, INF, -1.0])
    numbers = st.lists(odd, min_size=nodes * vocab, max_size=nodes * vocab)
    p, q = (torch.tensor(data.draw(numbers)).view(1, nodes, vocab) for _ in range(2))
    parents = torch.tensor([[-1] + [data.draw(st.integers(0, i - 1)) for i in range(1, nodes)]])
    tokens = torch.tensor([data.draw(st.lists(st.integers(-1, vocab), min_size=nodes, max_size=nodes))])
    coins = torch.tensor([data.draw(st.lists(st.sampled_from([0.1, 0.5, 0.999]), min_size=nodes, max_size=nodes))])
    draw = torch.tensor([data.draw(st.sampled_from([2.0**-33, 0.5, 1 - 2.0**-33]))]).double()
    _, _, bonus = check(device, (tokens, parents, torch.tensor([nodes]), p, q, coins.double(), draw), replacement)
    assert -1 <= int(bonus) < vocab


@pytest.mark.parametrize("vocab", [4095, 4097, 9000])
def test_several_blocks(device: str, vocab: int) -> None:
    """Rows wider than a block, apart from each other, and sums that have to be exact to agree."""
    tokens, _, _, p, q, coins, draw = random_case(2, 5, vocab, 3)
    parents = torch.tensor([[-1, 0, 0, 0, 1]] * 2)
    coins = torch.full_like(coins, 1 - 2.0**-33)  # rejects wherever p < q
    p, q = (torch.cat((x, x[..., :7]), -1)[..., :vocab] for x in (p, q))
    assert not p.is_contiguous()
    _, _, bonus = check(device, (tokens, parents, torch.tensor([5, 5]), p, q, coins, draw), True)
    assert (bonus >= 0).all()


def test_the_largest_vocabulary(device: str) -> None:
    """D25: 262,144 entries, nodes more than 2**31 elements apart (the pages between are never touched)."""
    vocab, stride = 262_144, 2**30 + 8
    p = torch.empty(2 * stride + vocab, device=device).as_strided((1, 3, vocab), (0, stride, 1))
    p[:] = probabilities((1, 3, vocab), 4).to(device)
    q = probabilities((1, 1, vocab), 5).expand(1, 3, vocab).to(device)
    case = torch.tensor([[1, 7, 9]]), torch.tensor([[-1, 0, 1]]), torch.tensor([3])
    noise = torch.full((1, 3), 1e-12, dtype=torch.float64), torch.tensor([0.9999], dtype=torch.float64)
    path, _, bonus = rejection_walk(*(x.to(device) for x in case), p, q, *(x.to(device) for x in noise))
    assert path.tolist() == [[1, 2]]
    cumulated = p[0, 2].double().cumsum(-1)
    assert abs(float(cumulated[bonus] - 0.9999 * cumulated[-1])) < 1e-4


# --- the rule as published -------------------------------------------------------------------------------------------


def published(tokens, parents, count, p, q, coins, replacement: bool):
    """One row, word by word, in fp64: (path, what p became, the smallest distance of a coin from its threshold)."""
    node, path, least = 0, [], INF
    left, draft = p[0].double(), q[0].double()
    for child in range(1, count):
        if parents[child] != node:
            continue
        x = tokens[child]
        ratio = float(left[x] / draft[x]) if draft[x] > 0 else 0.0
        least = min(least, abs(float(coins[child]) - ratio))
        if coins[child] < ratio:
            node, path = child, [*path, child]
            left, draft = p[node].double(), q[node].double()
            continue
        left = (left - draft).clamp(min=0)
        left = left / left.sum()
        if not replacement:
            draft = draft.clone()
            draft[x] = 0
            draft = draft / draft.sum()
    return path, left, least


@settings(max_examples=150)
@given(st.integers(2, 8), st.sampled_from([2, 5, 17]), st.integers(0, 2**30), st.booleans())
def test_the_published_rule(nodes: int, vocab: int, seed: int, replacement: bool) -> None:
    """One scalar c stands for all the residuals. What fp32 may decide otherwise lies within 1e-5 of a coin."""
    tokens, parents, _, p, q, coins, draw = random_case(1, nodes, vocab, seed)
    if not replacement:  # equal tokens do not occur then: make siblings differ
        tokens = torch.arange(nodes)[None] % vocab
        nodes = min(nodes, vocab)
    count = torch.tensor([nodes])
    path, left, least = published(tokens[0].tolist(), parents[0].tolist(), nodes, p[0], q[0], coins[0], replacement)
    if least < 1e-5 or torch.isnan(left).any():
        return
    ours, length, bonus = rejection_walk(tokens, parents, count, p, q, coins, draw, replacement)
    assert ours[0, : int(length)].tolist() == path
    cumulated = left.cumsum(-1)
    at = int(bonus)
    before = float(cumulated[at - 1]) if at else 0.0
    assert before - 1e-5 <= float(draw) <= float(cumulated[at]) + 1e-5


# --- the law ---------------------------------------------------------------------------------------------------------

P = torch.tensor([0.35, 0.3, 0.2, 0.1, 0.05])
Q = torch.tensor([0.1, 0.2, 0.1, 0.2, 0.4])


def chi_square(drawn_without: bool, replacement: bool, q: Tensor = Q) -> float:
    """Pearson's statistic of the first new token, 4 degrees of freedom, over 40,000 trees of three siblings."""
    rows, siblings = 40_000, 3
    generator = torch.Generator().manual_seed(0)
    children = torch.multinomial(Q.expand(rows, -1), siblings, replacement=not drawn_without, generator=generator)
    tokens = torch.cat((torch.zeros(rows, 1, dtype=torch.long), children), 1)
    parents = torch.tensor([-1, 0, 0, 0]).expand(rows, -1)
    seeds, position = torch.arange(rows), torch.zeros(rows, 1, dtype=torch.long)
    path, length, bonus = rejection_walk(
        tokens, parents, torch.full((rows,), 4), P.expand(rows, 4, -1), q.expand(rows, 4, -1),
        uniforms(seeds, 2, position, 4)[:, 0], uniforms(seeds, 0, position, 1)[:, 0, 0], replacement,
    )  # fmt: skip
    first = torch.where(length > 0, tokens.gather(1, path[:, :1].clamp(min=0))[:, 0], bonus)
    seen = torch.bincount(first, minlength=5).double()
    return float(((seen - rows * P) ** 2 / (rows * P)).sum())


@pytest.mark.parametrize("drawn_without", [False, True])
def test_the_law_is_the_target_s(drawn_without: bool) -> None:
    """D02: after rejected siblings the law was another. 18.5 is exceeded with probability 0.001; the seed is fixed."""
    assert chi_square(drawn_without, replacement=not drawn_without) < 18.5


@pytest.mark.parametrize(
    ("drawn_without", "replacement", "q"),
    [(True, True, Q), (False, False, Q), (False, True, torch.full((5,), 0.2))],
    ids=["no removal", "removed though replaced", "another q"],
)
def test_the_law_test_can_fail(drawn_without: bool, replacement: bool, q: Tensor) -> None:
    """D03: a q that is not what the draft drew from, in its three forms."""
    assert chi_square(drawn_without, replacement, q) > 100


def test_the_same_draws_again(device: str) -> None:
    case = tuple(x.to(device) for x in random_case(2, 6, 33, 8))
    first, second = (rejection_walk(*case) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_a_p_that_equals_q_accepts_everything(device: str) -> None:
    tokens, parents, _, p, _, _, draw = random_case(2, 6, 17, 1)
    parents = torch.arange(-1, 5).repeat(2, 1)
    coins = torch.full((2, 6), 1 - 2.0**-33, dtype=torch.float64)
    _, length, _ = check(device, (tokens, parents, torch.tensor([6, 4]), p, p, coins, draw), True)
    assert length.tolist() == [5, 3]


def test_what_does_not_fit_is_refused() -> None:
    case = list(random_case(1, 3, 4, 0))
    for index, bad, text in (
        (3, case[3].double(), r"p is torch.float64 \[1, 3, 4\]; expected torch.float32 \[1, 3, 4\]"),
        (4, case[4][..., :3], r"q is torch.float32 \[1, 3, 3\]; expected torch.float32 \[1, 3, 4\]"),
        (5, case[5].float(), r"coins is torch.float32 \[1, 3\]; expected torch.float64 \[1, 3\]"),
        (6, case[6][None], r"draw is torch.float64 \[1, 1\]; expected torch.float64 \[1\]"),
    ):
        with pytest.raises(ValueError, match=text):
            rejection_walk(*case[:index], bad, *case[index + 1 :])
    wide, probs = torch.zeros(1, 1025, dtype=torch.long), torch.zeros(1, 1025, 1)
    with pytest.raises(ValueError, match="1025 nodes; expected at most 1024"):
        rejection_walk(wide, wide, case[2], probs, probs, wide.double(), case[6])


def test_opcheck() -> None:
    torch.library.opcheck(torch.ops.specdec.rejection_walk.default, (*random_case(2, 5, 7, 0), True))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, about itself
def test_compile_traces_it() -> None:
    case = random_case(2, 5, 7, 0)
    compiled = torch.compile(rejection_walk, fullgraph=True)
    assert [x.tolist() for x in compiled(*case)] == [x.tolist() for x in rejection_walk(*case)]
