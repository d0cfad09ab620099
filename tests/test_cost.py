"""The measured costs: what is timed, what a file of them depends on, and files and folders that are not as expected."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle.models import TAPS, head_draft, lm_draft, tiny

from specdec import cost
from specdec.drafters.eagle3 import Eagle3Drafter
from specdec.drafters.lm import LMDrafter
from specdec.evaluation.exactness import random_head, random_target
from specdec.growth.chain import Chain
from specdec.growth.talon import Talon
from specdec.models.lm import CausalLM

pytestmark = pytest.mark.usefixtures("one_thread")
CURVE = cost.CostCurve({1: 1.0, 60: 2.0}, 0.5)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    """One entry a measurement, none of which takes time; files go to a folder of the test."""
    calls: list[int] = []
    monkeypatch.setattr(cost, "measure", lambda *args: calls.append(1) or CURVE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return calls


def test_a_curve_is_measured_once(measured: list[int]) -> None:
    target, drafter = CausalLM(tiny()), lm_draft()
    assert [cost.cached_curve(target, drafter) for _ in range(2)] == [CURVE, CURVE]
    assert len(measured) == 1


@pytest.mark.parametrize("root", ["/proc/nope", "/dev/null"])
def test_a_folder_that_takes_no_file_is_no_error(measured: list[int], monkeypatch, root: str) -> None:
    """Writing the measured curve there made `load` fail."""
    monkeypatch.setenv("XDG_CACHE_HOME", root)
    assert cost.cached_curve(CausalLM(tiny()), lm_draft()) == CURVE


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "null",
        "3",
        '{"verify": {}, "draft": 0}',
        '{"verify": {"1": 1.0}, "draft": null}',
        '{"verify": [1.0], "draft": 0.5}',
        '{"verify": {"1": 0.0, "60": 2.0}, "draft": 0.5}',
        '{"verify": {"2": 1.0, "60": 2.0}, "draft": 0.5}',
        '{"verify": {"0": 1.0, "1": 2.0}, "draft": 0.5}',
        '{"verify": {"1": 1.0, "60": NaN}, "draft": 0.5}',
        '{"verify": {"1": NaN, "60": 2.0}, "draft": 0.5}',
        '{"verify": {"1": 1.0, "60": Infinity}, "draft": 0.5}',
        '{"verify": {"1": 1.0, "60": 2.0}, "draft": 0.0}',
        '{"verify": {"1": 1.0, "60": 1%s}, "draft": 0.5}' % ("0" * 400),
    ],
)
def test_an_odd_file_is_measured_anew(measured: list[int], text: str) -> None:
    """They raised TypeError or IndexError in `load`, or made a plan of no sense."""
    target, drafter = CausalLM(tiny()), lm_draft()
    path = cost.curve_path(target, drafter)
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert cost.cached_curve(target, drafter) == CURVE
    assert json.loads(path.read_text())["draft"] == 0.5
    assert len(measured) == 1


def seen(target: CausalLM, drafter: LMDrafter | None) -> int:
    """The largest position that a measurement computes, over both models."""
    largest = 0
    for lm in (target, *([drafter.model] if drafter else [])):
        run = lm.backbone.run

        def spy(ids, step, taps, run=run):
            nonlocal largest
            largest = max(largest, int(step.positions.max()))
            return run(ids, step, taps)

        lm.backbone.run = spy
    curve = cost.measure(target, drafter)
    assert 1 in curve.verify
    assert all(seconds > 0 for seconds in curve.verify.values())
    return largest


@pytest.mark.parametrize("context", [8, 40, 100])
@pytest.mark.parametrize("short", ["target", "draft"])
def test_no_position_is_timed_that_a_context_has_not(monkeypatch, context: int, short: str) -> None:
    """200 and 60 positions were computed whatever the context: beyond learned positions that is an IndexError."""
    monkeypatch.setattr(cost, "_REPEATS", 1)
    contexts = {"target": 256, "draft": 256, short: context}
    target = CausalLM(random_target("llama", max_position_embeddings=contexts["target"]))
    draft = LMDrafter(CausalLM(random_target("llama", 1, max_position_embeddings=contexts["draft"]), "draft"))
    assert seen(target, draft) < context


def test_a_long_context_is_timed_at_all_sizes(monkeypatch) -> None:
    monkeypatch.setattr(cost, "_REPEATS", 1)
    target = CausalLM(tiny(max_position_embeddings=512))
    assert tuple(cost.measure(target, head_draft()).verify) == cost.SIZES


def test_drafts_of_two_sizes_have_two_files() -> None:
    """Two LM drafts of unlike depth shared a file, and so did heads of unlike vocabularies."""
    target = CausalLM(tiny())
    drafts = [LMDrafter(CausalLM(random_target("llama", num_hidden_layers=n), "draft")) for n in (2, 6)]
    drafts += [Eagle3Drafter(random_head(tiny(), 0, vocab), TAPS) for vocab in (40, 83)]
    drafts.append(LMDrafter(CausalLM(random_target("llama", vocab_size=90), "draft")))
    drafts.append(LMDrafter(CausalLM(random_target("llama").to(torch.bfloat16), "draft")))
    assert len({cost.curve_path(target, drafter) for drafter in (None, *drafts)}) == 7


@given(
    times=st.lists(st.floats(1e-7, 10.0), min_size=len(cost.SIZES), max_size=len(cost.SIZES)),
    draft=st.floats(1e-7, 10.0),
    few=st.integers(1, len(cost.SIZES)),
)
def test_every_measured_curve_gives_a_plan_that_can_be_run(times: list[float], draft: float, few: int) -> None:
    """A busy machine timed 16 tokens below one: a node's price was negative, and no talon takes a negative floor."""
    curve = cost.CostCurve(dict(zip(cost.SIZES[:few], times, strict=False)), draft)
    found = [curve.at(nodes) for nodes in range(1, 100)]
    assert found == sorted(found)
    assert found[0] > 0
    plan = cost.plan(curve)
    Talon(plan.budget, top_k=plan.top_k, min_probability=plan.min_probability, min_mass=plan.min_mass)
    Chain(plan.chain)
