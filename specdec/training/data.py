"""The text a draft learns from: prompts in, the target's own answers out (EAGLE-3 trains on text of its target)."""

import json
import random
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specdec.training.features import Row


def read_rows(path: Path, tokenizer: Any) -> list[Row]:
    """Rows of a JSON-lines file with ``prompt`` (user turn), ``response_ids``, and optionally ``kind``, ``temperature``.

    The chat template is applied to the prompt with the model's default system message.
    """
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        item = json.loads(line)
        if missing := {"prompt", "response_ids"} - item.keys():
            raise ValueError(f"{path}:{number} lacks {', '.join(sorted(missing))}; it has {', '.join(item)}")
        prompt = prompt_ids(tokenizer, item["prompt"])
        ids = np.array(prompt + item["response_ids"], dtype=np.int32)
        rows.append(Row(ids, len(prompt), item.get("kind", ""), greedy=item.get("temperature") == 0))
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
    if sum(map(len, kinds.values())) < count:
        raise ValueError(f"{count} held-out rows asked for, but only {sum(map(len, kinds.values()))} are greedy answers")
    heldout: list[int] = []
    while len(heldout) < count:
        for kind in sorted(kinds):
            if kinds[kind] and len(heldout) < count:
                heldout.append(kinds[kind].pop())
    chosen = set(heldout)
    return [index for index in order if index not in chosen], heldout
