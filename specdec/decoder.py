"""The round: draft, verify, commit. Everything that makes text consumes `Decoder.rounds`."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specdec.draft import draft
from specdec.models.lm import CausalLM
from specdec.parts import as_target, check_generation_config, check_parts
from specdec.prompts import encode
from specdec.protocols import Drafter, Growth, Verdict, Verifier
from specdec.request import Request, as_ids
from specdec.rows import Rows
from specdec.sampling import Sampler
from specdec.stats import Output, Round, Stopwatch
from specdec.streaming import Piece, filled, pieces
from specdec.tree import DraftTree, Layer
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
                tree, forwards = draft(self.drafter, self.growth, rows, watch, Layer.narrow)
            else:
                tree = DraftTree(rows.roots, capacity=1)

    def _commit(self, rows: Rows, tree: DraftTree, verdict: Verdict) -> torch.Tensor:
        self.verifier.commit(rows, tree, verdict)
        if self.drafter:
            self.drafter.observe(rows, verdict.span, tree, verdict)
        return rows.extend(tree, verdict.path, verdict.length, verdict.bonus)

    def generate(self, prompt: Any, **options: Any) -> Any:
        """Text for one prompt, or for each of a list of prompts.

        Args:
            prompt: a string (continued as it is), a list of chat messages (the chat template is applied), or a list of
                ids; a list of any of these gives a list of outputs, decoded as one batch.
            options: max_new_tokens=128, temperature=0.0, top_k=0, top_p=1.0, seed=0, stop=None, eos_token_ids=None;
                see `Request`.
        Returns:
            An `Output`, or a list of them for a list of prompts.
        Raises:
            ValueError: what was given, what was expected, what to do.
        """
        request = Request.of("generate", options)
        prompts, single = encode(prompt, self.tokenizer)
        outputs = [self._output(ids) for ids in prompts]
        for _ in self._run(request, prompts, outputs):
            pass
        return outputs[0] if single else outputs

    def stream(self, prompt: Any, **options: Any) -> Iterator[Piece]:
        """The text of one prompt, a piece a round; everything is checked before the first one is asked for.

        Args: those of `generate`, one prompt only.
        """
        request = Request.of("stream", options)
        prompts, single = encode(prompt, self.tokenizer)
        if not single:
            raise ValueError(
                f"stream takes one prompt, but a list of prompts was given ({len(prompts)} in it); "
                "give the prompt itself, or use generate for a list"
            )
        output = self._output(prompts[0])
        return pieces(self._run(request, prompts, [output]), self.tokenizer, output)

    def _output(self, ids: list[int]) -> Output:
        return Output(ids, self.method, self.verifier.lossless, plain_step_seconds=self.plain_step_seconds)

    def _run(self, request: Request, prompts: list[list[int]], outputs: list[Output]) -> Iterator[list[Round]]:
        """Checks the request; the iterator that it returns decodes and fills the outputs."""
        rows = request.rows(prompts, self.target, self.tokenizer, self.eos_token_ids)
        return filled(self.rounds(rows, request.sampler), rows, outputs, self.tokenizer)


def _without_autocast(steps: Iterator[list[Round]], device: str) -> Iterator[list[Round]]:
    """Each step in the models' own precision; between two steps the consumer has what it had."""
    while True:
        with torch.autocast(device, enabled=False):
            latest = next(steps, None)
        if latest is None:
            return
        yield latest
