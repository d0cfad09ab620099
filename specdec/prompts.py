"""From what a user gives to ids."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

_EXPECTED = "expected a string, a list of chat messages, a list of ids, or a list of such prompts"


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
    if _is_list(prompt) and None not in (ids := [as_int(item) for item in prompt]):
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
    return isinstance(item, (bool, Mapping)) or as_int(item) is not None


def as_int(value: Any) -> Any:
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
