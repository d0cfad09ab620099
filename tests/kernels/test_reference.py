"""The reference ops against loops that can be checked by eye: ties, NaN, infinities, empty budgets, padding."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle import plain
from specdec_kernels import (
    ancestors,
    gumbel,
    kv_commit,
    philox,
    reference,
    sample_tokens,
    verify_walk,
)
from specdec_kernels.reference import confidence_gate, ordered_topk, topk_logprobs

pytestmark = pytest.mark.usefixtures("one_thread")
INF, NAN = float("inf"), float("nan")

# few values, so that ties are common; odd ones among them
odd = st.sampled_from([0.0, -0.0, 1.0, 1.0, -2.0, 3.5, INF, -INF, NAN])
coarse = st.sampled_from([-3.0, -1.0, 0.0, 0.0, 1.0, 2.0])


def rows(values, least=1, most=9):
    return st.lists(values, min_size=least, max_size=most)


def ranked(scores) -> list[int]:
    """Descending, ties by index, NaN as -inf."""
    return sorted(range(len(scores)), key=lambda i: (-(-INF if math.isnan(scores[i]) else scores[i]), i))


# --- top-k -----------------------------------------------------------------------------------------------------------


@given(rows(odd | st.floats(width=32)), st.data())
def test_ordered_topk(scores: list[float], data) -> None:
    """`torch.topk` calls NaN the largest and leaves the order of ties open."""
    k = data.draw(st.integers(1, len(scores)))
    values, index = ordered_topk(torch.tensor([scores]), k)
    assert index[0].tolist() == ranked(scores)[:k]
    assert values[0].tolist() == [-INF if math.isnan(scores[i]) else scores[i] for i in index[0].tolist()]


@given(st.lists(rows(odd, 4, 4), min_size=1, max_size=3))
def test_topk_logprobs(logits: list[list[float]]) -> None:
    """D26: a NaN, or an infinite maximum, makes a row in which nothing is likely; its ids still exist."""
    given_ = torch.tensor([logits])
    logprobs, token = topk_logprobs(given_, 3)
    for row, scores in enumerate(logits):
        expected = torch.log_softmax(torch.tensor(scores), -1).tolist()
        if any(math.isnan(x) or x == INF for x in scores) or max(scores) == -INF:
            expected = [-INF] * 4
        assert token[0, row].tolist() == ranked(expected)[:3]
        assert logprobs[0, row].tolist() == [expected[i] for i in ranked(expected)[:3]]


def test_topk_beyond_the_vocabulary_is_refused() -> None:
    """D23: policies clamp K; the op does not guess."""
    with pytest.raises(RuntimeError):
        topk_logprobs(torch.zeros(1, 1, 8), 10)


# --- TALON's gate ----------------------------------------------------------------------------------------------------


def gate(logits: torch.Tensor, parent_scores: list[float], mu: float, budget: int) -> list[tuple[int, int]]:
    """Algorithm 2, word by word, for one row: gate the pool, then keep the best of what passed."""
    pool = {}
    for parent, score in enumerate(parent_scores):
        for token, logprob in enumerate(torch.log_softmax(logits[parent].float(), -1).tolist()):
            path = float(np.float32(logprob) + np.float32(score))
            if not math.isnan(path) and path > -INF:
                pool[parent, token] = path
    if not pool:
        return []
    threshold = np.float32(max(pool.values())) + (np.float32(math.log(mu)) if mu else np.float32(-INF))
    passed = [node for node, path in pool.items() if path >= threshold]
    return sorted(passed, key=lambda node: (-pool[node], node))[: max(budget, 0)]


@given(
    st.lists(st.lists(coarse | st.just(-INF), min_size=5, max_size=5), min_size=1, max_size=4),
    st.sampled_from([0.0, 0.01, 0.1, 0.3, 1.0]),
    st.integers(-1, 25),
    st.data(),
)
def test_confidence_gate(logits, mu, budget, data) -> None:
    """Best-of-the-pool and then gate, which has a fixed shape, equals gate and then truncate, which is the paper's."""
    parents = data.draw(
        st.lists(st.sampled_from([0.0, -1.0, -1.0, -7.5, -INF]), min_size=len(logits), max_size=len(logits))
    )
    width = max(1, min(budget, 5 * len(logits)))
    parent, token, score, count = confidence_gate(
        torch.tensor([logits]), torch.tensor([parents]), mu, torch.tensor([budget]), width
    )
    kept = list(zip(parent[0].tolist(), token[0].tolist(), strict=True))[: int(count)]
    assert score[0, int(count) :].tolist() == [-INF] * (width - len(kept)), "padding"
    assert not parent[0, int(count) :].any() and not token[0, int(count) :].any()
    assert kept == gate(torch.tensor(logits), parents, mu, budget)
    for (p, t), path in zip(kept, score[0].tolist(), strict=False):
        assert path == pytest.approx(parents[p] + torch.log_softmax(torch.tensor(logits[p]), -1)[t].item(), abs=1e-6)


def test_the_gate_treats_rows_apart() -> None:
    logits = torch.log(torch.tensor([[[0.5, 0.3, 0.2]], [[0.98, 0.01, 0.01]]]))
    _, token, _, count = confidence_gate(logits, torch.zeros(2, 1), 0.3, torch.tensor([2, 3]), 3)
    assert count.tolist() == [2, 1]
    assert token[:, 0].tolist() == [0, 0]


def test_the_gate_keeps_what_lies_on_the_threshold() -> None:
    """D24: a probability that equals mu times the best; whatever the dtype of the logits, fp32 decides."""
    logits = torch.tensor([0.5, 0.25, 0.125, 0.125]).log()[None, None]
    for mu, kept in ((0.5, 2), (0.25, 4), (1.0, 1), (0.5001, 1)):
        assert int(confidence_gate(logits, torch.zeros(1, 1), mu, torch.tensor([9]), 4)[3]) == kept
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        level = torch.tensor([[[3.0, 3.0, 1.0]]], dtype=dtype)
        assert int(confidence_gate(level, torch.zeros(1, 1), 1.0, torch.tensor([9]), 3)[3]) == 2


@pytest.mark.parametrize("bad", [NAN, INF])
def test_nan_is_never_confident(bad: float) -> None:
    """D24: NaN passed a comparison that was written the wrong way round. One bad parent leaves the others alone."""
    logits = torch.tensor([[[1.0, bad, 0.0], [2.0, 1.0, 0.0]]])
    parent, _, _, count = confidence_gate(logits, torch.tensor([[0.0, -1.0]]), 0.01, torch.tensor([9]), 6)
    assert int(count) == 3
    assert parent[0, :3].tolist() == [1, 1, 1]
    assert int(confidence_gate(logits[:, :1], torch.zeros(1, 1), 0.01, torch.tensor([9]), 3)[3]) == 0


# --- noise -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), 0, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((0xFFFFFFFF,) * 4, 2**64 - 1, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            0x299F31D0_A4093822,
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_the_oracle_knows_philox(counter, key, words) -> None:
    """The known answers of Random123's own test file (philox4x32, 10 rounds)."""
    assert plain.philox(counter, key) == [int(word, 16) for word in words.split()]


@given(st.integers(-(2**63), 2**63 - 1), st.lists(st.integers(0, 2**32 - 1), min_size=3, max_size=3))
def test_philox(key: int, counter: list[int]) -> None:
    found = philox(torch.tensor(key), tuple(torch.tensor(word) for word in counter))
    assert found.tolist() == plain.philox((*counter, 0), key & (2**64 - 1))


@pytest.mark.parametrize("vocab", [1, 4, 7, 97])
def test_gumbel(vocab: int) -> None:
    seeds, positions = torch.tensor([3, 2**40 + 1]), torch.tensor([[5, 6, 5], [0, 1, 100_000]])
    noise = gumbel(seeds, 2, positions, vocab)
    expected = [
        [plain.gumbel(seed, 2, position, vocab) for position in row]
        for seed, row in zip(seeds.tolist(), positions.tolist(), strict=True)
    ]
    np.testing.assert_allclose(noise.numpy(), np.array(expected), rtol=1e-5, atol=1e-6)
    assert torch.equal(noise[0, 0], noise[0, 2]), "equal positions share their noise"


def test_noise_depends_on_nothing_else() -> None:
    """D06: the draw of one row or position moved when another was added."""
    one = gumbel(torch.tensor([7]), 0, torch.tensor([[4]]), 50)
    more = gumbel(torch.tensor([1, 7]), 0, torch.tensor([[4, 9], [3, 4]]), 61)
    assert torch.equal(more[1, 1, :50], one[0, 0])
    assert not torch.equal(gumbel(torch.tensor([7]), 1, torch.tensor([[4]]), 50), one), "another stream"
    assert torch.isfinite(more).all()


def test_noise_at_the_ends_of_its_range(monkeypatch: pytest.MonkeyPatch) -> None:
    """The words 0 and 2**32 - 1 must not become infinite noise, which would pass for a certain token."""
    ends = torch.tensor([0, 2**32 - 1, 1, 2**31])
    monkeypatch.setattr(reference, "philox", lambda key, counter: ends.expand(1, 1, 1, 4))
    noise = gumbel(torch.tensor([0]), 0, torch.tensor([[1]]), 4)[0, 0]
    assert noise.tolist() == pytest.approx([33 * math.log(2), -2.8115, -math.log(1.5 * 2**-32), 0.3665], abs=1e-3)


def test_noise_is_gumbel() -> None:
    """Mean 0.5772, variance pi^2 / 6; half a million values, so the bounds below are about 4 standard errors."""
    noise = gumbel(torch.arange(50), 0, torch.arange(100).expand(50, -1), 100).double()
    assert abs(noise.mean() - 0.57722) < 0.008
    assert abs(noise.var() - math.pi**2 / 6) < 0.025


@given(rows(odd, 1, 6), st.integers(0, 100))
def test_sample_tokens(logits: list[float], seed: int) -> None:
    """D26: padding by -inf and an argmax over NaN gave the id V, which crashes far away. Here: -1, or a real id."""
    token = int(sample_tokens(torch.tensor([[logits]]), torch.tensor([seed]), 0, torch.tensor([[3]])))
    usable = max((x for x in logits if not math.isnan(x)), default=-INF)
    if any(math.isnan(x) for x in logits) or usable in (INF, -INF):
        assert token == -1
    else:
        noisy = np.array(logits) + plain.gumbel(seed, 0, 3, len(logits))
        assert token == int(np.argmax(noisy))


# --- trees -----------------------------------------------------------------------------------------------------------


@st.composite
def trees(draw):
    """tokens and parents of one tree, root first, parents before children; siblings may carry the same token."""
    size = draw(st.integers(1, 10))
    parents = [-1] + [draw(st.integers(0, node - 1)) for node in range(1, size)]
    tokens = draw(st.lists(st.integers(0, 3), min_size=size, max_size=size))
    return tokens, parents


def path_to(node: int, parents: list[int]) -> list[int]:
    path = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


def batch(items, pad):
    size = max(map(len, items))
    return torch.tensor([[*item, *[pad] * (size - len(item))] for item in items])


@given(st.lists(trees(), min_size=1, max_size=3))
def test_ancestors(forest) -> None:
    found = ancestors(batch([parents for _, parents in forest], -1))
    for row, (_, parents) in enumerate(forest):
        for node in range(len(parents)):
            assert found[row, node].nonzero()[:, 0].tolist() == sorted(path_to(node, parents))
        for node in range(len(parents), found.shape[1]):
            assert found[row, node].nonzero()[:, 0].tolist() == [0, node], "padding sees the root and itself"


@given(st.lists(trees(), min_size=1, max_size=3), st.data())
def test_verify_walk(forest, data) -> None:
    """Descend while a child carries the chosen token; padding is never accepted, whatever token it holds."""
    chosen = [data.draw(st.lists(st.integers(-1, 3), min_size=len(t), max_size=len(t))) for t, _ in forest]
    tokens, parents = batch([t for t, _ in forest], 2), batch([p for _, p in forest], -1)
    count = torch.tensor([len(t) for t, _ in forest])
    path, length, bonus = verify_walk(tokens, parents, count, batch(chosen, 2))
    for row, (token, parent) in enumerate(forest):
        paths = [path_to(node, parent) for node in range(len(token))]
        accepted = [
            nodes
            for nodes in paths
            if all(token[child] == chosen[row][node] for node, child in itertools.pairwise(nodes))
        ]
        best = min(accepted, key=lambda nodes: (-len(nodes), nodes[-1]))  # the deepest, then the first
        assert path[row].tolist() == best[1:] + [-1] * (tokens.shape[1] - len(best))
        assert length[row] == len(best) - 1
        assert bonus[row] == chosen[row][best[-1]]


def test_a_chain_accepts_its_prefix() -> None:
    tokens, parents = torch.tensor([[9, 4, 5, 6]]), torch.tensor([[-1, 0, 1, 2]])
    for chosen, length, bonus in (
        ([4, 5, 6, 7], 3, 7),
        ([4, 5, 0, 7], 2, 0),
        ([1, 5, 6, 7], 0, 1),
        ([-1, 0, 0, 0], 0, -1),
    ):
        _, found, extra = verify_walk(tokens, parents, torch.tensor([4]), torch.tensor([chosen]))
        assert (int(found), int(extra)) == (length, bonus)


# --- the cache -------------------------------------------------------------------------------------------------------


@given(st.data())
def test_kv_commit(data) -> None:
    """D10: moves that overlap; entries elsewhere, which may hold NaN, stay bit for bit."""
    layers, entries, width = 2, 12, data.draw(st.integers(1, 5))
    lines = []
    for _ in range(2):
        start = data.draw(st.integers(0, entries - width))
        source = sorted(
            data.draw(st.sets(st.integers(start, entries - 1), min_size=1, max_size=min(width, entries - start)))
        )
        count = data.draw(st.integers(0, len(source)))
        lines.append((start, source + [-1] * (width - len(source)), count))
    cache = torch.arange(layers * 2 * entries * 3, dtype=torch.float32).view(layers, 2, entries, 1, 3).clone()
    cache[:, :, -1] = NAN
    expected = cache.clone()
    for row, (start, source, count) in enumerate(lines):
        for i in range(count):
            expected[:, row, start + i] = cache[:, row, source[i]]
    starts, sources, counts = zip(*lines, strict=True)
    kv_commit(cache, torch.tensor(sources), torch.tensor(starts), torch.tensor(counts))
    assert torch.equal(cache.nan_to_num(-1), expected.nan_to_num(-1))
