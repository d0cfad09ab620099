"""How many tokens a method gets out of a verification, over a file of prompts.

    python -m specdec.evaluation.acceptance --prompts prompts.jsonl --methods eagle3,talon --out acceptance.json

Acceptance does not depend on the clock, so prompts are decoded in batches and no time is reported; `specdec compare`
measures speed. Method options are written `talon.budget=8`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.progress import track

import specdec
from specdec.decoder import Decoder
from specdec.evaluation.setting import machine, read_prompts
from specdec.stats import Output, Round


def acceptance(
    decoder: Decoder, prompts: Sequence[Any], max_new_tokens: int = 128, batch_size: int = 8
) -> dict[str, Any]:
    """Greedy decoding of all prompts.

    Returns:
        tau (tokens per verification, bonus included, the prefill left out), tokens, verifications, mean_nodes,
        rank_acceptance (see `rank_counts`) and whether the method is exact.
    """
    outputs: list[Output] = []
    for start in track(range(0, len(prompts), batch_size), f"{decoder.method}", transient=True):
        outputs += decoder.generate(list(prompts[start : start + batch_size]), max_new_tokens=max_new_tokens)
    rounds = [round_ for output in outputs for round_ in output.rounds[1:]]
    tokens = sum(len(round_.tokens) for round_ in rounds)
    visits, taken = rank_counts(rounds)
    return {
        "method": decoder.method,
        "exact": all(output.exact for output in outputs),
        "prompts": len(prompts),
        "tau": tokens / len(rounds) if rounds else None,
        "tokens": tokens,
        "verifications": len(rounds),
        "mean_nodes": sum(round_.nodes for round_ in rounds) / len(rounds) if rounds else None,
        "rank_acceptance": [round(count / visits, 4) for count in taken] if visits else [],
    }


def rank_counts(rounds: Sequence[Round], ranks: int = 10) -> tuple[int, list[int]]:
    """How often the target's token was the b-th best child of the root.

    Of the root alone: it has its children in every context, a deeper node many only where the draft is unsure.

    Returns:
        How many roots had at least `ranks` children, and for each b how often child b was the accepted one. In a
        narrower tree a missing child would look like a refused one.
    """
    visits, taken = 0, [0] * ranks
    for round_ in rounds:
        children = [i for i, parent in enumerate(round_.tree["parents"]) if parent == 0 and i]
        if len(children) < ranks:
            continue
        visits += 1
        if round_.path:
            best_first = sorted(children, key=lambda i: (-round_.tree["scores"][i], i))
            rank = best_first.index(round_.path[0])
            if rank < ranks:
                taken[rank] += 1
    return visits, taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--draft", default=None)
    parser.add_argument("--prompts", type=Path, required=True, help="JSON lines with `turns`; the first turn is used")
    parser.add_argument("--methods", default="eagle3,talon")
    parser.add_argument("--set", action="append", default=[], metavar="METHOD.OPTION=VALUE")
    parser.add_argument("--limit", type=int, default=None)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    options: dict[str, dict[str, Any]] = {}
    for setting in args.set:
        key, value = setting.split("=", 1)
        name, option = key.split(".", 1)
        options.setdefault(name, {})[option] = json.loads(value)
    prompts = [[{"role": "user", "content": text}] for text in read_prompts(args.prompts, args.limit)]
    results = []
    for name in args.methods.split(","):
        decoder = specdec.load(args.target, draft=args.draft, method=name, **options.get(name, {}))
        result = acceptance(decoder, prompts, args.max_new_tokens, args.batch_size)
        results.append({**result, "growth": repr(decoder.growth)})
    report = {
        "machine": machine(),
        "target": args.target,
        "file": args.prompts.name,
        "max_new_tokens": args.max_new_tokens,
        "results": results,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
