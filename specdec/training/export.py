"""From a training run to a head that can be shipped: bf16 weights, configuration, and a card with the run's figures.

Every figure in the card and in a page's marked blocks comes from the files that the run wrote (curve.jsonl,
options.json, run.json), so that text and head cannot drift apart.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

CARD = """\
---
license: {license}
base_model: {base_model}
library_name: specdec
---

# EAGLE-3 draft head for {name}

One decoder layer that reads hidden states of the target (those entering layers {taps}) and drafts its next tokens, in
SafeAILab's EAGLE-3 format: bf16, {draft_vocab_size} draft ids (`d2t`, `t2d`). There is no `lm_head.weight`
(`tie_word_embeddings: true`): the output rows are the target's own, at the draft's ids. Drafts are only proposals, so
the target's text stays the target's; a better head makes it come faster.

## How it was made

{story}

## What it reaches

On {heldout} held-out greedy answers of the target ({rounds} rounds), after {answer_tokens:,} answer tokens:

{figures}

Conditional acceptance of step j: how often the j-th draft of a chain is the target's argmax where all before it were.
"""


def export_eagle3(checkpoint: Path, folder: Path, *, target: Any, run: Path, name: str, license: str) -> Path:
    """Write a run's head as a folder to ship: config.json, model.safetensors (bf16, lm_head left out), README.md.

    Args:
        checkpoint: a checkpoint folder of `run`.
        folder: made when missing.
        target: the model that the head was trained for; its output embedding must hold the head's output rows.
        run: the folder given to ``train_eagle3`` as `out`.
        name: the target's name in the card; license: of the head.

    Raises:
        ValueError: the checkpoint's lm_head is not the target's output embedding, so it cannot be left out.
    """
    from specdec.checkpoints.eagle3 import load_eagle3, save_eagle3

    output = target.get_output_embeddings().weight
    head = load_eagle3(
        checkpoint,
        embed_tokens=target.get_input_embeddings(),
        target_hidden_size=target.config.hidden_size,
        vocab_size=target.config.vocab_size,
    )
    ids = head.target_ids(torch.arange(len(head.d2t)))
    if not torch.equal(head.lm_head.weight, output[ids].float()):
        raise ValueError(
            f"lm_head of {checkpoint} is not the output embedding of {name}; use save_eagle3 with tied=False"
        )
    facts = run_facts(run, _step_of(checkpoint)) | {"base_model": name, "license": license}
    save_eagle3(head, folder, tied=True, extra=facts)
    (folder / "README.md").write_text(card(facts, name), encoding="utf-8")
    return folder


def run_facts(run: Path, step: int | None = None) -> dict[str, Any]:
    """What a run's files say about the state at `step` (the last when absent): text, options, figures of acceptance."""
    curve = read_curve(run)
    known = [line for line in curve if step is None or line["step"] <= step]
    facts = json.loads((run / "run.json").read_text(encoding="utf-8"))
    return {**facts, "options": json.loads((run / "options.json").read_text(encoding="utf-8")), "reached": known[-1]}


def read_curve(run: Path) -> list[dict[str, Any]]:
    """The lines of curve.jsonl in order of steps; where a resumed run measured a step again, the later line counts."""
    lines = [json.loads(line) for line in (run / "curve.jsonl").read_text(encoding="utf-8").splitlines()]
    return [line for _, line in sorted({line["step"]: line for line in lines}.items())]


def _step_of(checkpoint: Path) -> int | None:
    match = re.fullmatch(r"checkpoint-(\d+)", checkpoint.name)
    return int(match.group(1)) if match else None


def card(facts: Mapping[str, Any], name: str) -> str:
    """The card of a head, in Markdown."""
    reached = facts["reached"]
    return CARD.format(
        license=facts["license"],
        base_model=facts["base_model"],
        name=name,
        taps=", ".join(map(str, facts["taps"])),
        draft_vocab_size=facts["options"]["draft_vocab_size"],
        story=story(facts),
        heldout=facts["options"]["heldout"],
        rounds=reached["rounds"],
        answer_tokens=reached["answer_tokens"],
        figures=figures_table([reached]),
    )


def story(facts: Mapping[str, Any]) -> str:
    """Text, options and effort of a run in one paragraph."""
    options, reached = facts["options"], facts["reached"]
    effort = reached["core_seconds"] + facts.get("recording_core_seconds", 0.0)
    return (
        f"The text is the target's own answers to {facts['rows']:,} prompts ({facts['answer_tokens']:,} answer "
        f"tokens); the features of {reached['rows_recorded']:,} of them were recorded. Training-time test of "
        f"{options['ttt_steps']} unrolled steps (step j weighs 0.8^j; {options['chain_fraction']:.0%} of the positions "
        f"go beyond the first), soft labels over the draft vocabulary, which covers {facts['coverage']:.1%} of the "
        f"answer tokens; AdamW, {reached['step']:,} steps of {options['batch_size']} rows, learning rate "
        f"{options['learning_rate']:g}, decaying over the last {options['decay_steps']} steps; seed {options['seed']}. "
        f"It took {reached['minutes']:.0f} minutes and {effort:,.0f} core-seconds of a {facts['machine']}, recording "
        f"included, with {facts['software']}."
    )


def figures_table(lines: Sequence[Mapping[str, Any]]) -> str:
    """Acceptance over training as a Markdown table, one row a line of the curve."""
    steps = len(lines[-1]["by_step"])
    head = [
        "step",
        "answer tokens",
        "core-seconds",
        "loss",
        *(f"acc. {step + 1}" for step in range(steps)),
        "tau, chain of 4",
    ]
    rows = [
        [
            f"{line['step']:,}",
            f"{line['answer_tokens']:,}",
            f"{line['core_seconds']:,.0f}",
            "-" if line["loss"] is None else f"{line['loss']:.2f}",
            *(f"{rate:.3f}" for rate in line["by_step"]),
            f"{line['tau']:.3f}",
        ]
        for line in lines
    ]
    table = [head, ["---:"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in table)


def fill_page(page: Path, blocks: Mapping[str, str]) -> None:
    """Replace what stands between ``<!-- name -->`` and ``<!-- /name -->`` in a Markdown page, for every name given.

    Raises ValueError where a block's markers are not on the page.
    """
    text = page.read_text(encoding="utf-8")
    for name, content in blocks.items():
        begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
        if begin not in text or end not in text:
            raise ValueError(f"{page} has no block {begin} ... {end}")
        before, rest = text.split(begin, 1)
        text = f"{before}{begin}\n{content}\n{end}{rest.split(end, 1)[1]}"
    page.write_text(text, encoding="utf-8")


def comparison_table(report: Mapping[str, Any]) -> str:
    """The report of ``specdec compare --json`` as a Markdown table under a line that says where it was measured."""
    head = ["method", "tau", "delta", "tokens/s", "against `ar`", "against transformers", "identical"]
    rows = [
        [
            f"`{line['method']}`",
            *(_number(line[key], digits) for key, digits in (("tau", 2), ("delta", 2), ("tokens_per_second", 1))),
            *(_number(line[key], 2, "x") for key in ("speedup_vs_ar", "speedup_vs_hf")),
            {True: "yes", False: "no"}.get(line["identical"], "-"),
        ]
        for line in report["results"]
    ]
    table = [head, ["---", *["---:"] * 5, "---"], *rows]
    place = f"{report['target']}, {report['prompts']} prompts; {_machine(report['machine'])}:"
    return place + "\n\n" + "\n".join(f"| {' | '.join(cells)} |" for cells in table)


def _machine(machine: Any) -> str:
    return ", ".join(f"{key} {value}" for key, value in machine.items()) if isinstance(machine, dict) else str(machine)


def _number(value: float | None, digits: int, unit: str = "") -> str:
    return "-" if value is None else f"{value:.{digits}f}{unit}"


def render_page(page: Path, run: Path, comparisons: Sequence[Path] = ()) -> None:
    """Fill the blocks ``story``, ``curve`` and ``compare`` of docs/demo_models.md.

    Args:
        page: the Markdown file, changed in place.
        run: the folder of the training run.
        comparisons: files with the output of ``specdec compare --json``.
    """
    facts = run_facts(run)
    blocks = {"story": story(facts), "curve": figures_table(read_curve(run))}
    if comparisons:
        reports = [json.loads(path.read_text(encoding="utf-8")) for path in comparisons]
        blocks["compare"] = "\n\n".join(comparison_table(report) for report in reports)
    fill_page(page, blocks)
