"""`specdec compare`, and that its "identical" is a finding and not a claim."""

from __future__ import annotations

import json

import pytest
import torch
from oracle.models import lm_draft, prompt, tiny

from specdec.decoder import Decoder
from specdec.evaluation import compare
from specdec.evaluation.compare import Judge
from specdec.evaluation.contenders import HF, HF_MODULES, LOOKUP, UNPACKED, Ours, Request, Transformers, unpack
from specdec.evaluation.exactness import TIE
from specdec.growth.chain import Chain
from specdec.models.lm import CausalLM
from specdec.verifiers.target import TargetVerifier

KEYS = {"method", "tau", "delta", "tokens_per_second", "speedup_vs_ar", "speedup_vs_hf", "identical"}


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    lines = [{"id": 1, "turns": ["hello", "more"]}, {"prompt": "who are you?"}, {"turns": ["third"]}]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    return path


def test_json_is_one_object(specdec, folders, prompts) -> None:
    done = specdec(
        "compare", "--json", target=folders.target, draft=folders.draft, prompts=prompts, limit=2, max_new_tokens=16
    )
    assert done.exit_code == 0, done.output
    assert done.stdout.count("\n") == 1
    found = json.loads(done.stdout)
    assert {"machine", "target", "prompts", "results"} <= set(found)
    assert (found["target"], found["prompts"]) == (str(folders.target), 2)
    assert {"processor", "threads", "torch", "transformers", "specdec"} <= set(found["machine"])
    rows = {row["method"]: row for row in found["results"]}
    assert list(rows) == [HF, LOOKUP, "ar", "sd", "eagle3", "talon"]
    for row in rows.values():
        assert set(row) >= KEYS
        assert row["identical"] is True, row
        assert row["tokens"] == 32
    assert rows["ar"]["speedup_vs_ar"] == rows[HF]["speedup_vs_hf"] == 1
    assert rows["ar"]["tau"] == rows[HF]["tau"] == 1
    assert rows["talon"]["tau"] > 1 < rows["sd"]["tau"]
    speeds = [rows[name]["tokens_per_second"] for name in ("talon", "ar", HF)]
    assert rows["talon"]["speedup_vs_ar"] == pytest.approx(speeds[0] / speeds[1])
    assert rows["talon"]["speedup_vs_hf"] == pytest.approx(speeds[0] / speeds[2])


def test_table_and_factors(specdec, folders, prompts) -> None:
    done = specdec(
        "compare",
        "--factors",
        target=folders.target,
        draft=folders.draft,
        methods="talon",
        prompts=prompts,
        limit=1,
        max_new_tokens=8,
        set=["talon.budget=6", "talon.mu=0.1"],
    )
    assert done.exit_code == 0, done.output
    for name in (HF, LOOKUP, HF_MODULES, UNPACKED, "ar", "talon"):
        assert sum(line.startswith(f"{name} ") for line in done.stdout.splitlines()) >= 1, done.stdout
    assert "lean forward" in done.stdout
    assert done.stdout.count("yes") == 6


def test_sampled_text_is_compared_with_ar(specdec, folders, prompts) -> None:
    done = specdec(
        "compare",
        "--json",
        target=folders.target,
        draft=folders.draft,
        prompts=prompts,
        temperature=1,
        max_new_tokens=16,
    )
    rows = {row["method"]: row for row in json.loads(done.stdout)["results"]}
    assert rows[HF]["identical"] is rows[LOOKUP]["identical"] is None
    assert all(rows[name]["identical"] is True for name in ("ar", "sd", "eagle3", "talon"))


def test_default_prompts_are_there(specdec, folders) -> None:
    done = specdec("compare", "--json", target=folders.target, methods="ar", limit=1, max_new_tokens=2)
    assert json.loads(done.stdout)["prompts"] == 1


# --- the engine ------------------------------------------------------------------------------------------------------


class Careless(TargetVerifier):
    """Takes every drafted token without asking."""

    def verify(self, rows, tree, sampler):
        verdict = super().verify(rows, tree, sampler)
        if tree.size == 1:
            return verdict
        path = torch.arange(1, tree.size)[None]
        return type(verdict)(path, torch.tensor([tree.size - 1]), verdict.bonus, None)


def contenders(*more):
    return [Transformers(HF, tiny()), Ours("ar", Decoder(tiny(), eos_token_ids=[])), *more]


def judge(eos=(), context: int = 256) -> Judge:
    return Judge(tiny(), frozenset(eos), context)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_wrong_verifier_is_found_out(one_thread, temperature: float) -> None:
    target = CausalLM(tiny())
    wrong = Ours("wrong", Decoder(target, lm_draft(), Chain(3), Careless(target)))
    right = Ours("right", Decoder(CausalLM(tiny()), lm_draft(), Chain(3)))
    request = Request(max_new_tokens=16, temperature=temperature)
    results = compare.compare(contenders(wrong, right), [prompt(9), prompt(5, 1)], request, judge())
    found = {result.method: result for result in results}
    assert found["right"].identical is True
    assert found["wrong"].identical is False
    assert any(not difference.tie for difference in found["wrong"].differences)
    assert found["wrong"].tokens_per_second > 0


def test_every_contender_runs_every_prompt_in_a_rotating_order(one_thread) -> None:
    order: list[str] = []
    parts = contenders(Ours("again", Decoder(tiny())))
    prompts = [prompt(n) for n in (3, 4, 5)]
    compare.compare(parts, prompts, Request(max_new_tokens=3), judge(), order.append)
    assert len(order) == compare.total_runs(parts, prompts)
    warm_up, *rounds = [order[start : start + 3] for start in range(0, len(order), 3)]
    names = [part.name for part in parts]
    assert warm_up == names
    assert rounds == [names, names[1:] + names[:1], names[2:] + names[:2]]


def test_texts_end_together_at_the_context(one_thread) -> None:
    """transformers would decode on beyond the last position."""
    results = compare.compare(contenders(), [prompt(250)], Request(max_new_tokens=32), judge())
    assert [result.tokens for result in results] == [7, 7]
    assert all(result.identical for result in results)


def reference(ids: list[int], new: int) -> list[int]:
    return Decoder(tiny(), eos_token_ids=[]).generate(ids, max_new_tokens=new).tokens


def test_differences_names_where_and_how_much(one_thread) -> None:
    ids, request = prompt(9), Request(max_new_tokens=12)
    plain = reference(ids, 12)
    assert judge().differences(0, ids, plain, plain, request) == []
    other = (plain[5] + 1) % 97
    changed = [*plain[:5], other, *reference([*ids, *plain[:5], other], 6)]
    (only,) = judge().differences(3, ids, changed, plain, request)
    with torch.inference_mode():
        logits = tiny()(torch.tensor([ids + plain[:5]])).logits[0, -1]
    assert (only.prompt, only.position) == (3, 5)
    assert only.gap == pytest.approx(float(logits.max() - logits[other]), rel=1e-3)
    assert not only.tie


def test_a_near_tie_is_counted_and_not_blamed(one_thread, monkeypatch) -> None:
    ids, request = prompt(9), Request(max_new_tokens=12)
    plain = reference(ids, 12)
    other = (plain[5] + 1) % 97
    changed = [*plain[:5], other, *reference([*ids, *plain[:5], other], 6)]
    honest = Judge._scores

    def nearly_tied(self, prompt, tokens, request):
        scores = honest(self, prompt, tokens, request).clone()
        scores[5, other] = scores[5, plain[5]] - TIE / 2
        return scores

    monkeypatch.setattr(Judge, "_scores", nearly_tied)
    (only,) = judge().differences(0, ids, changed, plain, request)
    assert only.tie
    changed[8] = (changed[8] + 1) % 97  # behind a tie the comparison goes on
    assert not all(one.tie for one in judge().differences(0, ids, changed, plain, request))


@pytest.mark.parametrize("cut", [-1, 1])
def test_a_text_of_another_length_differs(one_thread, cut: int) -> None:
    ids, request = prompt(9), Request(max_new_tokens=12)
    plain = reference(ids, 13)
    (only,) = judge().differences(0, ids, plain[: 12 + cut], plain[:12], request)
    assert (only.gap, only.tie) == (None, False)


def test_a_text_that_goes_on_behind_its_end_differs(one_thread) -> None:
    ids = prompt(9)
    plain = reference(ids, 12)
    found = judge(eos=[plain[4]]).differences(0, ids, plain, plain[: plain.index(plain[4]) + 1], Request(12))
    assert found
    assert not found[0].tie


def test_unpacked_weights_are_the_same_weights(one_thread, folders) -> None:
    from specdec.loading import load_target

    packed, unpacked = (load_target(folders.target)[0] for _ in range(2))
    unpack(unpacked)
    assert "packed.PlainLinear" in str(type(unpacked.backbone.lm_head))  # type: ignore[attr-defined]
    made = [Decoder(target).generate(prompt(9), max_new_tokens=24).tokens for target in (packed, unpacked)]
    assert made[0] == made[1] == reference(prompt(9), 24)


def test_factors_multiply_to_the_whole() -> None:
    speeds = {HF: 2.0, HF_MODULES: 3.0, UNPACKED: 4.0, "ar": 5.0, "talon": 8.0}
    results = [
        compare.Result(
            name,
            "method" if name == "talon" else "factor",
            {},
            1,
            0,
            speed,
            speed / 5,
            speed / 2,
            True,
            0,
            [],
            None,
            1,
            1,
            0,
            1,
            1,
            {},
        )
        for name, speed in speeds.items()
    ]
    (parts,) = compare.factors(results).values()
    assert parts == {"loop": 1.5, "lean_forward": 4 / 3, "packing": 1.25, "speculation": 1.6, "whole": 4.0}
    assert compare.factors(results[-2:]) == {}
