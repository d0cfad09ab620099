"""From what a user gives to ids, and the checks that come before any forward pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from specdec.models.lm import CausalLM

_EXPECTED = "expected a string, a list of chat messages, a list of ids, or a list of such prompts"


def encode(prompt: Any, tokenizer: PreTrainedTokenizerBase | None) -> tuple[list[list[int]], bool]:
    """Ids of every prompt, and whether a single one was given."""
    if hasattr(prompt, "tolist"):
        prompt = prompt.tolist()
    if isinstance(prompt, str) or (_is_list(prompt) and prompt and isinstance(prompt[0], (int, Mapping))):
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
    if _is_list(prompt) and all(isinstance(item, int) and not isinstance(item, bool) for item in prompt):
        return list(prompt)
    if tokenizer is None:
        raise ValueError("the prompt is text, but this decoder has no tokenizer; pass one to Decoder, or give ids")
    if isinstance(prompt, str):
        return tokenizer(prompt)["input_ids"]
    if _is_list(prompt) and all(isinstance(item, Mapping) for item in prompt):
        if tokenizer.chat_template is None:
            raise ValueError("the prompt is a list of messages, but this tokenizer has no chat template; give a string")
        text = tokenizer.apply_chat_template(list(prompt), tokenize=False, add_generation_prompt=True)
        return tokenizer(text, add_special_tokens=False)["input_ids"]  # the template holds the special tokens
    raise ValueError(f"a prompt is {prompt!r:.60}; {_EXPECTED}")


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
    if not isinstance(max_new_tokens, int) or isinstance(max_new_tokens, bool) or max_new_tokens < 1:
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
