"""Training text: the target's own answers, resumable, and a held-out part along which acceptance is exact."""

import json
from pathlib import Path

import pytest
import torch

from specdec.training.data import DataOptions, generate_data, read_prompts, read_rows, split_heldout


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_answers_are_the_targets_own(target, tokenizer, text):
    """Greedy answers equal plain generation without a batch, and end with the stop id or at the limit."""
    items = lines(text)
    assert len(items) == 32
    assert {item["temperature"] for item in items} == {0.0, 0.7}
    assert [item["temperature"] for item in items] == [0.0] * 8 + [0.7] * 8 + [0.0] * 8 + [0.7] * 8
    for item in items[:3] + items[16:18]:
        prompt = tokenizer.apply_chat_template([{"role": "user", "content": item["prompt"]}])["input_ids"]
        ids = torch.tensor([prompt])
        made = target.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False)
        assert item["response_ids"] == made[0, len(prompt) :].tolist()
    for item in items:
        assert len(item["response_ids"]) == 24 or item["response_ids"][-1] == 2
        assert 2 not in item["response_ids"][:-1]


def test_an_interrupted_file_is_completed(target, tokenizer, text, tmp_path):
    """A whole batch stays, half a batch and half a line are done again; the result is the uninterrupted file."""
    prompts, out = text.parent / "prompts.jsonl", tmp_path / "answers.jsonl"
    whole = text.read_text().splitlines(keepends=True)
    out.write_text("".join(whole[:19]) + whole[19][:10])
    generate_data(target, tokenizer, prompts, out, DataOptions(max_new_tokens=24, batch_size=8))
    assert out.read_text() == text.read_text()


def test_a_file_of_other_answers_is_refused(target, tokenizer, text, tmp_path):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "another"}\n')
    with pytest.raises(ValueError, match=r"answers other prompts \('.*' where 'another' is due\)"):
        generate_data(target, tokenizer, tmp_path / "prompts.jsonl", text)


def test_prompt_files(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a", "kind": "x"}\n\n{"turns": ["b", "c"], "task": "y"}\n')
    assert read_prompts(path) == [{"prompt": "a", "kind": "x"}, {"prompt": "b", "kind": "y"}]
    path.write_text('{"prompt": "a"}\n{"question": "b"}\n')
    with pytest.raises(ValueError, match=r"prompts.jsonl:2 has neither prompt nor turns; it has question"):
        read_prompts(path)


def test_rows(text, tokenizer, tmp_path):
    row = read_rows(text, tokenizer)[0]
    item = lines(text)[0]
    assert row.ids[row.prompt_length :].tolist() == item["response_ids"]
    assert row.greedy
    assert row.kind == "a"
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a"}\n')
    with pytest.raises(ValueError, match=r"bad.jsonl:1 lacks response_ids; it has prompt"):
        read_rows(tmp_path / "bad.jsonl", tokenizer)
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"empty\.jsonl is empty"):
        read_rows(tmp_path / "empty.jsonl", tokenizer)


def test_the_heldout_part_is_greedy_and_of_every_kind(text, tokenizer):
    rows = read_rows(text, tokenizer)
    training, heldout = split_heldout(rows, 3, seed=0)
    assert sorted(training + heldout) == list(range(32))
    assert not set(training) & set(heldout)
    assert {rows[index].kind for index in heldout} == set("abc")
    assert all(rows[index].greedy for index in heldout)
    assert (training, heldout) == split_heldout(rows, 3, seed=0) != split_heldout(rows, 3, seed=1)
    with pytest.raises(ValueError, match=r"40 held-out rows asked for, but only \d+ are greedy"):
        split_heldout(rows, 40, seed=0)


def test_bad_options_are_named_together():
    with pytest.raises(ValueError, match=r"max_new_tokens is 0.*batch_size is 0.*temperatures are \(\)"):
        DataOptions(max_new_tokens=0, batch_size=0, temperatures=())
