"""The part of the grid that CI runs, and scenes that say how a text differs from plain decoding."""

from __future__ import annotations

import functools
from itertools import cycle

from oracle.models import FAMILIES, decoder, head_draft, prompt, text, tiny
from oracle.scripted import oracle, wrong

from specdec.evaluation.exactness import SAMPLINGS, TALON_BUDGETS, TALON_MUS, Cell, random_bench
from specdec.growth.eagle2 import Eagle2

bench = functools.cache(random_bench)


def greedy_cells() -> list[Cell]:
    """`ar`, `sd`, `eagle3` on every family; each TALON setting on one family, with each kind of draft half of them."""
    cells = []
    for family in FAMILIES:
        cells += [
            Cell(family, "ar"),
            Cell(family, "sd", "lm", {"length": 4}),
            Cell(family, "sd", "head", {"length": 4}),
            Cell(family, "eagle3", "head", {"budget": 60, "top_k": 10, "depth": 8}),
        ]
    cells.append(Cell("qwen3", "eagle3", "lm", {"budget": 16, "top_k": 4, "depth": 3}))
    settings = [{"budget": budget, "mu": mu} for mu in TALON_MUS for budget in TALON_BUDGETS]
    for options, family, draft in zip(settings, cycle(FAMILIES), cycle(("head", "head", "lm", "head", "lm"))):
        cells.append(Cell(family, "talon", draft, options))
    # at mu = 1 a tree is about as deep as its budget, so shorter texts there
    return [
        Cell(c.target, c.method, c.draft, c.options, c.sampling, 2, 14 if c.options.get("mu") == 1.0 else 24)
        for c in cells
    ]


def sampled_cells() -> list[Cell]:
    """Every method on every family at T = 1 and with top-p and top-k."""
    choices = [
        ("sd", "head", {"length": 4}),
        ("eagle3", "head", {"budget": 16, "top_k": 4, "depth": 3}),
        ("talon", "head", {"budget": 60, "mu": 0.03}),
        ("talon", "lm", {"budget": 16, "mu": 0.1}),
    ]
    return [
        Cell(family, method, draft, options, sampling, 2, 24)
        for sampling in SAMPLINGS[1:]
        for family in FAMILIES
        for method, draft, options in choices
    ]


# --- scenes: each decodes, and returns a line for every text that is not the plain one -------------------------------


def differences(got: list[list[int]], expected: list[list[int]]) -> list[str]:
    return [
        f"row {row}: token {next((i for i, (a, b) in enumerate(zip(g, e, strict=False)) if a != b), len(g))} differs"
        for row, (g, e) in enumerate(zip(got, expected, strict=True))
        if g != e
    ]


def tree_text(family: str = "llama", seeds: int = 3, new: int = 24, eos: tuple[int, ...] = (), **sampling) -> list[str]:
    """ORACLE(3, 3) and WRONG, one row at a time."""
    found = []
    for seed in range(seeds):
        ids = prompt(6, seed)
        expected = text(family, ids, new, eos=eos, **sampling)
        known = [ids + text(family, ids, new + 8, **sampling)]
        for make in (oracle(known, 97, 3, 3), wrong(known, 97)):
            got = decoder(tiny(family), make, eos_token_ids=eos).generate(ids, max_new_tokens=new, **sampling)
            found += differences([got.tokens], [expected])
    return found


def batch_text(new: int = 20, **sampling) -> list[str]:
    """Rows of unequal length that accept 0, 2 and 4 tokens a round, so that they end at different rounds."""
    prompts = [prompt(n, n) for n in (3, 7, 12)]
    expected = [text("llama", ids, new, **sampling) for ids in prompts]
    known = [ids + more for ids, more in zip(prompts, expected, strict=True)]
    pair = oracle(known, 97, depth=5, width=2, right=[0, 2, 4])
    outputs = decoder(pair=pair).generate(prompts, max_new_tokens=new, **sampling)
    return differences([output.tokens for output in outputs], expected)


def rerank_text() -> list[str]:
    """EAGLE's rerank where one row has a single token left, and so no tree, while the other goes on.

    That last token is 0, which is also what padding holds.
    """
    first, second = prompt(6, 3), prompt(9, 0)
    full = text("llama", first, 24)
    new = full.index(0, 6) + 1
    early = len(first) + 4  # the first row gains a lead here, and then takes single steps to its end
    drafter = head_draft(texts=[first + full, []], knows=lambda position: position < early)
    outputs = decoder(pair=(drafter, Eagle2(12, 4, 5))).generate([first, second], max_new_tokens=new)
    return differences([output.tokens for output in outputs], [full[:new], text("llama", second, new)])
