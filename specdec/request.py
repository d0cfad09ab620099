"""What a user asks of one call: how many tokens, how they are drawn, and where the text ends."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from transformers import PreTrainedTokenizerBase

from specdec.models.lm import CausalLM
from specdec.prompts import as_int
from specdec.rows import Rows, Stopping
from specdec.sampling import Sampler


@dataclass(frozen=True)
class Request:
    """Options of `Decoder.generate` and `Decoder.stream`.

    Attributes:
        max_new_tokens: budget, at least 1.
        temperature, top_k, top_p: 0.0 is greedy; same law as Hugging Face's sampling.
        seed: the same seed gives the same text with every lossless method; may be a list with one seed a prompt.
        stop: strings that end the text; the token that completes one is the last.
        eos_token_ids: end-of-text ids of this call; None for those of the decoder.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | Sequence[int] = 0
    stop: str | Sequence[str] | None = None
    eos_token_ids: int | Sequence[int] | None = None

    @classmethod
    def of(cls, function: str, options: Mapping[str, Any]) -> Request:
        """The request with these options; TypeError for an unknown one, as Python would, but with what there is."""
        known = [field.name for field in fields(cls)]
        if unknown := [name for name in options if name not in known]:
            raise TypeError(f"{function} has no option {', '.join(map(repr, unknown))}; it has {', '.join(known)}")
        return cls(**options)

    @property
    def sampler(self) -> Sampler:
        return Sampler(self.temperature, self.top_k, self.top_p)

    def rows(
        self,
        prompts: list[list[int]],
        target: CausalLM,
        tokenizer: PreTrainedTokenizerBase | None,
        eos_token_ids: frozenset[int],
    ) -> Rows:
        """The checked request as the state that decoding starts from.

        Args:
            eos_token_ids: those of the decoder.
        Raises:
            ValueError: what no method can decode: names what was given, what was expected, and what to do.
        """
        seeds, stops = _seeds(self.seed, len(prompts)), _stops(self.stop)
        self._check(prompts, seeds, stops, target, tokenizer)
        eos = eos_token_ids if self.eos_token_ids is None else as_ids(self.eos_token_ids)
        stopping = Stopping(eos, stops, tokenizer.decode if tokenizer and stops else None)
        return Rows(prompts, int(self.max_new_tokens), seeds, stopping, target.context, target.device)

    def _check(
        self,
        prompts: list[list[int]],
        seeds: Sequence[int],
        stops: Sequence[str],
        target: CausalLM,
        tokenizer: PreTrainedTokenizerBase | None,
    ) -> None:
        if as_int(self.max_new_tokens) is None or self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {self.max_new_tokens!r}; expected an integer >= 1")
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
                raise ValueError(
                    f"{which} has {len(ids)} tokens, but the target's context is {target.context}; shorten it"
                )
            if not 0 <= min(ids) <= max(ids) < target.vocab_size:
                wrong = next(i for i in ids if not 0 <= i < target.vocab_size)
                raise ValueError(
                    f"{which} holds the id {wrong}, but the target's vocabulary has {target.vocab_size} entries; "
                    "was it made by another model's tokenizer?"
                )


def _seeds(seed: Any, prompts: int) -> list[Any]:
    """One seed a prompt; what is no integer stays as it is, for `rows` to refuse."""
    single = isinstance(seed, str) or not isinstance(seed, Iterable) or as_int(seed) is not None
    seeds = [seed] * prompts if single else list(seed)
    return [one if as_int(one) is None else as_int(one) for one in seeds]


def _stops(stop: Any) -> tuple[str, ...]:
    """Stop strings as a tuple."""
    if stop is None or isinstance(stop, str):
        return () if stop is None else (stop,)
    if not isinstance(stop, Iterable) or isinstance(stop, (bytes, Mapping)):
        raise ValueError(f"stop is {stop!r}; expected a string or a list of strings")
    return tuple(stop)


def as_ids(eos_token_ids: Any) -> frozenset[int]:
    """End-of-text ids as a set; a single one may be given plain."""
    single = as_int(eos_token_ids)
    given = [eos_token_ids] if single is not None or not isinstance(eos_token_ids, Iterable) else list(eos_token_ids)
    ids = [as_int(one) for one in given]
    if None in ids or isinstance(eos_token_ids, (str, bytes)):
        raise ValueError(f"eos_token_ids is {eos_token_ids!r}; expected an id or a list of ids, [] for none")
    return frozenset(ids)
