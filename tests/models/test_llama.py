"""The lean forward against transformers' own, on every family it takes, and what it must refuse."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from oracle.models import FAMILIES, TAPS, clone, prompt, text, tiny
from oracle.scripted import oracle, tree_of
from torch import nn

from specdec.decoder import Decoder
from specdec.drafters.lm import LMDrafter
from specdec.evaluation.exactness import greedy_reference, random_target
from specdec.growth.chain import Chain
from specdec.models.huggingface import HuggingFaceModel
from specdec.models.llama import LeanLlama, layer_windows, supports
from specdec.models.lm import CausalLM
from specdec.rows import Rows

pytestmark = pytest.mark.usefixtures("one_thread")

VARIANTS = {
    **{family: {} for family in FAMILIES},
    "llama, tied": {"tie_word_embeddings": True},
    "llama, biases": {"attention_bias": True, "mlp_bias": True},
    "llama, scaled rope": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "llama, one key head": {"num_attention_heads": 4, "num_key_value_heads": 1},
    "qwen2, some windows": {
        "use_sliding_window": True,
        "sliding_window": 6,
        "max_window_layers": 1,
        "num_hidden_layers": 3,
    },
    "qwen3, windows": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0},
    "mistral, no window": {"sliding_window": None},
}


def pair(variant: str):
    """transformers' forward and the lean one, of the same weights."""
    model = random_target(variant.split(",")[0], 3, **VARIANTS[variant])
    return CausalLM(model), CausalLM(clone(model), lean=True)


@pytest.mark.parametrize("variant", VARIANTS)
def test_equals_transformers(variant: str) -> None:
    """Prefill of unequal rows, then a tree: logits and features of every real column."""
    found = []
    for lm in pair(variant):
        lm.taps = TAPS
        rows = Rows([prompt(13), prompt(5, 1)], 20, [0, 0])
        lm.start(rows, 64)
        tree = tree_of([[-1, -1, 0, 0, 3], [-1, 0]], [[3, 4, 5, 6, 7], [8, 9]])
        logits, span = lm.forward(rows, tree.whole())
        found.append((lm.backbone, logits[0], logits[1, :3], span.features[0], span.features[1, 8:15]))
    theirs, ours = found
    assert isinstance(theirs[0], HuggingFaceModel)
    assert isinstance(ours[0], LeanLlama)
    for a, b in zip(ours[1:], theirs[1:], strict=True):
        torch.testing.assert_close(a, b, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_text_is_the_same(variant: str) -> None:
    model = random_target(variant.split(",")[0], 3, **VARIANTS[variant])
    ids = prompt(5)
    expected = greedy_reference(model, ids, 24)
    for lm in (CausalLM(model), CausalLM(clone(model), lean=True)):
        made = Decoder(lm, *oracle([ids + expected], 97, 4, 3))
        assert made.generate(ids, max_new_tokens=24).tokens == expected


def test_windows_by_layer() -> None:
    assert layer_windows(tiny("mistral").config) == [8, 8]
    assert layer_windows(tiny("llama").config) == [None, None]
    some = random_target("qwen2", 0, **VARIANTS["qwen2, some windows"])
    assert layer_windows(some.config) == [None, 6, 6]


def test_the_originals_are_freed() -> None:
    """Packing copies the weights; keeping both would double the memory."""
    model = clone(tiny())
    weights = [weakref.ref(layer.mlp.down_proj.weight) for layer in model.model.layers]
    weights += [weakref.ref(layer.self_attn.q_proj.weight) for layer in model.model.layers]
    lean = LeanLlama(model)
    gc.collect()
    assert [weight() for weight in weights] == [None] * len(weights)
    assert lean.layers


class Odd(nn.Linear):
    """A layer that looks linear and computes something else, as quantised and adapted layers do."""


def test_what_it_does_not_compute_is_refused() -> None:
    assert supports(tiny()) is None
    odd = clone(tiny())
    odd.model.layers[1].mlp.up_proj = Odd(64, 96)
    assert "layers.1.mlp.up_proj" in supports(odd)
    with pytest.raises(ValueError, match="not a plain layer"):
        LeanLlama(odd)
    assert "gelu" in supports(random_target("llama", 0, hidden_act="gelu"))
    other = clone(tiny())
    other.config.model_type = "gemma"
    assert "gemma" in supports(other)


def test_lean_draft_and_target_together() -> None:
    """What `load` makes on a CPU: both lean, each with its own weights."""
    ids = prompt(6)
    draft = CausalLM(clone(tiny()), "draft", lean=True)
    made = Decoder(CausalLM(clone(tiny()), lean=True), LMDrafter(draft), Chain(4))
    output = made.generate(ids, max_new_tokens=24)
    assert output.tokens == text("llama", ids, 24)
    assert output.summary()["tau"] > 4, "the draft is the target"
