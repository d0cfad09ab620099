"""Several ways to decode the same prompts, side by side: what each costs, and whether its text is plain decoding's.

Everything runs on one machine in one process. Per prompt the contenders take turns in a rotating order, so that drift
of the machine hits all alike. A speed is tokens over seconds, summed over all prompts, prefill left out on every side.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specdec.decoder import Decoder
from specdec.evaluation.contenders import (
    AR,
    HF,
    HF_MODULES,
    LOOKUP,
    LOOKUP_TOKENS,
    UNPACKED,
    Contender,
    Ours,
    Run,
    Transformers,
    plain_transformers,
    unpack,
)
from specdec.evaluation.exactness import TIE
from specdec.loading import PRESETS, assemble, draft_source, load_draft, load_target
from specdec.methods import method
from specdec.models.llama import LeanLlama
from specdec.models.lm import CausalLM
from specdec.prompts import encode
from specdec.protocols import Drafter
from specdec.request import Request
from specdec.sampling import Noise, Stream
from specdec.stats import PHASES

_WARM_UP_TOKENS = 4


@dataclass(frozen=True)
class Difference:
    """A new token (number `position`) that plain decoding would not have emitted.

    `gap`: how far the two (perturbed) logits are apart; None where the text ends too early or too late, or where the
    token was excluded by top-k or top-p.
    """

    prompt: int
    position: int
    gap: float | None

    @property
    def tie(self) -> bool:
        """Rounding may turn two such logits round."""
        return self.gap is not None and self.gap < TIE


@dataclass(frozen=True)
class Result:
    """One contender over all prompts.

    Attributes:
        tau, delta: tokens and draft forwards per target forward.
        identical: every text is plain decoding's, ties aside: `transformers.generate` at T = 0, `ar` with the same seed
            at T > 0. None where that cannot be asked, as transformers draws from another random stream.
        ties: how many near-ties turned round; differences: all places where the text leaves the reference.
        r_model: the speed-up over `ar` that the split predicts, tau * T(1) / (T_verify + delta * T_draft).
    """

    method: str
    kind: str
    options: dict[str, Any]
    tau: float | None
    delta: float | None
    tokens_per_second: float | None
    speedup_vs_ar: float | None
    speedup_vs_hf: float | None
    identical: bool | None
    ties: int
    differences: list[Difference]
    r_model: float | None
    tokens: int
    target_forwards: int
    draft_forwards: int
    prefill_seconds: float
    decode_seconds: float
    split: dict[str, float]


def compare(
    contenders: Sequence[Contender],
    prompts: Sequence[list[int]],
    request: Request,
    judge: Judge,
    step: Callable[[str], None] = lambda name: None,
) -> list[Result]:
    """Runs every contender on every prompt, after a short warm-up.

    Args:
        contenders: `transformers` (T = 0) or `ar` (T > 0) must be among them, as the reference.
        step: called with the contender's name before each run, `total_runs` times in all.
    """
    runs: dict[str, list[Run]] = {contender.name: [] for contender in contenders}
    for contender in contenders:
        step(contender.name)
        contender.run(prompts[0], replace(request, max_new_tokens=min(_WARM_UP_TOKENS, request.max_new_tokens)))
    for index, prompt in enumerate(prompts):
        turn = index % len(contenders)
        for contender in (*contenders[turn:], *contenders[:turn]):
            step(contender.name)
            runs[contender.name].append(contender.run(prompt, judge.within_context(prompt, request)))
    reference = runs[HF if request.sampler.greedy else AR]
    speeds = {name: _speed(each) for name, each in runs.items()}
    results = []
    for contender in contenders:
        told = None
        if contender.seeded or request.sampler.greedy:
            told = [
                difference
                for index, (run, plain) in enumerate(zip(runs[contender.name], reference, strict=True))
                for difference in judge.differences(index, prompts[index], run.tokens, plain.tokens, request)
            ]
        results.append(_result(contender, runs, told, speeds))
    return results


def total_runs(contenders: Sequence[Contender], prompts: Sequence[list[int]]) -> int:
    """How many runs `compare` makes, the warm-up among them."""
    return len(contenders) * (len(prompts) + 1)


def _result(
    contender: Contender,
    runs: dict[str, list[Run]],
    differences: list[Difference] | None,
    speeds: dict[str, float | None],
) -> Result:
    mine = runs[contender.name]
    decoded, forwards, drafts = (
        sum(getattr(run, name) for run in mine) for name in ("decoded", "target_forwards", "draft_forwards")
    )
    split = {phase: sum(run.split.get(phase, 0.0) for run in mine) for phase in PHASES} if mine[0].split else {}
    spent = split.get("draft", 0.0) + split.get("verify", 0.0)
    plain = runs.get(AR, [])
    plain_forward = _ratio(sum(run.split["verify"] for run in plain), sum(run.target_forwards for run in plain))
    speed = speeds[contender.name]
    return Result(
        method=contender.name,
        kind=contender.kind,
        options=contender.options,
        tau=_ratio(decoded, forwards),
        delta=_ratio(drafts, forwards),
        tokens_per_second=speed,
        speedup_vs_ar=_ratio(speed, speeds.get(AR)),
        speedup_vs_hf=_ratio(speed, speeds.get(HF)),
        identical=None if differences is None else all(one.tie for one in differences),
        ties=sum(one.tie for one in differences or ()),
        differences=differences or [],
        r_model=_ratio(decoded * plain_forward, spent) if plain_forward else None,
        tokens=sum(len(run.tokens) for run in mine),
        target_forwards=forwards,
        draft_forwards=drafts,
        prefill_seconds=sum(run.prefill_seconds for run in mine),
        decode_seconds=sum(run.decode_seconds for run in mine),
        split=split,
    )


def _speed(runs: Sequence[Run]) -> float | None:
    return _ratio(sum(run.decoded for run in runs), sum(run.decode_seconds for run in runs))


def _ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a is not None and b else None


@dataclass(frozen=True)
class Judge:
    """Plain transformers, asked whether a text is what it would have said.

    Attributes:
        model: in the dtype that the contenders decode in.
        eos: ids that end a text; context: positions that the model has.
    """

    model: PreTrainedModel
    eos: frozenset[int]
    context: int

    def within_context(self, prompt: list[int], request: Request) -> Request:
        """The request, cut to what the context has room for: transformers would decode beyond it."""
        room = max(self.context + 1 - len(prompt), 1)
        return replace(request, max_new_tokens=min(request.max_new_tokens, room))

    def differences(
        self, index: int, prompt: list[int], tokens: list[int], reference: list[int], request: Request
    ) -> list[Difference]:
        """Where `tokens` leaves what plain decoding emits; `index` numbers the prompt.

        Behind the first difference the reference says nothing more, so each later token is compared with the best one
        behind the text that led to it: one teacher-forced pass.
        """
        if tokens == reference:
            return []
        found = []
        left = next((i for i, pair in enumerate(zip(tokens, reference, strict=False)) if pair[0] != pair[1]), None)
        if left is not None:
            scores = self._scores(prompt, tokens, request)
            emitted = scores.gather(1, torch.tensor(tokens, device=scores.device)[:, None])[:, 0]
            gaps = (scores.max(-1).values - emitted).tolist()
            gaps[left] = abs(float(scores[left, reference[left]] - emitted[left]))
            for position, gap in enumerate(gaps):
                if position == left or (position > left and gap != 0):
                    found.append(Difference(index, position, gap if math.isfinite(gap) else None))
        limit = self.within_context(prompt, request).max_new_tokens
        stops = [position for position, token in enumerate(tokens, 1) if token in self.eos]
        if len(tokens) != (stops[0] if stops else limit) or (left is None):
            found.append(Difference(index, len(tokens), None))
        return found

    @torch.inference_mode()
    def _scores(self, prompt: list[int], tokens: list[int], request: Request) -> Tensor:
        """[n, V]: what each of the tokens was the maximum of, if plain decoding emitted it."""
        ids = torch.tensor([prompt + tokens[:-1]], device=self.model.device)
        logits = self.model(ids, use_cache=False).logits[:, len(prompt) - 1 :]
        scores = request.sampler.process(logits)
        if not request.sampler.greedy:
            positions = torch.arange(len(prompt), len(prompt) + len(tokens), device=ids.device)[None]
            noise = Noise(torch.tensor([request.seed], device=ids.device))
            scores = scores + noise.gumbel(Stream.TARGET, positions, scores.shape[-1])
        return scores[0]


# --- who takes part --------------------------------------------------------------------------------------------------


@dataclass
class Lineup:
    """What `line_up` loaded."""

    contenders: list[Contender]
    judge: Judge
    target: CausalLM
    tokenizer: PreTrainedTokenizerBase | None

    def encode(self, prompts: Sequence[str], raw: bool = False) -> list[list[int]]:
        """Ids of user turns, in the chat template unless `raw` or the tokenizer has none.

        Raises:
            ValueError: a prompt that the target cannot take.
        """
        chat = self.tokenizer is not None and self.tokenizer.chat_template is not None and not raw
        turns = [[{"role": "user", "content": text}] if chat else text for text in prompts]
        ids, _ = encode(turns, self.tokenizer)
        Request(max_new_tokens=1).rows(ids, self.target, self.tokenizer, frozenset())  # refuses what cannot be decoded
        return ids


def line_up(
    target: str | Path,
    methods: dict[str, dict[str, Any]],
    draft: str | Path | None = None,
    device: str | None = None,
    dtype: str | None = None,
    factors: bool = False,
) -> Lineup:
    """Loads a target once for all methods, and once more as plain transformers.

    Args:
        methods: name -> options; `ar`, plain transformers and its prompt lookup take part in any case.
        factors: also `ar` without the lean forward, and with it but on plain linears.
    Raises:
        ValueError: as `specdec.load`, before anything is loaded where possible.
    """
    for name, options in methods.items():
        method(name).check(options)
    sources = {name: draft_source(target, draft, method(name)) for name in methods}
    source = PRESETS[target].target() if target in PRESETS else target
    lm, tokenizer = load_target(source, device, dtype)
    drafters: dict[Any, Drafter | None] = {None: None}  # methods with the same draft share one
    for name, own in sources.items():
        if own not in drafters:
            drafters[own] = load_draft(own, lm, method(name), tokenizer)
    model = plain_transformers(source, lm, lm.dtype)
    contenders: list[Contender] = [
        Transformers(HF, model),
        Transformers(LOOKUP, model, {"prompt_lookup_num_tokens": LOOKUP_TOKENS}),
    ]
    stored = _stored_dtype(source)
    if stored is not None and stored != lm.dtype:
        name = f"{HF}, {str(stored).removeprefix('torch.')}"
        contenders.append(Transformers(name, plain_transformers(source, lm, stored)))
    if factors and isinstance(lm.backbone, LeanLlama):
        eos = sorted(lm.eos_token_ids)
        unpacked = unpack(load_target(source, device, dtype)[0])
        contenders.append(Ours(HF_MODULES, Decoder(model, tokenizer=tokenizer, eos_token_ids=eos), "factor"))
        contenders.append(Ours(UNPACKED, Decoder(unpacked, tokenizer=tokenizer), "factor"))
    for name in dict.fromkeys((AR, *methods)):
        decoder = assemble(method(name), methods.get(name, {}), lm, drafters[sources.get(name)], tokenizer)
        contenders.append(Ours(name, decoder, "method" if name in methods else "baseline"))
    return Lineup(contenders, Judge(model, lm.eos_token_ids, lm.context), lm, tokenizer)


def _stored_dtype(source: str | Path) -> torch.dtype | None:
    """The dtype that the checkpoint names, which is what transformers loads it in."""
    config = transformers.AutoConfig.from_pretrained(source)
    dtype = getattr(config, "dtype", None)
    return getattr(torch, dtype) if isinstance(dtype, str) else dtype


def factors(results: Sequence[Result]) -> dict[str, dict[str, float | None]]:
    """What each speed-up over transformers is made of: method -> factor -> ratio of two speeds in these results.

    loop: our decoding loop on transformers' own modules; lean_forward: our forward instead of them; packing: prepacked
    linears; speculation: the method over `ar`. Their product is the whole.
    """
    speed = {result.method: result.tokens_per_second for result in results}
    if HF_MODULES not in speed:
        return {}
    shared = {
        "loop": _ratio(speed[HF_MODULES], speed[HF]),
        "lean_forward": _ratio(speed[UNPACKED], speed[HF_MODULES]),
        "packing": _ratio(speed[AR], speed[UNPACKED]),
    }
    return {
        result.method: {**shared, "speculation": result.speedup_vs_ar, "whole": result.speedup_vs_hf}
        for result in results
        if result.kind == "method"
    }


# --- prompts and machine ---------------------------------------------------------------------------------------------
