"""Growth policies against the papers' algorithms in plain Python, on tables of logits that hold ties on purpose."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest
import torch
from specdec_kernels import confidence_gate

from specdec.draft import draft
from specdec.growth.chain import Chain
from specdec.growth.eagle2 import Eagle2
from specdec.growth.talon import Talon
from specdec.rows import Rows
from specdec.stats import Stopwatch
from specdec.tree import DraftTree, Layer

pytestmark = pytest.mark.usefixtures("one_thread")
NAN, INF = float("nan"), float("inf")


class Table:
    """A draft that is a function of (row seed, path): any logits, the same for everybody who asks."""

    taps: tuple[int, ...] = ()

    def __init__(self, seeds: list[int], vocab: int, flat: float = 1.0, bad=lambda path: None):
        self.seeds, self.vocab_size, self.flat, self.bad = seeds, vocab, flat, bad
        self.widths: list[int] = []

    def logits(self, seed: int, path: tuple[int, ...]) -> list[float]:
        random_ = random.Random(repr((seed, path)))
        row = [random_.choice((-2.0, 0.0, 1.0, 1.0, 2.0, 4.0)) / self.flat for _ in range(self.vocab_size)]
        if (wrong := self.bad(path)) is not None:
            row[len(path) % self.vocab_size] = wrong
        return row

    def logprobs(self, seed: int, path: tuple[int, ...]) -> np.ndarray:
        """fp32, to the last bit as the policies have them; -inf where nothing is known."""
        row, room = torch.tensor(self.logits(seed, path)), torch.tensor([self.vocab_size])
        _, token, score, count = confidence_gate(row[None, None], torch.zeros(1, 1), 0.0, room, self.vocab_size)
        logprobs = np.full(self.vocab_size, -INF, np.float32)
        logprobs[token[0, : int(count)]] = score[0, : int(count)]
        return logprobs

    def expand(self, rows, tree, nodes):
        self.widths.append(nodes.shape[1])
        out = torch.zeros(*nodes.shape, self.vocab_size)
        for row, seed in enumerate(self.seeds):
            for column, node in enumerate(nodes[row].tolist()):
                if node >= 0:
                    out[row, column] = torch.tensor(self.logits(seed, tuple(path_of(tree, row, node))))
        return out

    def target_ids(self, draft_ids):
        return draft_ids


def path_of(tree, row: int, node: int) -> list[int]:
    """Tokens from below the root to the node."""
    path = []
    while node > 0:
        path.append(int(tree.tokens[row, node]))
        node = int(tree.parents[row, node])
    return path[::-1]


def grown(growth, table: Table, new: int = 200):
    """The tree that the draft phase makes, and per row its nodes as (path, score) in order."""
    rows = Rows([[1]] * len(table.seeds), new, [0] * len(table.seeds))
    tree, forwards = draft(table, growth, rows, Stopwatch(torch.device("cpu")), Layer.narrow)
    found = [
        [(tuple(path_of(tree, row, node)), float(tree.scores[row, node])) for node in range(int(tree.count[row]))]
        for row in range(len(table.seeds))
    ]
    return tree, found, forwards


def children(table: Table, seed: int, path, score) -> list[tuple[tuple[int, ...], float]]:
    """All children that have a probability, in token order."""
    logprobs = table.logprobs(seed, path)
    pool = [((*path, token), float(np.float32(score) + logprob)) for token, logprob in enumerate(logprobs)]
    return [(child, path_score) for child, path_score in pool if path_score > -INF]


def best_first(pool, k: int):
    """The k most probable; ties go to the earlier one. `sorted` is stable."""
    return sorted(pool, key=lambda node: -node[1])[:k]


# --- the algorithms --------------------------------------------------------------------------------------------------


def talon(
    table: Table,
    seed: int,
    budget=60,
    mu=0.03,
    top_k=10,
    init_layers=1,
    max_depth=None,
    min_probability=0.0,
    min_mass=0.0,
    new=200,
):
    """Algorithm 2 of arXiv 2601.07353, and our cap and floors."""
    nodes = [((), 0.0)]
    frontier, depth = nodes[:], 0
    while len(nodes) < budget and frontier and depth < new - 2 and (max_depth is None or depth < max_depth):
        pool = [child for path, score in frontier for child in children(table, seed, path, score)]
        if depth < init_layers:
            layer = best_first(pool, top_k)
        else:
            threshold = np.float32(max((score for _, score in pool), default=0.0)) + np.float32(math.log(mu))
            layer = best_first([node for node in pool if node[1] >= threshold], len(pool))
        floor = math.log(min_probability) if min_probability else -INF
        layer = [node for i, node in enumerate(layer) if node[1] >= floor or i + depth == 0]
        frontier = layer[: budget - len(nodes)]
        nodes += frontier
        depth += 1
        if sum(math.exp(score) for _, score in frontier) < min_mass:
            break
    return nodes


def eagle2(table: Table, seed: int, budget=60, top_k=10, depth=8, new=200):
    """Expand the best K of a layer, keep all K x K candidates, then the best N of all (arXiv 2406.16858, section 4)."""
    candidates, frontier = [((), INF)], [((), 0.0)]
    for _ in range(min(depth + 1, new - 2)):
        layer = []
        for path, score in frontier:
            layer += best_first(children(table, seed, path, score), top_k)
        candidates += layer
        frontier = best_first(layer, top_k)
    kept = best_first(candidates, budget)
    return [((), 0.0)] + [node for node in candidates[1:] if node in kept]


def chain(table: Table, seed: int, length=4, new=200):
    nodes = [((), 0.0)]
    while len(nodes) <= min(length, new - 2):
        best = best_first(children(table, seed, *nodes[-1]), 1)
        if not best:
            break
        nodes += best
    return nodes


ALGORITHMS = {Talon: talon, Eagle2: eagle2, Chain: chain}
POLICIES = [
    *(Talon(n, mu, 4) for n in (2, 8, 24) for mu in (0.01, 0.3, 1.0)),
    *(Talon(20, 0.1, 3, layers) for layers in (0, 2, 3)),
    Talon(20, 0.1, 3, max_depth=2),
    Talon(20, 0.1, 3, min_probability=0.05),
    Talon(20, 0.1, 3, min_probability=0.9),
    Talon(20, 0.1, 3, min_mass=0.35),
    Talon(20, 0.1, 3, min_probability=0.02, min_mass=0.1),
    Eagle2(12, 4, 3),
    Eagle2(60, 3, 2),
    Eagle2(2, 1, 0),
    Chain(1),
    Chain(5),
]


@pytest.mark.parametrize("growth", POLICIES, ids=repr)
@pytest.mark.parametrize("vocab", [1, 2, 7, 19])
def test_equals_the_algorithm(growth, vocab: int) -> None:
    """Nodes, their order, their scores; three rows at once, each as it would be alone. D23: vocabularies below K."""
    for flat in (0.5, 3.0):
        table = Table([1, 2, 3], vocab, flat)
        _, found, _ = grown(growth, table)
        expected = [ALGORITHMS[type(growth)](table, seed, **vars(growth)) for seed in table.seeds]
        assert [[path for path, _ in row] for row in found] == [[path for path, _ in row] for row in expected]
        for row, wanted in zip(found, expected, strict=True):
            assert [score for _, score in row] == pytest.approx([score for _, score in wanted], abs=1e-5)


@pytest.mark.parametrize("growth", POLICIES, ids=repr)
@pytest.mark.parametrize("wrong", [NAN, INF, -INF])
def test_bad_logits_cost_nodes_and_nothing_else(growth, wrong: float) -> None:
    """D24, D26: NaN is never confident; what hangs below it is left out, and the rest is as it would be."""
    for bad in (lambda path: wrong if path[:1] == (1,) else None, lambda path: wrong if not path else None):
        table = Table([4], 7, 1.0, bad)
        tree, (found,), _ = grown(growth, table)
        assert [p for p, _ in found] == [p for p, _ in ALGORITHMS[type(growth)](table, 4, **vars(growth))]
        assert not torch.isnan(tree.scores).any()


@pytest.mark.parametrize("growth", POLICIES, ids=repr)
def test_the_tree_fits(growth) -> None:
    """Capacity and budget hold, no path comes twice, and no child scores above its parent."""
    table = Table([5, 6], 7)
    tree, found, forwards = grown(growth, table)
    assert tree.size <= growth.capacity
    assert forwards == len(table.widths)
    for row in found:
        assert len(row) <= getattr(growth, "budget", growth.capacity)
        assert len({path for path, _ in row}) == len(row), "no path twice"
        score = dict(row)
        assert all(score[path] <= score[path[:-1]] + 1e-6 for path in score if path)


@pytest.mark.parametrize("growth", [Talon(24, 0.1, 4), Eagle2(12, 4, 3), Chain(5)], ids=repr)
@pytest.mark.parametrize("new", [2, 3, 4])
def test_no_level_that_a_row_has_no_room_for(growth, new: int) -> None:
    """D09, D15: with n tokens to come the deepest useful level is n - 1 behind the first token."""
    table = Table([5, 6], 7)
    tree, _, forwards = grown(growth, table, new=new)
    assert forwards <= new - 1
    assert int(tree.depths.max()) <= new - 1


# --- D24 -------------------------------------------------------------------------------------------------------------


def test_mu_one_keeps_only_the_best() -> None:
    """A gate that rejects everything made other decoders hang; one that is bypassed costs their speed."""
    table = Table([7], 19, 0.7)
    _, (nodes,), forwards = grown(Talon(16, 1.0, 3), table)
    by_depth = [list(group) for _, group in itertools.groupby(nodes, key=lambda node: len(node[0]))]
    assert len(by_depth[1]) == 3, "the root's top K pass ungated"
    assert all(len({round(score, 6) for _, score in layer}) == 1 for layer in by_depth[2:]), "ties are all best"
    assert len(nodes) == 16
    assert forwards == len(by_depth) - 1


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("mu", [0.01, 1.0])
def test_never_zero_nodes(mu: float, seed: int) -> None:
    _, (nodes,), _ = grown(Talon(8, mu, 4, init_layers=0), Table([seed], 5))
    assert len(nodes) == 8


def test_one_row_without_a_draft_leaves_the_others() -> None:
    table = Table([1, 2], 7)
    right = table.logits
    table.logits = lambda seed, path: [NAN] * 7 if seed == 1 else right(seed, path)
    _, (first, second), _ = grown(Talon(16, 0.1, 4), table)
    assert first == [((), 0.0)]
    assert [p for p, _ in second] == [p for p, _ in talon(table, 2, 16, 0.1, 4)]


@pytest.mark.parametrize(
    "make",
    [
        lambda: Talon(mu=1.01),
        lambda: Talon(mu=0.0),
        lambda: Talon(mu=NAN),
        lambda: Talon(budget=1),
        lambda: Talon(top_k=0),
        lambda: Talon(init_layers=-1),
        lambda: Talon(max_depth=0),
        lambda: Talon(min_probability=1.0),
        lambda: Talon(min_probability=-0.1),
        lambda: Talon(min_mass=1.0),
        lambda: Eagle2(budget=1),
        lambda: Eagle2(depth=-1),
        lambda: Eagle2(top_k=0),
        lambda: Chain(0),
    ],
)
def test_a_value_out_of_range_is_refused(make) -> None:
    """D24: thresholds above 1 or below 0 silently meant "no draft" or "no gate"."""
    with pytest.raises(ValueError, match="expected"):
        make()


def test_eagle_counts_levels_as_talon_does() -> None:
    """D = 8 is nine draft forwards and nine levels; a report that counts otherwise compares apples with pears."""
    table = Table([3], 19, 0.3)
    tree, (nodes,), forwards = grown(Eagle2(60, 10, 8), table)
    assert forwards == 9
    assert len(nodes) == 60
    assert tree.depth == 9


def test_the_paper_defaults() -> None:
    assert (Talon().budget, Talon().mu, Talon().top_k, Talon().init_layers, Talon().max_depth) == (
        60,
        0.03,
        10,
        1,
        None,
    )
    assert (Eagle2().budget, Eagle2().top_k, Eagle2().depth) == (60, 10, 8)


def test_the_rerank_takes_no_padding() -> None:
    """Columns that exist in another row have the score 0, the best of all; a row with its root alone took them."""
    tree = DraftTree(torch.tensor([5, 6]), capacity=8)
    column = torch.arange(4).expand(2, 4)
    one = torch.zeros(2, 4, dtype=torch.long)
    score = torch.tensor([[-1.0, -2.0, -3.0, -4.0]]).expand(2, 4)
    tree.append(Layer(one, column + 10, score, torch.tensor([0, 4]), column, torch.tensor([0, 4])), lambda ids: ids)
    finished = Eagle2(budget=3, top_k=4).finish(tree)
    assert finished.count.tolist() == [1, 3]
    assert finished.tokens[1].tolist() == [6, 10, 11]
    assert finished.parents[0].tolist() == [-1, -1, -1]
