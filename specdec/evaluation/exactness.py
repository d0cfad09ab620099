"""Is the text the same as plain decoding's? A grid of methods, tree sizes, model families and sampling settings.

    python -m specdec.evaluation.exactness --out bench/results/exactness.json            # hours
    python -m specdec.evaluation.exactness --out /tmp/exactness.json --quick             # minutes

At T = 0 the reference is `transformers.generate` in fp32. At T > 0 every method is compared with `ar` under the same
seed: the noise belongs to positions, so equal distributions give equal text.

On random models any difference counts. On a real model rounding can flip a tie, since a pass over many tokens adds in
another order than a pass over one: there a difference is excused where the two best (perturbed) logits are closer than
`TIE`. The comparison then goes on behind it, teacher-forced, and the report gives the number of ties and their gaps.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import date
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.utils.logging import disable_progress_bar

from specdec.decoder import Decoder
from specdec.drafters.eagle3 import Eagle3Drafter
from specdec.drafters.lm import LMDrafter
from specdec.evaluation.setting import machine, read_prompts
from specdec.growth.chain import Chain
from specdec.growth.eagle2 import Eagle2
from specdec.growth.talon import Talon
from specdec.models.eagle3 import Eagle3Config, Eagle3Head
from specdec.models.lm import CausalLM
from specdec.prompts import encode
from specdec.protocols import Drafter
from specdec.rows import Rows
from specdec.sampling import Noise, Sampler, Stream
from specdec.tree import DraftTree

TIE = 1e-4  # two logits closer than this may change places between two orders of addition
TALON_BUDGETS = (8, 16, 32, 60, 96)
TALON_MUS = (0.01, 0.03, 0.1, 1.0)
GROWTHS = {"sd": Chain, "eagle3": Eagle2, "talon": Talon}
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.9, "top_k": 20},
)
FAMILIES: dict[str, tuple[type, type, dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 24}),  # not hidden_size / heads
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": 8}),
}


# --- models without training -----------------------------------------------------------------------------------------


def random_target(family: str, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A tiny model of random weights: fp32, grouped-query attention, untied head, no end-of-text token.

    With transformers' default `initializer_range` such a model repeats itself, and a repeated text hides dropped and
    doubled tokens; 0.3 gives a varied one. Biases and norm weights are random too, so that no term is trivial.
    """
    config_class, model_class, extra = FAMILIES[family]
    sizes: dict[str, Any] = {
        "vocab_size": 97,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": 0.3,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        "eos_token_id": None,
        "bos_token_id": None,
        "pad_token_id": None,
    }
    config = config_class(**{**sizes, **extra, **overrides})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config).eval().requires_grad_(False)
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.normal_(std=0.3)
    return model


def random_draft(target: PreTrainedModel, seed: int = 0, spread: float = 0.06) -> PreTrainedModel:
    """A draft that is often right: the target with noise of `spread` standard deviations on every weight."""
    draft = type(target)(target.config).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for mine, theirs in zip(draft.parameters(), target.parameters(), strict=True):
        noise = torch.randn(theirs.shape, generator=generator)
        mine.copy_(theirs + spread * (theirs.std() if theirs.numel() > 1 else 0.0) * noise)
    return draft


def random_head(target: PreTrainedModel, seed: int = 0, draft_vocab: int = 83) -> Eagle3Head:
    """An EAGLE-3 head of random weights that reads three features and predicts `draft_vocab` random ids."""
    config = target.config
    head = Eagle3Head(
        Eagle3Config(
            hidden_size=config.hidden_size,
            target_hidden_size=config.hidden_size,
            num_heads=4,
            num_kv_heads=2,
            head_dim=16,
            intermediate_size=48,
            vocab_size=config.vocab_size,
            draft_vocab_size=draft_vocab,
            max_position_embeddings=config.max_position_embeddings,
        ),
        embed_tokens=target.get_input_embeddings(),
    ).requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for parameter in head.parameters():
        parameter.normal_(std=0.3, generator=generator)
    ids = torch.randperm(config.vocab_size, generator=generator)[:draft_vocab].sort().values
    head.d2t.copy_(ids - torch.arange(draft_vocab))
    head.t2d.zero_()[ids] = True
    return head


class HintedDrafter(Eagle3Drafter):
    """A head that is told what comes next at most positions, so that deep paths and their cache entries are exercised.

    An untrained head is right once in a vocabulary. The hint raises one logit; everything else (features, caches,
    positions, the forward itself) is what a trained head goes through.
    """

    def __init__(self, head: Eagle3Head, taps: tuple[int, ...], knows: Callable[[int], bool] | None = None):
        super().__init__(head, taps)
        self.texts: list[list[int]] = []  # a row each: prompt and what follows
        self._knows = knows or (lambda position: position * 2654435761 >> 9 & 3 != 0)  # 3 of 4, in no order

    def expand(self, rows: Rows, tree: DraftTree, nodes: Tensor) -> Tensor:
        logits = super().expand(rows, tree, nodes)
        draft_id = {int(t): d for d, t in enumerate(self.target_ids(torch.arange(self.vocab_size)))}
        for row, text in enumerate(self.texts[: len(rows)]):
            position = rows.host.length[row] + tree.depth  # the frontier of a depth proposes one position
            if position < len(text) and self._knows(position) and text[position] in draft_id:
                logits[row, :, draft_id[text[position]]] += 20.0
        return logits


# --- the grid --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """One point of the grid.

    Attributes:
        target: a family of `FAMILIES`, or the name of a preset.
        draft: `lm`, `head`, or `none`.
        options: the growth policy's.
        sampling: those of `Decoder.generate`.
        prompts: how many; max_new_tokens: of each.
        batches: sizes of the batches in which they are decoded, all of them once with each.
    """

    target: str
    method: str
    draft: str = "none"
    options: dict[str, Any] = field(default_factory=dict)
    sampling: dict[str, Any] = field(default_factory=lambda: {"temperature": 0.0})
    prompts: int = 3
    max_new_tokens: int = 48
    batches: tuple[int, ...] = (1, 3)

    def __str__(self) -> str:
        groups = [", ".join(f"{name}={value:g}" for name, value in d.items()) for d in (self.options, self.sampling)]
        return f"{self.target}, {self.method}({groups[0]}) with draft {self.draft}, {groups[1]}"


@dataclass
class Outcome:
    """What a cell showed.

    Attributes:
        tokens: compared ids; tau: tokens a verification, over all prompts.
        ties: differences at near-ties, `tie_gaps` their gaps; failures: one line for every other difference.
    """

    tokens: int = 0
    tau: float = 0.0
    tie_gaps: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        return not self.failures

    def record(self) -> dict[str, Any]:
        """For JSON."""
        return {"passed": self.passed, "ties": len(self.tie_gaps), **asdict(self)}


def methods(budgets: Sequence[int] = TALON_BUDGETS, mus: Sequence[float] = TALON_MUS) -> list[tuple[str, dict]]:
    """Every method with the tree sizes that the grid asks of it."""
    return [
        ("ar", {}),
        ("sd", {"length": 4}),
        ("eagle3", {"budget": 60, "top_k": 10, "depth": 8}),
        ("eagle3", {"budget": 16, "top_k": 4, "depth": 3}),
        *(("talon", {"budget": budget, "mu": mu}) for budget in budgets for mu in mus),
    ]


ABLATIONS: list[tuple[str, dict]] = [
    *(("talon", {"budget": 32, "init_layers": layers}) for layers in (0, 2, 3)),
    ("talon", {"budget": 32, "max_depth": 2}),
]


def random_grid(quick: bool = False) -> list[Cell]:
    """Cells on random models: every method with both kinds of draft, on every family, with every sampling."""
    chosen = methods((8, 60), (0.03,)) if quick else methods() + ABLATIONS
    return [
        Cell(family, method, draft, options, sampling, max_new_tokens=16 if quick else 48)
        for family in FAMILIES
        for sampling in SAMPLINGS
        for method, options in chosen
        for draft in (("lm", "head") if method != "ar" else ("none",))
    ]


def preset_grid(preset: str, prompts: int, quick: bool = False) -> list[Cell]:
    """Cells on a real model with its own head, 128 tokens a prompt.

    Five prompts at a time, which is what two cores do best; the random models show that a row alone is the same. At
    T > 0 half of the prompts and two budgets: there too every budget meets every mu on the random models.
    """
    everything = methods((16,), (0.03,)) if quick else methods()
    sampled = everything if quick else methods((16, 60), (0.03,))
    return [
        Cell(preset, method, "none" if method == "ar" else "head", options, sampling, count, 128, (5,))
        for sampling in SAMPLINGS
        for count, chosen in [(prompts, everything) if sampling["temperature"] == 0 else (-(-prompts // 2), sampled)]
        for method, options in chosen
    ]


class Bench:
    """A target, what plain decoding makes of its prompts, and the means to run a cell against that.

    Args:
        model: what `transformers` decodes with.
        prompts: ids.
        decoder: makes the decoder of a method, a kind of draft and options.
        excuse_ties: see the module's docstring.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        prompts: list[list[int]],
        decoder: Callable[[str, str, dict[str, Any]], Decoder],
        excuse_ties: bool = False,
    ):
        self.model, self.prompts, self.decoder, self.excuse_ties = model, prompts, decoder, excuse_ties
        self._references: dict[tuple, list[int]] = {}

    def reference(self, prompt: list[int], new: int, sampling: dict[str, Any]) -> list[int]:
        """The text that every lossless method must give: `transformers` at T = 0, `ar` at T > 0."""
        key = (*prompt, -1, new, *sampling.items())
        if key not in self._references:
            if sampling["temperature"] == 0:
                self._references[key] = greedy_reference(self.model, prompt, new)
            else:
                plain = self.decoder("ar", "none", {})
                self._references[key] = plain.generate(prompt, max_new_tokens=new, **sampling).tokens
        return self._references[key]

    def run(self, cell: Cell) -> Outcome:
        """Decodes the cell's prompts in batches of each size and compares."""
        begin, outcome = time.perf_counter(), Outcome()
        decoder = self.decoder(cell.method, cell.draft, cell.options)
        prompts = self.prompts[: cell.prompts]
        batches = [prompts[at : at + size] for size in cell.batches for at in range(0, len(prompts), size)]
        emitted = verifications = 0
        for batch in batches:
            expected = [self.reference(prompt, cell.max_new_tokens, cell.sampling) for prompt in batch]
            if isinstance(decoder.drafter, HintedDrafter):
                decoder.drafter.texts = [p + e for p, e in zip(batch, expected, strict=True)]
            outputs = decoder.generate(batch, max_new_tokens=cell.max_new_tokens, **cell.sampling)
            for row, output in enumerate(outputs):
                where = f"prompt {self.prompts.index(batch[row])}{' in a batch' if len(batch) > 1 else ''}"
                self._compare(decoder, cell, batch[row], output.tokens, expected[row], where, outcome)
                emitted += sum(len(r.tokens) for r in output.rounds[1:])
                verifications += sum(r.verify_forwards for r in output.rounds[1:])
        outcome.tau = round(emitted / max(verifications, 1), 3)
        outcome.seconds = round(time.perf_counter() - begin, 2)
        return outcome

    def _compare(
        self,
        decoder: Decoder,
        cell: Cell,
        prompt: list[int],
        got: list[int],
        expected: list[int],
        where: str,
        outcome: Outcome,
    ) -> None:
        """Notes the first difference; behind a tie, decodes and compares again from the reference's text."""
        outcome.tokens += len(expected)
        done = 0
        while got != expected[done:]:
            rest = expected[done:]
            at = next((i for i, pair in enumerate(zip(got, rest, strict=False)) if pair[0] != pair[1]), -1)
            if at < 0:
                outcome.failures.append(f"{where}: {done + len(got)} tokens, expected {len(expected)}")
                return
            gap = self._gap(prompt + expected[: done + at], got[at], rest[at], cell.sampling)
            if not (self.excuse_ties and gap < TIE):
                outcome.failures.append(
                    f"{where}, token {done + at}: {got[at]}, expected {rest[at]}, {gap:.2e} apart (perturbed) logits"
                )
                return
            outcome.tie_gaps.append(gap)
            done += at + 1
            if done == len(expected):
                return
            prefix = prompt + expected[:done]
            got = decoder.generate(prefix, max_new_tokens=len(expected) - done, **cell.sampling).tokens

    def _gap(self, prefix: list[int], got: int, expected: int, sampling: dict[str, Any]) -> float:
        """How far the emitted token is from the expected one, in `transformers`' logits with our noise."""
        with torch.inference_mode():
            logits = self.model(torch.tensor([prefix]), use_cache=False).logits[:, -1:]
        sampler = Sampler(**sampling)
        scores = sampler.process(logits)[0, 0]
        if not sampler.greedy:
            noise = Noise(torch.tensor([0])).gumbel(Stream.TARGET, torch.tensor([[len(prefix)]]), scores.shape[-1])
            scores = scores + noise[0, 0]
        return float(scores[expected] - scores[got])


def greedy_reference(model: PreTrainedModel, prompt: list[int], new: int) -> list[int]:
    """What `transformers.generate` makes of a prompt at T = 0: new ids."""
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False)
    return out[0, len(prompt) :].tolist()


def random_bench(family: str, seed: int = 0) -> Bench:
    """A random model, a draft that is often right and a head with hints, for three prompts of unequal length."""
    model = random_target(family, seed)
    draft, head = random_draft(model, seed + 1), random_head(model, seed + 2)
    layers = model.config.num_hidden_layers
    generator = torch.Generator().manual_seed(seed + 3)
    prompts = [torch.randint(model.config.vocab_size, (n,), generator=generator).tolist() for n in (9, 1, 21)]

    def decoder(method: str, kind: str, options: dict[str, Any]) -> Decoder:
        drafters: dict[str, Callable[[], Drafter | None]] = {
            "none": lambda: None,
            "lm": lambda: LMDrafter(CausalLM(draft, "draft")),
            "head": lambda: HintedDrafter(head, (0, layers // 2, layers)),
        }
        growth = GROWTHS[method](**options) if method in GROWTHS else None
        return Decoder(model, drafters[kind](), growth, method=method)

    return Bench(model, prompts, decoder)


def preset_bench(preset: str, prompts: Sequence[str]) -> Bench:
    """A preset with its own head, and the same weights in fp32 as plain `transformers`."""
    import specdec
    from specdec.loading import PRESETS

    model = AutoModelForCausalLM.from_pretrained(PRESETS[preset].target(), dtype=torch.float32).eval()
    loaded = specdec.load(preset, method="talon", exact=True, device="cpu", dtype="float32")
    tokenizer = loaded.tokenizer
    assert tokenizer is not None

    def decoder(method: str, kind: str, options: dict[str, Any]) -> Decoder:
        growth = GROWTHS[method](**options) if method in GROWTHS else None
        return Decoder(loaded.target, loaded.drafter if growth else None, growth, eos_token_ids=eos, method=method)

    eos = sorted(loaded.eos_token_ids)
    ids = [encode([{"role": "user", "content": prompt}], tokenizer)[0][0] for prompt in prompts]
    return Bench(model, ids, decoder, excuse_ties=True)


# --- the command -----------------------------------------------------------------------------------------------------


def main(
    out: Annotated[Path, typer.Option(help="Where the report goes (JSON); rewritten after every cell.")],
    quick: Annotated[bool, typer.Option(help="A few tree sizes and prompts: minutes instead of hours.")] = False,
    prompts: Annotated[Path | None, typer.Option(help="JSON lines; default: 20 prompts of our own.")] = None,
    preset: Annotated[str, typer.Option(help="The real model; '' leaves it out.")] = "smollm2",
    resume: Annotated[bool, typer.Option(help="Keep what the report holds and passed; run the rest.")] = False,
) -> None:
    """Compares every method with plain decoding; exit code 1 where any text differs."""
    console = Console(stderr=True)
    disable_progress_bar()  # transformers' own, for every file that it reads
    report: dict[str, Any] = {"machine": machine(), "tie": TIE, "preset": preset or None}
    benches: dict[str, Bench] = {family: random_bench(family) for family in FAMILIES}
    cells = random_grid(quick)
    if preset:
        given = read_prompts(prompts, 2 if quick else None)
        try:
            benches[preset] = preset_bench(preset, given)
            cells = cells + preset_grid(preset, len(given), quick)
        except (FileNotFoundError, ValueError) as error:
            report["preset_missing"] = str(error)
            console.print(f"[yellow]{preset} is left out:[/yellow] {error}")
    records = kept_records(out, cells) if resume else []
    todo = [cell for cell in cells if identity(cell) not in map(identity, records)]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        task = progress.add_task("", total=len(cells), completed=len(records))
        for cell in todo:
            progress.update(task, description=str(cell))
            outcome = benches[cell.target].run(cell)
            records.append({**asdict(cell), **outcome.record(), "date": date.today().isoformat()})
            for line in outcome.failures:
                console.print(f"[red]{cell}[/red]: {line}")
            write_report(out, report, records, len(cells))
            progress.advance(task)
    counts = write_report(out, report, records, len(cells))
    console.print(
        f"{counts['passed']} of {counts['cells']} cells equal, {counts['tokens']} tokens, {counts['ties']} ties: {out}"
    )
    raise typer.Exit(counts["passed"] != len(cells))


def identity(cell: Cell | dict[str, Any]) -> str:
    """What tells a cell, or its record in a report, from the others."""
    record = asdict(cell) if isinstance(cell, Cell) else cell
    return json.dumps({attribute.name: record.get(attribute.name) for attribute in fields(Cell)}, sort_keys=True)


def kept_records(path: Path, cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """The records of these cells that an earlier report holds, failures left out: they are run again."""
    if not path.exists():
        return []
    wanted = set(map(identity, cells))
    return [r for r in json.loads(path.read_text())["cells"] if r["passed"] and identity(r) in wanted]


def write_report(path: Path, report: dict[str, Any], records: list[dict[str, Any]], total: int) -> dict[str, Any]:
    """Writes what there is so far; returns the counts."""
    gaps = [gap for record in records for gap in record["tie_gaps"]]
    counts = {
        "cells": len(records),
        "planned": total,
        "passed": sum(record["passed"] for record in records),
        "tokens": sum(record["tokens"] for record in records),
        "ties": len(gaps),
        "largest_tie": max(gaps, default=None),
        "seconds": round(sum(record["seconds"] for record in records), 1),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**report, "counts": counts, "cells": records}, indent=1) + "\n")
    return counts


if __name__ == "__main__":
    typer.run(main)
