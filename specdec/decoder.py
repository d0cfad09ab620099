"""The round: draft, verify, commit. Everything that makes text consumes `Decoder.rounds`."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, overload

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specdec.draft import draft, narrow
from specdec.models.lm import CausalLM
from specdec.prompts import check_request, encode
from specdec.protocols import Drafter, Growth, Verdict, Verifier
from specdec.rows import Rows, Stopping
from specdec.sampling import Sampler
from specdec.stats import Output, Round, Stopwatch
from specdec.streaming import Piece, TextStream
from specdec.tree import DraftTree
from specdec.verifiers.target import TargetVerifier

_NOTHING_DRAFTED = (
    "the draft proposed no token: its logits hold no finite value (float16 overflow, or a broken checkpoint?); "
    "the text is right, but nothing is gained"
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
        exact: refuse a verifier that is not lossless.
    """

    def __init__(
        self,
        target: CausalLM | PreTrainedModel,
        drafter: Drafter | None = None,
        growth: Growth | None = None,
        verifier: Verifier | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        eos_token_ids: Sequence[int] | None = None,
        method: str = "custom",
        exact: bool = False,
    ):
        if (drafter is None) != (growth is None):
            given, missing = ("drafter", "growth") if growth is None else ("growth", "drafter")
            raise ValueError(f"a {given} was given without a {missing}; give both, or neither for plain decoding")
        self.target = target if isinstance(target, CausalLM) else CausalLM(target)
        self.drafter, self.growth, self.method = drafter, growth, method
        self.verifier = verifier or TargetVerifier(self.target)
        if exact and not self.verifier.lossless:
            raise ValueError(f"exact=True refuses {type(self.verifier).__name__}, which is not lossless")
        self.tokenizer = tokenizer
        self.eos_token_ids = frozenset(self.target.eos_token_ids if eos_token_ids is None else eos_token_ids)
        self.plain_step_seconds: float | None = None
        self.split_time = self.target.device.type != "cuda"

    @torch.inference_mode()
    def rounds(self, rows: Rows, sampler: Sampler) -> Iterator[list[Round]]:
        """Decodes until every row has ended; yields one `Round` a row, the prefill first."""
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

    @overload
    def generate(self, prompt: str, **options: Any) -> Output: ...

    @overload
    def generate(self, prompt: Any, **options: Any) -> Any: ...

    def generate(self, prompt: Any, **options: Any) -> Output | list[Output]:
        """Text for one prompt, or for each of a list of prompts.

        Args:
            prompt: a string (continued as it is), a list of chat messages (the chat template is applied), or a list of
                ids; a list of any of these gives a list of outputs, decoded as one batch.
            options: those of `stream`, and `seed` may be a list with one seed a prompt.
        Raises:
            ValueError: what was given, what was expected, what to do.
        """
        prompts, single = encode(prompt, self.tokenizer)
        outputs = [
            Output(ids, self.method, self.verifier.lossless, plain_step_seconds=self.plain_step_seconds)
            for ids in prompts
        ]
        for _ in self._run(prompts, outputs, **options):
            pass
        return outputs[0] if single else outputs

    def stream(self, prompt: Any, **options: Any) -> Iterator[Piece]:
        """The text of one prompt, a piece a round.

        Args:
            prompt: as for `generate`, one prompt only.
            max_new_tokens: budget, at least 1 (128).
            temperature, top_k, top_p: 0.0 is greedy; same law as Hugging Face's sampling.
            seed: the same seed gives the same text with every lossless method (0).
            stop: strings that end the text; the token that completes one is the last.
            eos_token_ids: end-of-text ids of this call.
        """
        prompts, single = encode(prompt, self.tokenizer)
        if not single:
            raise ValueError(f"stream takes one prompt, but {len(prompts)} were given; use generate for a list")
        output = Output(prompts[0], self.method, self.verifier.lossless, plain_step_seconds=self.plain_step_seconds)
        text = TextStream(self.tokenizer)
        for (latest,) in self._run(prompts, [output], **options):
            yield Piece(text.push(latest.tokens, last=output.finish_reason is not None), latest.tokens, latest, output)

    def _run(
        self,
        prompts: list[list[int]],
        outputs: list[Output],
        max_new_tokens: int = 128,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int | Sequence[int] = 0,
        stop: str | Sequence[str] = (),
        eos_token_ids: Sequence[int] | None = None,
    ) -> Iterator[list[Round]]:
        """Consumes `rounds` and fills the outputs."""
        begin = time.perf_counter()
        sampler = Sampler(temperature, top_k, top_p)
        seeds = list(seed) if isinstance(seed, Sequence) else [seed] * len(prompts)
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        check_request(prompts, max_new_tokens, seeds, stops, self.target, self.tokenizer)
        eos = self.eos_token_ids if eos_token_ids is None else frozenset(eos_token_ids)
        decode = self.tokenizer.decode if self.tokenizer and stops else None
        rows = Rows(
            prompts, max_new_tokens, seeds, Stopping(eos, stops, decode), self.target.context, self.target.device
        )
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
