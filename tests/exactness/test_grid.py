"""The grid as a library and as a command: what it covers, what it excuses, and what it must not excuse."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from oracle.folders import save_tiny
from oracle.models import clone, decoder, prompt, tiny
from typer.testing import CliRunner

from specdec.evaluation import exactness
from specdec.evaluation.exactness import (
    FAMILIES,
    SAMPLINGS,
    TALON_BUDGETS,
    TALON_MUS,
    TIE,
    Bench,
    Cell,
    greedy_reference,
    preset_grid,
    random_grid,
)
from specdec.evaluation.setting import read_prompts
from specdec.loading import PRESETS, Preset

pytestmark = pytest.mark.usefixtures("one_thread")
TWINS = (11, 47)  # two tokens with the same logit


def test_the_grid_has_every_point() -> None:
    cells = random_grid()
    assert len(cells) == len(set(map(str, cells)))
    for family in FAMILIES:
        for sampling in SAMPLINGS:
            here = [c for c in cells if c.target == family and c.sampling == sampling]
            assert {c.method for c in here} == {"ar", "sd", "eagle3", "talon"}
            talon = {(c.options.get("budget"), c.options.get("mu"), c.draft) for c in here if c.method == "talon"}
            assert talon >= {(n, mu, d) for n in TALON_BUDGETS for mu in TALON_MUS for d in ("lm", "head")}
    real = [c for c in preset_grid("smollm2", 20) if c.sampling["temperature"] == 0]
    assert {(c.options["budget"], c.options["mu"]) for c in real if c.method == "talon"} == {
        (n, mu) for n in TALON_BUDGETS for mu in TALON_MUS
    }
    assert all((c.prompts, c.max_new_tokens) == (20, 128) for c in real)


def test_the_prompts_that_come_with_the_package() -> None:
    prompts = read_prompts()
    assert len(prompts) == 20
    assert len(set(prompts)) == 20


@pytest.fixture
def tied():
    """A model in which two tokens always tie, and a text that holds one of them."""
    model = clone(tiny())
    model.lm_head.weight[TWINS[1]] = model.lm_head.weight[TWINS[0]]
    for seed in range(40):
        ids = prompt(5, seed)
        if TWINS[0] in (expected := greedy_reference(model, ids, 20))[:10]:
            return model, ids, expected
    raise AssertionError("no text holds the token")


def flipping(model, at: int, token: int):
    """A decoder that is right but for one token: there it says `token`, and goes on from it."""
    right = decoder(model)

    def generate(given, max_new_tokens, **options):
        ids = given[0] if isinstance(given[0], list) else given
        tokens = right.generate(ids, max_new_tokens=max_new_tokens).tokens
        here = at - len(ids)
        if 0 <= here < max_new_tokens:
            wrong = [*tokens[:here], token]
            rest = right.generate(ids + wrong, max_new_tokens=max_new_tokens - len(wrong)).tokens
            tokens = wrong + rest
        output = SimpleNamespace(tokens=tokens, rounds=[])
        return [output] if isinstance(given[0], list) else output

    return SimpleNamespace(drafter=None, generate=generate)


@pytest.mark.parametrize("excused", [True, False])
def test_a_tie_is_excused_on_a_real_model_only(tied, excused: bool) -> None:
    """And the comparison goes on behind it, from the reference's own text."""
    model, ids, expected = tied
    at = len(ids) + expected.index(TWINS[0])
    bench = Bench(model, [ids], lambda *_: flipping(model, at, TWINS[1]), excuse_ties=excused)
    outcome = bench.run(Cell("x", "talon", prompts=1, max_new_tokens=20, batches=(1,)))
    assert outcome.passed is excused
    assert outcome.tokens == 20
    if excused:
        assert len(outcome.tie_gaps) == 1
        assert outcome.tie_gaps[0] < TIE
        assert outcome.record()["ties"] == 1


def test_a_difference_is_never_excused(tied) -> None:
    model, ids, expected = tied
    bench = Bench(model, [ids], lambda *_: flipping(model, len(ids) + 3, (expected[3] + 1) % 97), excuse_ties=True)
    outcome = bench.run(Cell("x", "talon", prompts=1, max_new_tokens=20, batches=(1,)))
    assert not outcome.passed
    assert "token 3" in outcome.failures[0]


def test_a_text_that_ends_early_is_a_difference(tied) -> None:
    model, ids, expected = tied
    short = SimpleNamespace(drafter=None, generate=lambda *_, **__: [SimpleNamespace(tokens=expected[:15], rounds=[])])
    outcome = Bench(model, [ids], lambda *_: short, excuse_ties=True).run(
        Cell("x", "talon", prompts=1, max_new_tokens=20, batches=(1,))
    )
    assert outcome.failures == ["prompt 0: 15 tokens, expected 20"]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path):
    """The command with two cells on a random model, and a preset that is tiny too."""
    folders = save_tiny(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    drafts = {"eagle3": lambda: folders.head}
    monkeypatch.setitem(PRESETS, "smollm2", Preset("a stand-in", lambda: folders.target, drafts))
    cells = [Cell("llama", "ar", max_new_tokens=6), Cell("llama", "talon", "head", {"budget": 8}, max_new_tokens=6)]
    monkeypatch.setattr(exactness, "random_grid", lambda quick: cells)
    monkeypatch.setattr(
        exactness,
        "preset_grid",
        lambda preset, count, quick: [
            Cell(preset, "talon", "head", {"budget": 8}, s, count, 8, (1,)) for s in SAMPLINGS
        ],
    )
    app = exactness.typer.Typer()
    app.command()(exactness.main)
    return lambda *args: CliRunner().invoke(app, ["--out", str(tmp_path / "a" / "report.json"), *args]), tmp_path / "a"


def test_the_command(small) -> None:
    run, folder = small
    done = run("--quick")
    assert done.exit_code == 0, done.output
    report = json.loads((folder / "report.json").read_text())
    assert report["counts"]["cells"] == report["counts"]["planned"] == report["counts"]["passed"] == 5
    assert report["counts"]["tokens"] > 100
    assert report["machine"]["torch"] == torch.__version__
    assert [cell["target"] for cell in report["cells"]] == ["llama"] * 2 + ["smollm2"] * 3
    assert all(cell["passed"] and not cell["failures"] for cell in report["cells"])


def test_a_stopped_run_goes_on(small) -> None:
    """Hours of cells are not run twice; one that failed is."""
    run, folder = small
    run("--quick")
    report = json.loads((folder / "report.json").read_text())
    report["cells"] = report["cells"][:3]
    report["cells"][0]["passed"] = False
    report["cells"][1]["seconds"] = 1234.5
    (folder / "report.json").write_text(json.dumps(report))
    assert run("--quick", "--resume").exit_code == 0
    cells = json.loads((folder / "report.json").read_text())["cells"]
    assert len(cells) == 5
    assert [cell["seconds"] for cell in cells].count(1234.5) == 1
    assert run("--quick").exit_code == 0
    assert 1234.5 not in [cell["seconds"] for cell in json.loads((folder / "report.json").read_text())["cells"]]


def test_the_command_says_what_differs(small, monkeypatch: pytest.MonkeyPatch) -> None:
    run, folder = small
    monkeypatch.setattr(exactness, "greedy_reference", lambda model, ids, new: [5] * new)
    done = run("--preset", "")
    assert done.exit_code == 1
    report = json.loads((folder / "report.json").read_text())
    assert report["counts"]["passed"] == 0
    assert "expected 5" in report["cells"][0]["failures"][0]


def test_the_command_without_the_preset(small, monkeypatch: pytest.MonkeyPatch) -> None:
    """The random grid does not need the weights of the embedded default; the report says that they were missing."""
    run, folder = small

    def missing():
        raise FileNotFoundError("not installed")

    monkeypatch.setitem(PRESETS, "smollm2", Preset("absent", missing, {"eagle3": missing}))
    assert run().exit_code == 0
    assert json.loads((folder / "report.json").read_text())["preset_missing"] == "not installed"
