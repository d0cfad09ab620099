"""The text a draft learns from: prompts in, the target's own answers out (EAGLE-3 trains on text of its target).

One JSON object a line: ``kind`` (free text, "" when unknown), ``temperature``, ``prompt`` (the user turn; the model's
chat template with its default system message is applied on both ends) and ``response_ids`` (token ids, the stop id
included where the answer ended by itself).
"""

import json
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from specdec.training.features import Row


@dataclass(frozen=True)
class DataOptions:
    """Options of ``generate_data``."""

    max_new_tokens: int = 160
    """Longest answer, in tokens."""
    batch_size: int = 48
    """Prompts a batch."""
    temperatures: tuple[float, ...] = (0.0, 0.7)
    """The batches take these in turn; 0 is greedy, and only greedy answers can be held out for evaluation."""
    limit: int | None = None
    """Use only the first so many prompts (all when absent)."""
    seed: int = 0
    """Seed of the sampled answers; a batch's answers do not depend on where a run was interrupted."""

    def __post_init__(self) -> None:
        wrong = []
        if self.max_new_tokens < 1:
            wrong.append(f"max_new_tokens is {self.max_new_tokens}, expected at least 1")
        if self.batch_size < 1:
            wrong.append(f"batch_size is {self.batch_size}, expected at least 1")
        if not self.temperatures or min(self.temperatures) < 0:
            wrong.append(f"temperatures are {self.temperatures}, expected one or more numbers from 0 up")
        if wrong:
            raise ValueError("; ".join(wrong))


def generate_data(target: Any, tokenizer: Any, prompts: Path, out: Path, options: DataOptions | None = None) -> Path:
    """Write the target's answers to a file of prompts; batches that `out` already holds are not done again.

    Args:
        target: a causal LM of transformers.
        tokenizer: its tokenizer, with a chat template.
        prompts: JSON lines, each with ``prompt`` or ``turns`` (the first is used) and optionally ``kind`` or ``task``.
        out: JSON lines, see the module; made when missing.

    Returns:
        `out`.

    Raises:
        ValueError: a line of `prompts` without a prompt, or an `out` that starts with answers to other prompts.
    """
    from tqdm.auto import tqdm

    options = options or DataOptions()
    items = read_prompts(prompts)[: options.limit]
    done = _finished_batches(out, items, options.batch_size)
    batches = [items[start : start + options.batch_size] for start in range(0, len(items), options.batch_size)]
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("a", encoding="utf-8") as file, tqdm(total=len(items), unit="prompt", desc="answers") as progress:
        for number, batch in enumerate(batches):
            if number >= done:
                temperature = options.temperatures[number % len(options.temperatures)]
                torch.manual_seed(options.seed + number)
                answers = _answer(
                    target, tokenizer, [item["prompt"] for item in batch], temperature, options.max_new_tokens
                )
                for item, response_ids in zip(batch, answers, strict=True):
                    line = {"kind": item["kind"], "temperature": temperature, "prompt": item["prompt"]}
                    file.write(json.dumps({**line, "response_ids": response_ids}, ensure_ascii=False) + "\n")
                file.flush()
            progress.update(len(batch))
    return out


@torch.no_grad()
def _answer(
    target: Any, tokenizer: Any, prompts: Sequence[str], temperature: float, max_new_tokens: int
) -> list[list[int]]:
    rows = [torch.tensor(prompt_ids(tokenizer, prompt)) for prompt in prompts]
    stops = stop_ids(target)
    filler = stops[0] if stops else 0
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=filler, padding_side="left")
    mask = torch.nn.utils.rnn.pad_sequence(
        [torch.ones_like(row) for row in rows], batch_first=True, padding_side="left"
    )
    law = (
        {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        if temperature
        else {"do_sample": False}
    )
    made = target.generate(
        input_ids=ids.to(target.device),
        attention_mask=mask.to(target.device),
        max_new_tokens=max_new_tokens,
        pad_token_id=filler,
        **law,
    )
    return [_until_stop(row, stops) for row in made[:, ids.shape[1] :].tolist()]


def _until_stop(ids: list[int], stops: Sequence[int]) -> list[int]:
    ends = [position for position, token in enumerate(ids) if token in stops]
    return ids[: ends[0] + 1] if ends else ids


def stop_ids(target: Any) -> list[int]:
    """The ids that end an answer, from the model's generation config."""
    ids = target.generation_config.eos_token_id
    return [] if ids is None else [ids] if isinstance(ids, int) else list(ids)


def _json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield number, json.loads(line)


def read_prompts(path: Path) -> list[dict[str, str]]:
    """``prompt`` and ``kind`` of every line of a prompt file."""
    items = []
    for number, item in _json_lines(path):
        prompt = item["prompt"] if "prompt" in item else (item.get("turns") or [None])[0]
        if not prompt:
            raise ValueError(f"{path}:{number} has neither prompt nor turns; it has {', '.join(item) or 'nothing'}")
        items.append({"prompt": prompt, "kind": item.get("kind", item.get("task", ""))})
    return items


def _finished_batches(out: Path, items: Sequence[dict[str, str]], batch_size: int) -> int:
    """How many whole batches `out` holds; what an interruption left of the next one is cut off."""
    if not out.exists():
        return 0
    lines = out.read_text(encoding="utf-8").splitlines(keepends=True)
    whole = [line for line in lines if line.endswith("\n")]
    for line, item in zip(whole, items, strict=False):
        if (found := json.loads(line)["prompt"]) != item["prompt"]:
            raise ValueError(
                f"{out} answers other prompts ({found!r} where {item['prompt']!r} is due); name another file"
            )
    if len(whole) > len(items):
        raise ValueError(
            f"{out} already holds {len(whole)} answers, more than the {len(items)} prompts; name another file"
        )
    kept = len(items) if len(whole) == len(items) else len(whole) // batch_size * batch_size
    out.write_text("".join(whole[:kept]), encoding="utf-8")
    return -(-kept // batch_size)


def read_rows(path: Path, tokenizer: Any) -> list[Row]:
    """The training rows of a file that ``generate_data`` wrote."""
    rows = []
    for number, item in _json_lines(path):
        if missing := {"prompt", "response_ids"} - item.keys():
            raise ValueError(
                f"{path}:{number} lacks {', '.join(sorted(missing))}; it has {', '.join(item) or 'nothing'}"
            )
        prompt = prompt_ids(tokenizer, item["prompt"])
        ids = np.array(prompt + item["response_ids"], dtype=np.int32)
        rows.append(Row(ids, len(prompt), item.get("kind", ""), greedy=item.get("temperature") == 0))
    if not rows:
        raise ValueError(f"{path} is empty; make training text with: specdec train data")
    return rows


def prompt_ids(tokenizer: Any, prompt: str) -> list[int]:
    """Token ids of one user turn in the chat template, up to where the answer starts."""
    message = [{"role": "user", "content": prompt}]
    return tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=True)["input_ids"]


def split_heldout(rows: Sequence[Row], count: int, seed: int) -> tuple[list[int], list[int]]:
    """(training indices in random order, held-out indices): `count` greedy rows, drawn from each kind in turn.

    Only greedy answers are held out: along them the target's argmax is the next id, so acceptance is exact.
    """
    order = list(range(len(rows)))
    random.Random(seed).shuffle(order)
    kinds: dict[str, list[int]] = defaultdict(list)
    for index in order:
        if rows[index].greedy and len(rows[index].ids) - rows[index].prompt_length >= 16:
            kinds[rows[index].kind].append(index)
    if (available := sum(map(len, kinds.values()))) < count:
        raise ValueError(f"{count} held-out rows asked for, but only {available} are greedy answers of 16 ids or more")
    heldout: list[int] = []
    while len(heldout) < count:
        for kind in sorted(kinds):
            if kinds[kind] and len(heldout) < count:
                heldout.append(kinds[kind].pop())
    chosen = set(heldout)
    return [index for index in order if index not in chosen], heldout
