"""`specdec bench`: tables, JSON, and no figure for a wrong result."""

from __future__ import annotations

import json

import pytest
import torch

from specdec.evaluation.ops import attention, margin, tree_build, whole_trees
from specdec.evaluation.ops.measure import OURS, Case, Report, measure, verified

COMMANDS = {
    "tree-build": {"vocab": [500, 1003], "alpha": [0.7, 5.0]},
    "margin": {"vocab": [500, 1003]},
    "attention": {"queries": [1, 5], "prefix": 40},
}
PEERS = {
    "tree-build": [{"eagle", "talon"}] * 8,
    "margin": [{"softmax_topk"}] * 2 + [{"topk", "max_mask_max"}] * 2,
    "attention": [{"sdpa", "sdpa_folded"}] * 2,
}


@pytest.mark.parametrize("name", COMMANDS)
def test_json_is_one_object(specdec, name: str) -> None:
    done = specdec("bench", name, "--quick", "--json", **COMMANDS[name])
    assert done.exit_code == 0, done.output
    assert done.stdout.count("\n") == 1
    found = json.loads(done.stdout)
    assert {"processor", "threads", "torch", "load_average"} <= set(found["machine"])
    assert found["machine"]["threads"] == 1
    assert found["wrong"] == []
    assert len(found["rows"]) == len(PEERS[name])
    for row, peers in zip(found["rows"], PEERS[name], strict=True):
        assert {key.removeprefix("ratio_") for key in row if key.startswith("ratio_")} == peers
        assert 0 < row["ours_ms"] <= row["ours_median_ms"]
        for peer in peers:
            assert row[f"ratio_{peer}"] == pytest.approx(row[f"{peer}_ms"] / row["ours_ms"])


def test_options_shape_the_rows(specdec) -> None:
    options = {"vocab": 400, "alpha": 1.0, "parents": 3, "budget": 7, "mu": 0.5, "dtype": "bfloat16", "threads": 2}
    found = json.loads(specdec("bench", "tree-build", "--quick", "--json", **options).stdout)
    assert found["machine"]["threads"] == 2
    assert found["notes"] == ["whole trees left out: --quick"]
    shape = {"form": "logprobs", "vocab": 400, "alpha": 1.0, "parents": 3, "budget": 7, "mu": 0.5}
    assert shape.items() <= found["rows"][0].items()
    assert found["rows"][0]["bytes"] == 2 * 3 * 400


@pytest.mark.parametrize("name", COMMANDS)
def test_table(specdec, name: str) -> None:
    done = specdec("bench", name, "--quick", **COMMANDS[name])
    assert done.exit_code == 0, done.output
    head, *_ = done.stdout.splitlines()
    assert "1 thread(s)" in head
    for word in ("ours", "×", *PEERS[name][0]):
        assert word in done.stdout


def test_a_missing_preset_is_said(specdec, monkeypatch) -> None:
    def record(*_):
        raise ValueError("no weights here")

    monkeypatch.setattr(whole_trees, "record", record)
    done = specdec("bench", "tree-build", vocab=300, alpha=5.0, seconds=0.01)
    assert done.exit_code == 0, done.output
    assert "whole trees left out, as smollm2 is not here: no weights here" in done.stdout


@pytest.mark.parametrize(
    ("line", "part"),
    [
        (("tree-build", "--vocab", "5"), "--vocab is 5; expected a number from 10 to"),
        (("tree-build", "--mu", "2"), "--mu is 2.0; expected a number from 0 to 1"),
        (("tree-build", "--budget", "0"), "--budget is 0; expected a number from 1 to 256"),
        (("margin", "--dtype", "int8"), "--dtype is 'int8'; expected one of float32, bfloat16, float16"),
        (("margin", "--device", "gpu"), "device is 'gpu'; expected 'cpu', 'cuda'"),
        (("margin", "--threads", "0"), "--threads is 0; expected at least 1"),
        (("attention", "--model", "GPT-2"), "--model is 'GPT-2'; expected one of Llama-3-8B, Qwen3-32B"),
    ],
)
def test_bad_options(specdec, line: tuple[str, ...], part: str) -> None:
    done = specdec("bench", *line)
    assert (done.exit_code, done.stdout) == (2, "")
    assert part in done.stderr


def test_a_wrong_result_has_no_figure(specdec, monkeypatch) -> None:
    monkeypatch.setattr(margin, "topk", lambda logits: margin.max_mask_max(logits) + 1)
    done = specdec("bench", "margin", "--quick", "--json", vocab=300)
    found = json.loads(done.stdout)
    assert done.exit_code == 1
    assert [row["margin of"] for row in found["rows"]] == ["probabilities"]
    assert found["wrong"] == ["margin of logits, nodes 61, vocab 300: topk's margin is 1.0e+00 off"]
    shown = specdec("bench", "margin", "--quick", vocab=300)
    assert "topk's margin is" in shown.stderr
    assert "topk's margin is" not in shown.stdout


# --- the engine ------------------------------------------------------------------------------------------------------


def test_a_peer_that_does_not_run_is_left_out(one_thread) -> None:
    def missing(x):
        raise RuntimeError("no such GPU")

    case = Case({"n": 1}, (torch.ones(1),), {OURS: torch.clone, "peer": missing}, lambda results: None, 4)
    report = Report()
    assert list(verified(case, report)) == [OURS]
    assert report.notes == ["peer left out: no such GPU"]
    assert list(measure([case], 0).rows[0]) == ["n", "bytes", "ours_ms", "ours_median_ms"]


def test_ours_has_to_run(one_thread) -> None:
    case = Case({"n": 1}, (torch.ones(1),), {OURS: lambda x: x + torch.ones(7, 3, 2)[9]}, lambda results: None, 4)
    with pytest.raises(IndexError):
        measure([case], 0)


def test_inputs_stay_as_they_were(one_thread) -> None:
    cases = [
        *tree_build.cases((300,), (1.35,)),
        *margin.cases((300,)),
        *attention.cases((3,), (20,), ("Qwen3-32B",)),
    ]
    for case in cases:
        before = [x.clone() for x in case.inputs]
        verified(case)
        assert all(torch.equal(x, y) for x, y in zip(before, case.inputs, strict=True))


def test_zipf_is_what_the_paper_says() -> None:
    logprob, parent_scores = tree_build.zipf(1000, 1.35, parents=4)
    probability = logprob.double().exp()
    torch.testing.assert_close(probability.sum(-1), torch.ones(4, dtype=torch.float64))
    ranked = probability.sort(-1, descending=True).values
    torch.testing.assert_close(ranked[:, 0] / ranked[:, 99], torch.full((4,), 100.0**1.35).double(), rtol=1e-6, atol=0)
    assert torch.equal(parent_scores, logprob[0].sort(descending=True).values[:4])
    assert not torch.equal(logprob[0], logprob[1])


def test_same_candidates_forgives_rounding_and_nothing_else() -> None:
    expected = {(0, 1): -1.0, (0, 2): -2.0, (1, 5): -3.0}
    tree_build.same_candidates(dict(expected), expected, -3.5, exact=True)
    near = -3.5 + 2e-6
    tree_build.same_candidates({**expected, (1, 7): near}, expected, -3.5)
    with pytest.raises(AssertionError, match=r"candidate \(1, 7\) differs"):
        tree_build.same_candidates({**expected, (1, 7): near}, expected, -3.5, exact=True)
    with pytest.raises(AssertionError, match=r"candidate \(0, 2\) differs at -2.0"):
        tree_build.same_candidates({(0, 1): -1.0, (1, 5): -3.0}, expected, -3.5)
    with pytest.raises(AssertionError, match=r"the score of \(0, 1\)"):
        tree_build.same_candidates({**expected, (0, 1): -1.001}, expected, -3.5)


def test_whole_trees_are_the_same_either_way(one_thread) -> None:
    generator = torch.Generator().manual_seed(1)
    trees = []
    for _ in range(3):  # as a drafter would: as many rows a layer as the layer before chose
        layers, width, left = [], 1, 19
        while left:
            layers.append(4 * torch.randn(1, width, 200, generator=generator))
            chosen = whole_trees.grow(layers, 20, 0.1, whole_trees._ours)
            width = len(chosen[-1][0])
            left -= width
        trees.append(layers)
    case = whole_trees.case(trees, budget=20, mu=0.1)
    assert set(verified(case)) == {OURS, "talon"}
    assert case.shape["layers"] == sum(map(len, trees)) > 6
    (row,) = measure([case], 0).rows
    assert row["ratio_talon"] > 0
