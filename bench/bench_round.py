"""What does a round cost, by phase? One prompt, 64 tokens, greedy; milliseconds a round."""

from __future__ import annotations

import pytest

import specdec
from specdec import cost
from specdec.methods import make_growth

PROMPT = [{"role": "user", "content": "Explain in three sentences why the sky is blue."}]


@pytest.mark.parametrize("method", list(specdec.METHODS))
def test_round(benchmark, finding: dict, talon: specdec.Decoder, method: str) -> None:
    chosen = specdec.METHODS[method]
    drafter = talon.drafter if chosen.drafts else None
    rates = getattr(drafter, "rank_acceptance", None)
    plan = cost.plan(cost.cached_curve(talon.target, drafter), rates) if drafter else None
    decoder = specdec.Decoder(talon.target, drafter, make_growth(chosen, {}, plan), tokenizer=talon.tokenizer)
    decoder.generate(PROMPT, max_new_tokens=4)
    output = benchmark.pedantic(decoder.generate, (PROMPT,), {"max_new_tokens": 64}, rounds=3)
    told = output.summary()
    finding |= {name: told[name] for name in ("tau", "delta", "mean_nodes", "tokens_per_second")}
    finding |= {f"{phase}_ms": 1000 * seconds / told["rounds"] for phase, seconds in told["split"].items()}
