"""T = 0: the ids of `transformers.generate`, for every method, on four model families. No excuse for a random model."""

from __future__ import annotations

import pytest
from cases import bench, greedy_cells, tree_text
from oracle.models import FAMILIES, prompt, text, tiny
from oracle.plain import plain

from specdec.evaluation.exactness import SAMPLINGS, Cell, greedy_reference, random_grid

pytestmark = [pytest.mark.exactness, pytest.mark.usefixtures("one_thread")]


@pytest.mark.parametrize("cell", greedy_cells(), ids=str)
def test_equals_transformers(cell: Cell) -> None:
    """D01: bf16 near-ties were an excuse for real bugs elsewhere. In fp32 there is none."""
    outcome = bench(cell.target).run(cell)
    assert outcome.passed, outcome.failures


@pytest.mark.parametrize("family", FAMILIES)
def test_scripted_trees(family: str) -> None:
    """D01, D13: right and wrong trees of the worst shape; 30 tokens run well past Mistral's window of 8."""
    assert tree_text(family) == []


@pytest.mark.parametrize("family", FAMILIES)
def test_the_oracle_is_transformers_own_text(family: str) -> None:
    """The cacheless decoder and `transformers.generate` are two references; they have to agree before we compare."""
    ids = prompt(5)
    expected = greedy_reference(tiny(family), ids, 40)
    assert plain(tiny(family), ids, 40) == expected
    assert len(set(expected)) > 15, "a text that repeats itself hides dropped and doubled tokens"


def test_a_text_is_not_constant_over_prompts() -> None:
    assert len({tuple(text("llama", prompt(6, seed), 24)) for seed in range(3)}) == 3


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_whole_grid(family: str, sampling: dict) -> None:
    """All that `make exactness` runs on random models."""
    cells = [cell for cell in random_grid() if cell.target == family and cell.sampling == sampling]
    failures = {str(cell): outcome.failures for cell in cells if not (outcome := bench(family).run(cell)).passed}
    assert len(cells) > 50
    assert not failures
