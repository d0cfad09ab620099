"""Ways to decode one prompt, with a clock: a decoder of this package, and `generate` of transformers."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field, is_dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from specdec.decoder import Decoder
from specdec.models.llama import LeanLlama
from specdec.models.lm import CausalLM
from specdec.models.packed import PackedLinear, PlainLinear
from specdec.request import Request

HF, LOOKUP, AR = "transformers", "transformers, lookup", "ar"
HF_MODULES, UNPACKED = "ar, transformers' modules", "ar, not packed"
LOOKUP_TOKENS = 10  # what the documentation of transformers suggests


@dataclass(frozen=True)
class Run:
    """One prompt, decoded once.

    Attributes:
        tokens: new ids.
        decoded: how many of them came after the prefill, in `decode_seconds` and `target_forwards`.
        split: seconds by phase (`stats.PHASES`), where the contender tells.
    """

    tokens: list[int]
    decoded: int
    prefill_seconds: float
    decode_seconds: float
    target_forwards: int
    draft_forwards: int = 0
    split: dict[str, float] = field(default_factory=dict)


class Contender(Protocol):
    """A way to decode.

    Attributes:
        kind: `method`, `baseline` or `factor`.
        seeded: at T > 0 its text is a function of the seed, the same as `ar`'s.
    """

    name: str
    kind: str
    seeded: bool

    @property
    def options(self) -> dict[str, Any]: ...

    def run(self, prompt: list[int], request: Request) -> Run: ...


@dataclass
class Ours:
    """A decoder of this package."""

    name: str
    decoder: Decoder
    kind: str = "method"
    seeded: bool = True

    @property
    def options(self) -> dict[str, Any]:
        growth = self.decoder.growth
        return asdict(growth) if is_dataclass(growth) and not isinstance(growth, type) else {}

    def run(self, prompt: list[int], request: Request) -> Run:
        output = self.decoder.generate(prompt, **asdict(request))
        told = output.summary()
        return Run(
            output.tokens,
            sum(len(one.tokens) for one in output.rounds[1:]),
            told["prefill_seconds"],
            told["decode_seconds"],
            told["target_forwards"],
            told["draft_forwards"],
            told["split"],
        )


@dataclass
class Transformers:
    """`model.generate` of transformers; `options` go to it, such as `prompt_lookup_num_tokens`."""

    name: str
    model: PreTrainedModel
    options: dict[str, Any] = field(default_factory=dict)
    kind: str = "baseline"
    seeded: bool = False

    def run(self, prompt: list[int], request: Request) -> Run:
        ids = torch.tensor([prompt], device=self.model.device)
        law: dict[str, Any] = {"do_sample": False}
        if request.temperature:
            names = ("temperature", "top_k", "top_p")
            law = {"do_sample": True, **{name: getattr(request, name) for name in names}}
        clock = _Clock()
        with torch.random.fork_rng():
            torch.manual_seed(request.seed)
            out = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=request.max_new_tokens,
                streamer=clock,
                **law,
                **self.options,
            )
        (start, _), (first, _), *rest = clock.ticks
        end = rest[-1][0] if rest else first
        return Run(out[0, len(prompt) :].tolist(), sum(n for _, n in rest), first - start, end - first, len(rest))


class _Clock:
    """A streamer that notes when ids come and how many: first the prompt, then what each forward gave."""

    def __init__(self) -> None:
        self.ticks: list[tuple[float, int]] = []

    def put(self, ids: Tensor) -> None:
        self.ticks.append((time.perf_counter(), ids.numel()))

    def end(self) -> None: ...


def plain_transformers(source: str | Path, like: CausalLM, dtype: torch.dtype | str) -> PreTrainedModel:
    """The model as transformers runs it, on the device of `like`, with none of its generation config but the stops."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype).to(like.device).eval()
    eos = sorted(like.eos_token_ids)
    model.generation_config = GenerationConfig(eos_token_id=eos or None, pad_token_id=eos[0] if eos else 0)
    return model


def unpack(target: CausalLM) -> CausalLM:
    """Undoes the packing of a lean target's linears, in place: what the leaner forward is worth alone."""
    lean = target.backbone
    assert isinstance(lean, LeanLlama)
    lean.lm_head = _plain(lean.lm_head)
    for layer in lean.layers:
        for name in ("qkv", "out", "gate_up", "down"):
            setattr(layer, name, _plain(getattr(layer, name)))
    return target


def _plain(linear: Any) -> Any:
    return PlainLinear(linear.packed.to_dense(), linear.bias) if isinstance(linear, PackedLinear) else linear
