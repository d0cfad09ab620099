"""From what a user gives to ids, and the checks that come before any forward pass."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specdec.drafters.eagle3 import Eagle3Drafter
from specdec.drafters.lm import LMDrafter
from specdec.models.lm import CausalLM
from specdec.protocols import Drafter, Growth, Verifier

_EXPECTED = "expected a string, a list of chat messages, a list of ids, or a list of such prompts"
_OPTIONS = ("max_new_tokens", "temperature", "top_k", "top_p", "seed", "stop", "eos_token_ids")
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


def encode(prompt: Any, tokenizer: PreTrainedTokenizerBase | None) -> tuple[list[list[int]], bool]:
    """Ids of every prompt, and whether a single one was given."""
    if hasattr(prompt, "tolist"):
        prompt = prompt.tolist()
    if isinstance(prompt, str) or (_is_list(prompt) and prompt and _starts_one(prompt[0])):
        return [_encode_one(prompt, tokenizer)], True
    if not _is_list(prompt):
        raise ValueError(f"the prompt is a {type(prompt).__name__}; {_EXPECTED}")
    if not prompt:
        raise ValueError(f"the prompt is an empty list; {_EXPECTED}")
    return [_encode_one(one, tokenizer) for one in prompt], False


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def _encode_one(prompt: Any, tokenizer: PreTrainedTokenizerBase | None) -> list[int]:
    if hasattr(prompt, "tolist"):
        prompt = prompt.tolist()
    if _is_list(prompt) and None not in (ids := [_as_int(item) for item in prompt]):
        return ids
    if tokenizer is None:
        raise ValueError("the prompt is text, but this decoder has no tokenizer; pass one to Decoder, or give ids")
    if isinstance(prompt, str):
        return tokenizer(_encodable(prompt))["input_ids"]
    if _is_list(prompt) and all(isinstance(item, Mapping) for item in prompt):
        if tokenizer.chat_template is None:
            raise ValueError("the prompt is a list of messages, but this tokenizer has no chat template; give a string")
        text = tokenizer.apply_chat_template(list(prompt), tokenize=False, add_generation_prompt=True)
        # the template holds the special tokens
        return tokenizer(_encodable(text), add_special_tokens=False)["input_ids"]
    raise ValueError(f"a prompt is {prompt!r:.60}; {_EXPECTED}")


def _starts_one(item: Any) -> bool:
    """Whether a list that begins with the item is one prompt: ids or messages."""
    return isinstance(item, (bool, Mapping)) or _as_int(item) is not None


def _as_int(value: Any) -> Any:
    """An integer of any library as an int, else None."""
    if isinstance(value, bool) or getattr(value, "ndim", 0) > 0:
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def _encodable(text: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"the prompt holds the lone surrogate {text[error.start]!r} at character {error.start}, which is no text; "
            "decode its source with errors='replace'"
        ) from None
    return text


def as_seeds(seed: Any, prompts: int) -> list[Any]:
    """One seed a prompt; what is no integer stays as it is, for `check_request` to refuse."""
    single = isinstance(seed, str) or not isinstance(seed, Iterable) or _as_int(seed) is not None
    seeds = [seed] * prompts if single else list(seed)
    return [one if _as_int(one) is None else _as_int(one) for one in seeds]


def as_stops(stop: Any) -> tuple[str, ...]:
    """Stop strings as a tuple."""
    if stop is None or isinstance(stop, str):
        return () if stop is None else (stop,)
    if not isinstance(stop, Iterable) or isinstance(stop, (bytes, Mapping)):
        raise ValueError(f"stop is {stop!r}; expected a string or a list of strings")
    return tuple(stop)


def as_ids(eos_token_ids: Any) -> frozenset[int]:
    """End-of-text ids as a set; a single one may be given plain."""
    single = _as_int(eos_token_ids)
    given = [eos_token_ids] if single is not None or not isinstance(eos_token_ids, Iterable) else list(eos_token_ids)
    ids = [_as_int(one) for one in given]
    if None in ids or isinstance(eos_token_ids, (str, bytes)):
        raise ValueError(f"eos_token_ids is {eos_token_ids!r}; expected an id or a list of ids, [] for none")
    return frozenset(ids)


def refuse_unknown(function: str, unknown: Mapping[str, Any]) -> None:
    """As Python would, but with what there is."""
    if unknown:
        raise TypeError(f"{function} has no option {', '.join(map(repr, unknown))}; it has {', '.join(_OPTIONS)}")


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


def check_request(
    prompts: list[list[int]],
    max_new_tokens: int,
    seeds: Sequence[int],
    stops: Sequence[str],
    target: CausalLM,
    tokenizer: PreTrainedTokenizerBase | None,
) -> None:
    """Refuses what no method can decode.

    Raises:
        ValueError: names what was given, what was expected, and what to do.
    """
    if _as_int(max_new_tokens) is None or max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {max_new_tokens!r}; expected an integer >= 1")
    if len(seeds) != len(prompts):
        raise ValueError(f"{len(seeds)} seeds for {len(prompts)} prompts; give one integer, or one for each prompt")
    for seed in seeds:
        if not isinstance(seed, int) or not -(2**63) <= seed < 2**63:
            raise ValueError(f"the seed is {seed!r}; expected an integer of 64 bits")
    if not all(isinstance(stop, str) and stop for stop in stops):
        raise ValueError(f"stop is {list(stops)!r}; expected non-empty strings")
    if stops and tokenizer is None:
        raise ValueError("stop strings need a tokenizer, and this decoder has none; pass one to Decoder")
    for row, ids in enumerate(prompts):
        which = f"prompt {row}" if len(prompts) > 1 else "the prompt"
        if not ids:
            raise ValueError(f"{which} is empty; expected at least one token (a BOS token will do)")
        if len(ids) > target.context:
            raise ValueError(f"{which} has {len(ids)} tokens, but the target's context is {target.context}; shorten it")
        if not 0 <= min(ids) <= max(ids) < target.vocab_size:
            wrong = next(i for i in ids if not 0 <= i < target.vocab_size)
            raise ValueError(
                f"{which} holds the id {wrong}, but the target's vocabulary has {target.vocab_size} entries; "
                "was it made by another model's tokenizer?"
            )
