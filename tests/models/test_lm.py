"""The wrapper of target and draft: rolling back, features, and a borrowed model that is given back as it was."""

from __future__ import annotations

import pytest
import torch
from oracle.caches import fresh_pass
from oracle.models import FAMILIES, TAPS, decoder, head_draft, lm_draft, prompt, tiny
from oracle.plain import last_logits

from specdec.evaluation.exactness import greedy_reference
from specdec.growth.talon import Talon
from specdec.models.cache import KVCache
from specdec.models.lm import CausalLM
from specdec.rows import Rows
from specdec.tree import DraftTree, Layer

pytestmark = pytest.mark.usefixtures("one_thread")


def chain(root: int, tokens: list[int]) -> DraftTree:
    tree = DraftTree(torch.tensor([root]), len(tokens) + 1)
    node, one = tree.root, torch.tensor([1])
    for token in tokens:
        node = tree.append(
            Layer(node, torch.tensor([[token]]), torch.zeros(1, 1), one, tree.root, one), lambda ids: ids
        )
    return tree


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kept", [0, 1, 3, 5])
def test_rolling_back_is_arithmetic(family: str, kept: int) -> None:
    """D12: crop(0) kept everything, crop(-n) kept stale entries, a static cache was rebuilt, lengths were tensors.

    Here: prefill 6, verify 5, keep some, decode one; and then, from the start again, in the same buffer.
    """
    ids, drafted = prompt(6), prompt(5, 1)
    lm = CausalLM(tiny(family))
    rows = Rows([ids], 30, [0])
    lm.start(rows, 64)
    buffer = lm.cache.data.data_ptr()
    for _ in range(2):
        lm.start(rows := Rows([ids], 30, [0]), 64)
        tree = chain(ids[-1], drafted)
        lm.forward(rows, tree.whole())
        path = torch.tensor([list(range(1, kept + 1))], dtype=torch.long)
        length, bonus = torch.tensor([kept]), torch.tensor([7])
        lm.commit(rows, path, length)
        rows.fetch(tree, path, length, rows.extend(tree, path, length, bonus))
        assert rows.host.cached["target"] == [6 + kept]
        assert type(rows.host.cached["target"][0]) is int
        logits, _ = lm.forward(rows)
        expected = torch.from_numpy(last_logits(tiny(family), [*ids, *drafted[:kept], 7]))
        torch.testing.assert_close(logits[0, 0], expected, atol=1e-4, rtol=1e-4)
        assert lm.cache.data.data_ptr() == buffer


def test_the_buffer_grows_only() -> None:
    """D12, D36: a shorter generation uses the buffer of the longer one before it."""
    cache = KVCache(2, 1, 4, torch.float32, torch.device("cpu"))
    cache.start(2, 20)
    kept = cache.data.data_ptr()
    for rows, entries in ((1, 20), (2, 5), (1, 1)):
        cache.start(rows, entries)
        assert cache.data.data_ptr() == kept
        assert cache.data.shape[1] == rows
        assert cache.scrap >= entries
    cache.start(3, 20)
    assert cache.data.shape == (4, 3, 21, 1, 4)
    cache.start(1, 30)
    assert cache.data.shape == (4, 1, 31, 1, 4)


def test_features_are_the_inputs_of_their_layers() -> None:
    """D31: features one layer off, or behind the final norm: acceptance fell to 1 % and nothing was said."""
    ids = prompt(9)
    lm = CausalLM(tiny())
    lm.taps = TAPS
    rows = Rows([ids], 10, [0])
    lm.start(rows, 32)
    _, span = lm.forward(rows)
    _, hidden = fresh_pass(tiny(), ids)
    with torch.inference_mode():
        public = tiny()(torch.tensor([ids]), output_hidden_states=True, use_cache=False).hidden_states
    for tap, feature in zip(TAPS, span.features.chunk(3, -1), strict=True):
        torch.testing.assert_close(feature[0], hidden[tap], atol=1e-5, rtol=1e-5)
        if tap < 2:  # transformers' last entry is behind the final norm, ours is before it
            torch.testing.assert_close(feature, public[tap], atol=1e-5, rtol=1e-5)
    assert span.start.tolist() == [0]


def test_a_borrowed_model_is_given_back() -> None:
    """The user's model object keeps its attention, its hooks and its text."""
    model = tiny("qwen2")
    before = model.config._attn_implementation
    expected = greedy_reference(model, prompt(4), 12)
    decoder(model, (lm_draft("qwen2"), Talon(16))).generate(prompt(4), max_new_tokens=8)
    decoder(model, (head_draft("qwen2"), Talon(16))).generate(prompt(4), max_new_tokens=8)
    assert model.config._attn_implementation == before
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert greedy_reference(model, prompt(4), 12) == expected


def test_a_failure_gives_the_model_back_too(monkeypatch) -> None:
    model = tiny("qwen2")
    before = model.config._attn_implementation
    made = decoder(model, (head_draft("qwen2"), Talon(16)))
    monkeypatch.setattr(type(model.base_model), "forward", lambda *args, **kwargs: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        made.generate(prompt(4))
    assert model.config._attn_implementation == before
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_our_attention_needs_our_call() -> None:
    model = tiny("qwen2")
    before, model.config._attn_implementation = model.config._attn_implementation, "specdec_tree"
    try:
        with pytest.raises(RuntimeError, match="outside of specdec"):
            model(torch.tensor([[1, 2]]), use_cache=False)
    finally:
        model.config._attn_implementation = before
