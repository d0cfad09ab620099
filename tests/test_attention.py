"""Tree attention against a dense loop: what each query sees, at which positions, and where its entry is written."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle.models import FAMILIES, clone, prompt, tiny
from oracle.plain import last_logits
from oracle.scripted import situations, tree_of

from specdec.models.attention import Step
from specdec.models.cache import KVCache
from specdec.models.lm import CausalLM
from specdec.rows import Rows

pytestmark = pytest.mark.usefixtures("one_thread")


def attention(query, keys, values, scale: float):
    """One query [heads, d] over the keys [n, kv_heads, d] that it sees."""
    groups = len(query) // keys.shape[1]
    out = []
    for head, vector in enumerate(query.double()):
        weights = (keys[:, head // groups].double() @ vector * scale).softmax(0)
        out.append(weights @ values[:, head // groups].double())
    return torch.cat(out).float()


@given(situations(), st.sampled_from([None, 1, 3, 6]), st.sampled_from([(4, 4), (4, 2), (8, 1), (7, 1)]))
def test_what_the_target_sees(situation, window, heads) -> None:
    """D13, D14, D17, D18: prefix, pending ids and ancestors, by position; no sibling, no padding, no other row."""
    cached, pending, parents = situation
    query_heads, kv_heads, dim, rows = *heads, 6, len(cached)
    generator = torch.Generator().manual_seed(sum(cached) + sum(map(len, parents)))
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    cache = KVCache(1, kv_heads, dim, torch.float32, torch.device("cpu"))
    cache.start(rows, 24)
    old = draw(2, rows, 8, kv_heads, dim)
    for row, count in enumerate(cached):
        cache.data[:, row, :count] = old[:, row, :count]
    lengths = [c + p for c, p in zip(cached, pending, strict=True)]
    width = max(pending)
    tree = tree_of(parents)
    placement = tree.whole() if tree.size > 1 else None
    root = torch.tensor(lengths) - 1
    step = Step(cache, torch.tensor(cached), root, width, max(lengths) - 1, placement)
    queries = width + tree.size - 1
    query, key, value = draw(rows, queries, query_heads, dim), *draw(2, rows, queries, kv_heads, dim)
    out = step.attend(0, query, key, value, 0.3, window)

    for row in range(rows):
        # (position, key, value) of everything that is not in the tree, by entry
        entries = [(i, old[0, row, i], old[1, row, i]) for i in range(cached[row])]
        first = width - pending[row]
        entries += [(cached[row] + i, key[row, first + i], value[row, first + i]) for i in range(pending[row])]
        for column in range(first, width):
            position = cached[row] + column - first
            assert step.positions[row, column] == position
            check(out[row, column], query[row, column], position, entries[: position + 1], window)
        for node in range(len(parents[row])):
            path, up = [], node
            while up >= 0:
                path.insert(0, up)
                up = parents[row][up]
            position = lengths[row] - 1 + len(path)
            assert step.positions[row, width + node] == position
            seen = entries + [
                (lengths[row] + level, key[row, width + at], value[row, width + at]) for level, at in enumerate(path)
            ]
            check(out[row, width + node], query[row, width + node], position, seen, window)
            slot = lengths[row] + node
            assert torch.equal(cache.data[0, row, slot], key[row, width + node]), "node i lies i behind the root"


def check(out, query, position: int, entries, window) -> None:
    seen = [(k, v) for at, k, v in entries if window is None or position - at < window]
    keys, values = (torch.stack(x) for x in zip(*seen, strict=True))
    torch.testing.assert_close(out, attention(query, keys, values, 0.3), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("lean", [False, True], ids=["transformers", "lean"])
def test_each_node_is_its_path_alone(family: str, lean: bool) -> None:
    """D17: positions by slot index are right for chains and wrong from the first sibling on."""
    ids, tokens, parents = prompt(6), [10, 20, 30, 40], [-1, 0, 0, 1]
    paths = [[10], [10, 20], [10, 30], [10, 20, 40]]
    logits, _ = forward(family, lean, [ids], tree_of([parents], [tokens]))
    for node, path in enumerate(([], *paths)):
        expected = torch.from_numpy(last_logits(tiny(family), ids + path))
        torch.testing.assert_close(logits[0, node], expected, atol=1e-4, rtol=1e-4)


def forward(family, lean, prompts, tree, implementation=None):
    model = tiny(family)
    if lean or implementation:
        model = clone(model, implementation or "sdpa")
    lm = CausalLM(model, lean=lean)
    rows = Rows(prompts, 20, [0] * len(prompts))
    lm.start(rows, 64)
    return lm.forward(rows, tree.whole())


@pytest.mark.parametrize("implementation", ["eager", "sdpa", None])
def test_a_siblings_token_moves_nobody_else(implementation) -> None:
    """D21: flash kernels take no tree mask, and some stacks then ran plain causal attention. Ours is used instead."""
    parents = [[-1, -1, 0, 0, 1]]
    one, _ = forward("llama", False, [prompt(6)], tree_of(parents, [[10, 20, 30, 40, 50]]), implementation)
    two, _ = forward("llama", False, [prompt(6)], tree_of(parents, [[11, 20, 30, 40, 50]]), implementation)
    moved = (one != two).any(-1)[0].tolist()
    assert moved == [False, True, False, True, True, False], "node 1 and its two children, nobody else"


def test_rows_of_unequal_length_equal_their_single_runs() -> None:
    """D14: padding that is seen, or a shared position offset."""
    prompts = [prompt(3), prompt(9, 1)]
    parents = [[-1, -1, 1], [-1, 0, 1, -1]]
    both, _ = forward("mistral", False, prompts, tree_of(parents))
    for row in range(2):
        alone, _ = forward("mistral", False, prompts[row : row + 1], tree_of(parents[row : row + 1]))
        torch.testing.assert_close(both[row, : alone.shape[1]], alone[0], atol=1e-4, rtol=1e-4)


def test_a_caches_scrap_is_never_read() -> None:
    """Padding is written to an entry of its own: with NaN there, and behind the last entry, nothing changes."""
    cache = KVCache(1, 1, 4, torch.float32, torch.device("cpu"))
    cache.start(1, 10)
    cache.data.fill_(math.nan)
    tree = tree_of([[-1, -1, 0]])
    step = Step(cache, torch.tensor([0]), torch.tensor([2]), 3, 2, tree.whole())
    key = torch.randn(1, 6, 1, 4)
    assert torch.isfinite(step.attend(0, torch.randn(1, 6, 2, 4), key, key, 0.5)).all()
