"""The round: draft, verify, commit. Everything that makes text consumes `Decoder.rounds`."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specdec.draft import draft, narrow
from specdec.models.lm import CausalLM
from specdec.prompts import (
    as_ids,
    as_seeds,
    as_stops,
    as_target,
    check_generation_config,
    check_parts,
    check_request,
    encode,
    refuse_unknown,
)
from specdec.protocols import Drafter, Growth, Verdict, Verifier
from specdec.rows import Rows, Stopping
from specdec.sampling import Sampler
from specdec.stats import Output, Round, Stopwatch
from specdec.streaming import Piece, TextStream
from specdec.tree import DraftTree
from specdec.verifiers.target import TargetVerifier

_NOTHING_DRAFTED = (
    "the draft proposed no token: either its logits hold no finite value (float16 overflow, or a broken checkpoint?), "
    "or the growth policy chose none of its candidates; the text is right, but nothing is gained"
)


class Decoder:
    """A target, who proposes, how the tree grows, who decides.

    Args:
        target: a `CausalLM`, or a `transformers` model to borrow.
        drafter, growth: both or neither; without them every round is a plain step.
        verifier: the target alone by default, which is lossless.
        tokenizer: for prompts and output as text; ids work without.
        eos_token_ids: by default those of the model's generation config.
        method: the name that results carry.
        exact: refuse a verifier that is not lossless, and a target whose generation config changes its greedy text.
    """

    def __init__(
        self,
        target: CausalLM | PreTrainedModel,
        drafter: Drafter | None = None,
        growth: Growth | None = None,
        verifier: Verifier | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        eos_token_ids: int | Sequence[int] | None = None,
        method: str = "custom",
        exact: bool = False,
    ):
        self.target = as_target(target)
        self.drafter, self.growth, self.method = drafter, growth, method
        self.verifier = TargetVerifier(self.target) if verifier is None else verifier
        check_parts(self.target, drafter, growth, self.verifier, exact)
        check_generation_config(self.target, exact)
        self.tokenizer = tokenizer
        self.eos_token_ids = self.target.eos_token_ids if eos_token_ids is None else as_ids(eos_token_ids)
        self.plain_step_seconds: float | None = None
        self.split_time = self.target.device.type != "cuda"

    def rounds(self, rows: Rows, sampler: Sampler) -> Iterator[list[Round]]:
        """Decodes until every row has ended; yields one `Round` a row, the prefill first."""
        return _without_autocast(self._rounds(rows, sampler), self.target.device.type)

    @torch.inference_mode()
    def _rounds(self, rows: Rows, sampler: Sampler) -> Iterator[list[Round]]:
        watch = Stopwatch(self.target.device, self.split_time)
        self.target.taps = self.drafter.taps if self.drafter else ()  # a target may serve several decoders
        nodes = self.growth.capacity if self.growth else 1
        self.verifier.start(rows, max(rows.limit) + nodes)
        if self.drafter:  # rows share the columns of a layer, which are as many as the widest row wants
            self.drafter.start(rows, max(rows.limit) + nodes * len(rows))
        tree, forwards = DraftTree(rows.roots, capacity=1), 0
        while True:
            with watch("verify"):
                verdict = self.verifier.verify(rows, tree, sampler)
            with watch("commit"):
                gained = self._commit(rows, tree, verdict)
            gains = rows.fetch(tree, verdict.path, verdict.length, gained)
            split = watch.lap()
            yield [
                Round(gain.tokens, gain.path, gain.nodes, forwards, 1, split, tree, row)
                for row, gain in enumerate(gains)
            ]
            if forwards and all(gain.nodes <= 1 for gain in gains):
                warnings.warn(_NOTHING_DRAFTED, RuntimeWarning, stacklevel=2)  # Python shows it once
            if rows.finished:
                return
            watch.restart()  # the consumer's time is not ours
            if self.drafter and self.growth:
                tree, forwards = draft(self.drafter, self.growth, rows, watch, narrow)
            else:
                tree = DraftTree(rows.roots, capacity=1)

    def _commit(self, rows: Rows, tree: DraftTree, verdict: Verdict) -> torch.Tensor:
        self.verifier.commit(rows, tree, verdict)
        if self.drafter:
            self.drafter.observe(rows, verdict.span, tree, verdict)
        return rows.extend(tree, verdict.path, verdict.length, verdict.bonus)

    def generate(
        self,
        prompt: Any,
        *,
        max_new_tokens: int = 128,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int | Sequence[int] = 0,
        stop: str | Sequence[str] | None = None,
        eos_token_ids: int | Sequence[int] | None = None,
        **unknown: Any,
    ) -> Any:
        """Text for one prompt, or for each of a list of prompts.

        Args:
            prompt: a string (continued as it is), a list of chat messages (the chat template is applied), or a list of
                ids; a list of any of these gives a list of outputs, decoded as one batch.
            max_new_tokens: budget, at least 1.
            temperature, top_k, top_p: 0.0 is greedy; same law as Hugging Face's sampling.
            seed: the same seed gives the same text with every lossless method; may be a list with one seed a prompt.
            stop: strings that end the text; the token that completes one is the last.
            eos_token_ids: end-of-text ids of this call.
        Returns:
            An `Output`, or a list of them for a list of prompts.
        Raises:
            ValueError: what was given, what was expected, what to do.
        """
        refuse_unknown("generate", unknown)
        prompts, single = encode(prompt, self.tokenizer)
        outputs = self._outputs(prompts)
        sampler = Sampler(temperature, top_k, top_p)
        rows = self._rows(prompts, max_new_tokens, seed, stop, eos_token_ids)
        for _ in self._run(rows, sampler, outputs):
            pass
        return outputs[0] if single else outputs

    def stream(
        self,
        prompt: Any,
        *,
        max_new_tokens: int = 128,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        stop: str | Sequence[str] | None = None,
        eos_token_ids: int | Sequence[int] | None = None,
        **unknown: Any,
    ) -> Iterator[Piece]:
        """The text of one prompt, a piece a round; everything is checked before the first one is asked for.

        Args: those of `generate`, one prompt only.
        """
        refuse_unknown("stream", unknown)
        prompts, single = encode(prompt, self.tokenizer)
        if not single:
            raise ValueError(
                f"stream takes one prompt, but a list of prompts was given ({len(prompts)} in it); "
                "give the prompt itself, or use generate for a list"
            )
        sampler = Sampler(temperature, top_k, top_p)
        rows = self._rows(prompts, max_new_tokens, seed, stop, eos_token_ids)
        return self._pieces(rows, sampler, *self._outputs(prompts))

    def _outputs(self, prompts: list[list[int]]) -> list[Output]:
        lossless, step = self.verifier.lossless, self.plain_step_seconds
        return [Output(ids, self.method, lossless, plain_step_seconds=step) for ids in prompts]

    def _rows(
        self,
        prompts: list[list[int]],
        max_new_tokens: int,
        seed: int | Sequence[int],
        stop: str | Sequence[str] | None,
        eos_token_ids: int | Sequence[int] | None,
    ) -> Rows:
        """The checked request as the state that `rounds` starts from."""
        seeds, stops = as_seeds(seed, len(prompts)), as_stops(stop)
        check_request(prompts, max_new_tokens, seeds, stops, self.target, self.tokenizer)
        eos = self.eos_token_ids if eos_token_ids is None else as_ids(eos_token_ids)
        decode = self.tokenizer.decode if self.tokenizer and stops else None
        stopping = Stopping(eos, stops, decode)
        return Rows(prompts, int(max_new_tokens), seeds, stopping, self.target.context, self.target.device)

    def _pieces(self, rows: Rows, sampler: Sampler, output: Output) -> Iterator[Piece]:
        text = TextStream(self.tokenizer)
        for (latest,) in self._run(rows, sampler, [output]):
            yield Piece(text.push(latest.tokens, last=output.finish_reason is not None), latest.tokens, latest, output)

    def _run(self, rows: Rows, sampler: Sampler, outputs: list[Output]) -> Iterator[list[Round]]:
        """Consumes `rounds` and fills the outputs."""
        begin = time.perf_counter()
        for latest in self.rounds(rows, sampler):
            for row, output in enumerate(outputs):
                if output.finish_reason is None:
                    output.rounds.append(latest[row])
                    output.tokens += latest[row].tokens
                    output.finish_reason = rows.finish_reasons[row]
            if rows.finished:
                for output in outputs:
                    output.text = (
                        self.tokenizer.decode(output.tokens, skip_special_tokens=True) if self.tokenizer else ""
                    )
                    output.seconds = time.perf_counter() - begin
            yield latest


def _without_autocast(steps: Iterator[list[Round]], device: str) -> Iterator[list[Round]]:
    """Each step in the models' own precision; between two steps the consumer has what it had."""
    while True:
        with torch.autocast(device, enabled=False):
            latest = next(steps, None)
        if latest is None:
            return
        yield latest
