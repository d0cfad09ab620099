"""T > 0: the noise belongs to positions, so one seed gives one text, whatever drafts and whatever the tree."""

from __future__ import annotations

import pytest
import torch
from cases import batch_text, bench, sampled_cells, tree_text
from oracle.models import FAMILIES, decoder, head_draft, prompt, text, tiny
from oracle.scripted import oracle

from specdec.evaluation.exactness import SAMPLINGS, Cell
from specdec.growth.talon import Talon

pytestmark = [pytest.mark.exactness, pytest.mark.usefixtures("one_thread")]


@pytest.mark.parametrize("cell", sampled_cells(), ids=str)
def test_equals_plain_sampling(cell: Cell) -> None:
    outcome = bench(cell.target).run(cell)
    assert outcome.passed, outcome.failures


@pytest.mark.parametrize("sampling", SAMPLINGS[1:], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_ar_equals_the_oracle(family: str, sampling: dict) -> None:
    """The reference of the grid above, against noise and warping that were written a second time."""
    ids = prompt(5)
    output = decoder(tiny(family)).generate(ids, max_new_tokens=32, seed=11, **sampling)
    assert output.tokens == text(family, ids, 32, seed=11, **sampling)


@pytest.mark.parametrize("sampling", SAMPLINGS[1:], ids=str)
def test_scripted_trees(sampling: dict) -> None:
    assert tree_text(seed=5, **sampling) == []
    assert batch_text(seed=5, **sampling) == []


def generate(ids, seed, **options):
    known = [ids + text("llama", ids, 24, temperature=1.0, seed=3)]
    pair = (head_draft(texts=known), Talon(16))
    return decoder(pair=pair).generate(ids, max_new_tokens=24, seed=seed, **options)


def test_seeds() -> None:
    """D06: seeds were ignored, or shared by all requests. Equal seeds agree, others do not, and T = 0 has no seed."""
    ids = prompt(6)
    texts = [generate(ids, seed, temperature=1.0).tokens for seed in range(5)]
    assert len({tuple(tokens) for tokens in texts}) > 3
    assert generate(ids, 3, temperature=1.0).tokens == texts[3]
    assert generate(ids, 3).tokens == generate(ids, 4).tokens


def test_a_row_does_not_depend_on_its_batch_mates() -> None:
    """D06: the random stream of one request moved when another had no draft. A row alone gives the row in a batch."""
    prompts, seeds = [prompt(6, 1), prompt(3, 2), prompt(11, 3)], [5, 6, 5]
    known = [ids + text("llama", ids, 24, temperature=1.0, seed=seed) for ids, seed in zip(prompts, seeds, strict=True)]
    pair = oracle(known, 97, depth=4, width=2, right=[3, 0, 1])
    together = decoder(pair=pair).generate(prompts, max_new_tokens=24, temperature=1.0, seed=seeds)
    alone = [
        decoder().generate(ids, max_new_tokens=24, temperature=1.0, seed=seed)
        for ids, seed in zip(prompts, seeds, strict=True)
    ]
    assert [output.tokens for output in together] == [output.tokens for output in alone]


def test_the_global_generator_is_untouched() -> None:
    """D06: a library that draws from the global generator changes its caller's experiment."""
    before = torch.get_rng_state()
    generate(prompt(6), 1, temperature=1.0)
    assert torch.equal(torch.get_rng_state(), before)
