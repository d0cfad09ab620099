"""Whether target, drafter, growth and verifier fit their protocols, each other, and the target's own settings."""

from __future__ import annotations

import warnings
from typing import Any

from transformers import PreTrainedModel

from specdec.drafters.eagle3 import Eagle3Drafter
from specdec.drafters.lm import LMDrafter
from specdec.models.lm import CausalLM
from specdec.protocols import Drafter, Growth, Verifier

# settings of a generation config that change what greedy decoding gives, and the value that does nothing
_NEUTRAL: dict[str, Any] = {
    "repetition_penalty": 1,
    "encoder_repetition_penalty": 1,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "min_length": 0,
    "min_new_tokens": 0,
    "bad_words_ids": [],
    "suppress_tokens": [],
    "begin_suppress_tokens": [],
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "sequence_bias": {},
    "exponential_decay_length_penalty": None,
    "guidance_scale": 1,
    "watermarking_config": None,
    "num_beams": 1,
    "penalty_alpha": 0,
    "dola_layers": None,
    "constraints": [],
    "force_words_ids": [],
    "stop_strings": [],
    "token_healing": False,
}


def as_target(target: Any) -> CausalLM:
    """A `CausalLM` around what is not one yet."""
    if isinstance(target, CausalLM):
        return target
    if not isinstance(target, PreTrainedModel) and (isinstance(target, type) or not hasattr(target, "base_model")):
        hint = f"; for a name or a folder use specdec.load({target!r})" if isinstance(target, str) else ""
        raise ValueError(f"target is {target!r:.60}; expected a CausalLM or a transformers causal LM{hint}")
    return CausalLM(target)


def check_parts(
    target: CausalLM, drafter: Drafter | None, growth: Growth | None, verifier: Verifier, exact: bool
) -> None:
    """Refuses parts that do not fit their protocol, each other, or the target."""
    _check_part("drafter", drafter, Drafter)
    _check_part("growth", growth, Growth)
    _check_part("verifier", verifier, Verifier)
    if (drafter is None) != (growth is None):
        given, missing = ("drafter", "growth") if growth is None else ("growth", "drafter")
        raise ValueError(f"a {given} was given without a {missing}; give both, or neither for plain decoding")
    if exact and not verifier.lossless:
        raise ValueError(f"exact=True refuses {type(verifier).__name__}, which is not lossless")
    if isinstance(drafter, LMDrafter) and drafter.model is target:
        raise ValueError(
            "the drafter's model is the target itself, and they would share one cache; give it a CausalLM of its own"
        )
    if isinstance(drafter, Eagle3Drafter):
        _check_head(drafter, target)


def _check_part(role: str, part: Any, protocol: type) -> None:
    if part is None:
        return
    wanted = sorted(name for name in {*vars(protocol), *protocol.__annotations__} if not name.startswith("_"))
    missing = [name for name in wanted if not hasattr(part, name)]
    if isinstance(part, type):
        raise ValueError(f"{role} is the class {part.__name__}; expected an instance, such as {part.__name__}(...)")
    if missing:
        raise ValueError(
            f"{role} is {part!r:.60} ({type(part).__name__}), which lacks {', '.join(missing)}; "
            f"expected a specdec.{protocol.__name__}: an object with {', '.join(wanted)}"
        )


def _check_head(drafter: Eagle3Drafter, target: CausalLM) -> None:
    head = drafter.head.config
    width, vocab = target.embed_tokens.weight.shape[1], target.vocab_size
    if (head.target_hidden_size, head.vocab_size) != (width, vocab):
        raise ValueError(
            f"the EAGLE-3 head was made for a target of hidden size {head.target_hidden_size} and {head.vocab_size} "
            f"tokens, but this target has {width} and {vocab}; give the head that was trained for it"
        )


def check_generation_config(target: CausalLM, exact: bool) -> None:
    """Says that the model asks for more than an argmax, which is not done here."""
    config = target.generation_config
    given = {name: getattr(config, name, None) for name in _NEUTRAL}
    applied = [f"{k}={v!r:.40}" for k, v in given.items() if v is not None and v != _NEUTRAL[k]]
    if not applied:
        return
    message = f"the model's generation config sets {', '.join(applied)}, which is not applied"
    if exact:
        raise ValueError(f"{message}; exact=True refuses that: set it to None in model.generation_config first")
    warnings.warn(
        f"{message}: texts differ from transformers.generate; set it to None in model.generation_config if that is "
        "what you want",
        RuntimeWarning,
        stacklevel=3,
    )
