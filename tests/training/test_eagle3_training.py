"""The whole training: it learns, leaves heads that load, resumes exactly, ends when told to."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from specdec.checkpoints.eagle3 import load_eagle3
from specdec.training.data import read_rows
from specdec.training.eagle3 import Eagle3Options, draft_vocabulary, new_head, train_eagle3
from specdec.training.export import export_eagle3, read_curve
from specdec.training.trainer import WarmupStableDecay, training_order


@pytest.fixture(scope="module")
def features(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("features") / "store"


def test_a_run_learns_and_leaves_heads(target, tokenizer, text, features, small_run, tmp_path):
    options = Eagle3Options(
        **vars(small_run) | {"max_steps": 60, "eval_steps": 30, "save_steps": 30, "decay_steps": 20}
    )
    last = train_eagle3(target, tokenizer, text, tmp_path / "run", options, features=features)
    assert last.name == "checkpoint-60"
    curve = read_curve(tmp_path / "run")
    assert [line["step"] for line in curve] == [0, 30, 60]
    assert [line["decaying"] for line in curve] == [False, False, True]
    assert curve[2]["loss"] < curve[1]["loss"]
    assert len(curve[2]["by_step"]) == options.ttt_steps
    assert curve[2]["tau"] >= 1.0
    assert (tmp_path / "run" / "before-decay" / "trainer_state.json").exists()

    shipped = export_eagle3(
        last, tmp_path / "ship", target=target, run=tmp_path / "run", name="tiny", license="apache-2.0"
    )
    assert sorted(path.name for path in shipped.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    assert "lm_head.weight" not in load_file(shipped / "model.safetensors")
    head = load_eagle3(
        shipped,
        embed_tokens=target.get_input_embeddings(),
        lm_head_weight=target.get_output_embeddings().weight,
        target_hidden_size=32,
        vocab_size=61,
    )
    trained = load_file(last / "model.safetensors")
    assert torch.equal(head.fc.weight, trained["fc.weight"].bfloat16().float())
    assert torch.equal(head.lm_head.weight, trained["lm_head.weight"])
    assert json.loads((shipped / "config.json").read_text())["specdec"]["reached"]["step"] == 60
    assert f"{curve[2]['tau']:.3f}" in (shipped / "README.md").read_text()


def test_a_resumed_run_is_the_uninterrupted_run(target, tokenizer, text, features, small_run, tmp_path):
    options = Eagle3Options(**vars(small_run))
    whole = train_eagle3(target, tokenizer, text, tmp_path / "whole", options, features=features)
    resumed = train_eagle3(
        target,
        tokenizer,
        text,
        tmp_path / "resumed",
        options,
        features=features,
        resume=tmp_path / "whole/checkpoint-8",
    )
    assert whole.name == resumed.name == "checkpoint-12"
    expected, found = (load_file(folder / "model.safetensors") for folder in (whole, resumed))
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_the_decay_can_be_asked_for(target, tokenizer, text, features, small_run, tmp_path):
    options = Eagle3Options(**vars(small_run) | {"max_steps": 1000})
    (tmp_path / "decay").touch()
    last = train_eagle3(target, tokenizer, text, tmp_path, options, features=features)
    assert last.name == f"checkpoint-{1 + options.decay_steps}"


def test_a_finished_run_goes_on_from_before_its_decay(target, tokenizer, text, features, small_run, tmp_path):
    """The decay was saved with that checkpoint, so the longer run ended where the first one had."""
    options = vars(small_run)
    first, longer = Eagle3Options(**options), Eagle3Options(**options | {"max_steps": 2 * options["max_steps"]})
    train_eagle3(target, tokenizer, text, tmp_path / "run", first, features=features)
    start = tmp_path / "run/before-decay"
    last = train_eagle3(target, tokenizer, text, tmp_path / "on", longer, features=features, resume=start)
    assert last.name == f"checkpoint-{longer.max_steps}"


def test_schedule():
    schedule = WarmupStableDecay(warmup_steps=4, decay_steps=10, floor=0.1)
    assert [schedule(step) for step in (0, 1, 3, 4, 500)] == [0.25, 0.5, 1.0, 1.0, 1.0]
    schedule.decay_from = 500
    assert schedule(500) == 1.0
    assert schedule(505) == pytest.approx(0.55)
    assert schedule(510) == pytest.approx(0.1)
    assert not schedule.over(509)
    assert schedule.over(510)


def test_a_new_head_starts_at_the_target(target, tokenizer, text):
    rows = read_rows(text, tokenizer)
    ids = draft_vocabulary(rows, 40, always=[2])
    assert len(ids) == 40
    assert 2 in ids
    assert bool((ids[1:] > ids[:-1]).all())
    head = new_head(target, ids, num_features=3)
    assert torch.equal(head.target_ids(torch.arange(40)), ids)
    assert torch.equal(head.t2d.nonzero()[:, 0], ids)
    assert torch.equal(head.lm_head.weight, target.lm_head.weight[ids])
    assert head.embed_tokens is target.get_input_embeddings()
    assert not any("embed_tokens" in name for name in head.state_dict())
    assert torch.equal(head.midlayer.mlp.up_proj.weight, target.model.layers[-1].mlp.up_proj.weight)


def test_rows_are_added_pass_by_pass_greedy_ones_first(tokenizer, text):
    rows = read_rows(text, tokenizer)
    training = [index for index in range(len(rows)) if len(rows[index].ids) > 8]
    options = Eagle3Options(first_rows=8, more_rows=8, batch_size=4, max_steps=2 + 4 + 6)
    order = training_order(rows, training, options)
    passes = order[:8], order[8:24], order[24:48]
    assert [len(set(part)) for part in passes] == [8, 16, 24]
    assert set(passes[0]) < set(passes[1]) < set(passes[2])
    assert all(rows[index].greedy for index in passes[0])
    assert order == training_order(rows, training, options)


def test_bad_options_are_named_together():
    with pytest.raises(ValueError, match=r"batch_size is -1.*ttt_steps is 0.*chain_fraction is 2"):
        Eagle3Options(ttt_steps=0, batch_size=-1, chain_fraction=2)


def test_disk_limit(target, tokenizer, text, small_run, tmp_path):
    with pytest.raises(ValueError, match=r"max_disk_gb = 1e-06"):
        train_eagle3(target, tokenizer, text, tmp_path, Eagle3Options(**vars(small_run), max_disk_gb=1e-6))
