"""Models that would give text other than their own are refused when they are wrapped, by name where there is one."""

from __future__ import annotations

import pytest
import torch
from oracle.models import FAMILIES, clone, tiny
from transformers import AutoConfig, AutoModelForCausalLM

from specdec.evaluation.exactness import random_target
from specdec.models.huggingface import HuggingFaceModel
from specdec.models.lm import CausalLM

pytestmark = pytest.mark.usefixtures("one_thread")
SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
GROUPED = {"num_key_value_heads": 2, "head_dim": 16}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
    "original_max_position_embeddings": 64,
}
REFUSED = {
    "attention sinks": ("gpt_oss", {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}, "'s_aux'"),
    "capped attention": ("gemma2", {**GROUPED, "final_logit_softcapping": None}, "'softcap'"),
    "capped logits": ("gemma2", {**GROUPED, "attn_logit_softcapping": None}, "final_logit_softcapping = 30"),
    "divided logits": ("granite", {**GROUPED, "logits_scaling": 8.0}, "logits_scaling = 8"),
    "scaled logits": ("cohere", {"num_key_value_heads": 2}, "logit_scale = 0.0625"),
    "dynamic rope": ("llama", {**GROUPED, "rope_parameters": DYNAMIC}, "'dynamic'"),
    "longrope": ("llama", {**GROUPED, "rope_parameters": LONG}, "'longrope'"),
    "no positions": ("bloom", {"n_layer": 2, "n_head": 4, "max_position_embeddings": None}, "max_position_embeddings"),
    "attention of its own": ("bloom", {"n_layer": 2, "n_head": 4}, "forward fails"),
    "no tree in its rope": ("stablelm", {"num_key_value_heads": 2}, "forward fails"),
    "alibi": ("mpt", {"d_model": 64, "n_heads": 4, "n_layers": 2}, "forward fails"),
    "no attention": ("mamba", {}, "its config|linear_attention"),
    "convolutions": ("lfm2", {"num_key_value_heads": 2, "layer_types": ["conv", "full_attention"]}, "'conv'"),
}


def made(kind: str, **extra):
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**SIZES, **extra})).eval()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    """Some of these were decoded to wrong text, others failed at the first token with an error about shapes."""
    kind, extra, reason = REFUSED[case]
    with pytest.raises(ValueError, match=rf"this model cannot be decoded here: .*({reason})"):
        CausalLM(made(kind, **extra))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["gpt2", "gpt_neox", "opt", "phi", "gemma", "olmo2", "mixtral", "granite"])
def test_other_families_are_taken(kind: str) -> None:
    extra = {"opt": {"ffn_dim": 96, "word_embed_proj_dim": 64}, "gemma": GROUPED, "mixtral": GROUPED}
    CausalLM(made(kind, **extra.get(kind, {})))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", FAMILIES)
def test_rounding_is_no_reason(family: str, dtype: torch.dtype) -> None:
    CausalLM(random_target(family).to(dtype))


def test_a_lean_model_is_refused_by_its_rope_too() -> None:
    with pytest.raises(ValueError, match="'dynamic'"):
        CausalLM(random_target("llama", rope_parameters=DYNAMIC), lean=True)


def test_a_state_kept_elsewhere_is_found(monkeypatch) -> None:
    """One pass over all tokens would not: what a model keeps of the past is asked for by the second pass."""
    model = clone(tiny())
    run = HuggingFaceModel.run

    def forgetful(self, ids, step, taps):
        if step.positions[0, 0] > 0:
            step.cache.data.zero_()
        return run(self, ids, step, taps)

    monkeypatch.setattr(HuggingFaceModel, "run", forgetful)
    with pytest.raises(ValueError, match="logits with tree attention are not its own"):
        CausalLM(model)


def test_broken_weights_are_the_loops_business() -> None:
    """Where the model itself gives NaN, generating names the token and the node."""
    model = clone(tiny())
    model.lm_head.weight[3] = float("nan")
    CausalLM(model)
    model.lm_head.weight.fill_(float("nan"))
    CausalLM(model)


def test_a_model_without_weights_is_not_run() -> None:
    with torch.device("meta"):
        model = type(tiny())(tiny().config)
    CausalLM(model)
