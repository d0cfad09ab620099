"""What does an op save over the torch ops that it replaces? The same work by ours and its peers, on one thread.

A figure to quote comes from `specdec bench`, which takes turns; here each contender runs by itself.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from specdec.evaluation.ops import attention, margin, tree_build, whole_trees
from specdec.evaluation.ops.measure import OURS, Case, verified

VOCABULARIES = (32000, 151936)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def trees() -> list[whole_trees.Layers]:
    try:
        return whole_trees.record()
    except (FileNotFoundError, ValueError, ModuleNotFoundError) as error:
        pytest.skip(f"smollm2 is not here: {error}")


@pytest.mark.parametrize("contender", [OURS, "eagle", "talon"])
@pytest.mark.parametrize("alpha", tree_build.ALPHAS)
@pytest.mark.parametrize("vocab", VOCABULARIES)
@pytest.mark.parametrize("form", tree_build.FORMS)
def test_a_layer_of_a_tree(benchmark, form: str, vocab: int, alpha: float, contender: str) -> None:
    run(benchmark, tree_build.case(form, vocab, alpha), contender)


@pytest.mark.parametrize("contender", [OURS, "talon"])
def test_whole_trees(benchmark, trees: list[whole_trees.Layers], contender: str) -> None:
    run(benchmark, whole_trees.case(trees), contender)


@pytest.mark.parametrize(
    ("of", "contender"),
    [("probabilities", OURS), ("probabilities", "softmax_topk")]
    + [("logits", name) for name in (OURS, "topk", "max_mask_max")],
)
@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_the_margin_at_61_nodes(benchmark, vocab: int, of: str, contender: str) -> None:
    run(benchmark, margin.case(of, vocab), contender)


@pytest.mark.parametrize("contender", [OURS, "sdpa", "sdpa_folded"])
@pytest.mark.parametrize("queries", [1, 61])
def test_attention_to_512_entries_and_a_tree(benchmark, queries: int, contender: str) -> None:
    run(benchmark, attention.case("Llama-3-8B", queries, 512), contender)


@torch.inference_mode()
def run(benchmark, case: Case, contender: str) -> None:
    benchmark.group = str(case)
    benchmark.pedantic(verified(case)[contender], case.inputs, rounds=20, warmup_rounds=2)
