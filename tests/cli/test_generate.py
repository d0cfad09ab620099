from __future__ import annotations

import json

import pytest
from oracle.folders import CHARACTERS, CHAT, character_tokenizer
from oracle.models import tiny

from specdec.evaluation.exactness import greedy_reference


def plain(text: str, new: int) -> str:
    """What plain transformers makes of it."""
    ids = [CHARACTERS.index(character) for character in text]
    return "".join(CHARACTERS[i] for i in greedy_reference(tiny(), ids, new))


CHATTED = "user: hello\nassistant: "


@pytest.mark.parametrize("method", ["ar", "sd", "eagle3", "talon"])
def test_text_is_plain_decodings(specdec, folders, method: str) -> None:
    done = specdec("generate", "hello", target=folders.target, draft=folders.draft, method=method, max_new_tokens=24)
    assert done.exit_code == 0, done.output
    assert done.stdout == plain(CHATTED, 24) + "\n"
    assert f"{method}: 24 tokens (length), tau" in done.stderr


def test_a_head_drafts_too(specdec, folders) -> None:
    done = specdec("generate", "hello", target=folders.target, draft=folders.head, max_new_tokens=24)
    assert done.stdout == plain(CHATTED, 24) + "\n", done.output


def test_raw_leaves_the_template_out(specdec, folders) -> None:
    done = specdec("generate", "hello", "--raw", target=folders.target, method="ar", max_new_tokens=8)
    assert done.stdout == plain("hello", 8) + "\n"


@pytest.mark.parametrize("arguments", [("generate", "-"), ("generate",)])
def test_prompt_from_standard_input(specdec, folders, arguments) -> None:
    done = specdec(*arguments, input="hello\n", target=folders.target, method="ar", max_new_tokens=8)
    assert done.stdout == plain(CHATTED, 8) + "\n"


def test_json_is_one_object(specdec, folders) -> None:
    done = specdec("generate", "hello", "--json", target=folders.target, draft=folders.draft, max_new_tokens=24)
    assert done.stdout.count("\n") == 1
    told = json.loads(done.stdout)
    assert told["text"] == plain(CHATTED, 24)
    assert told["finish_reason"] == "length"
    assert told["exact"] is True
    assert told["summary"]["tokens"] == 24
    assert done.stderr == ""


def test_color_marks_accepted_tokens_and_nothing_else(specdec, folders) -> None:
    done = specdec("generate", "hello", "--color", target=folders.target, draft=folders.draft, max_new_tokens=24)
    green, reset = "\x1b[32m", "\x1b[0m"
    assert done.stdout.replace(green, "").replace(reset, "") == plain(CHATTED, 24) + "\n"
    marked = sum(len(part.split(reset)[0]) for part in done.stdout.split(green)[1:])
    tau = 23 / (23 - marked)  # the prefill gives one token, each round its accepted ones and one of the verifier's own
    assert f"tau {tau:.2f}" in done.stderr
    assert marked > 0


def test_stop_and_options_of_the_method(specdec, folders) -> None:
    text = plain(CHATTED, 24)
    done = specdec(
        "generate",
        "hello",
        "--json",
        target=folders.target,
        draft=folders.draft,
        stop=text[5:7],
        set=["budget=4", "mu=1"],
    )
    told = json.loads(done.stdout)
    assert told["text"] == text[:7]
    assert told["finish_reason"] == "stop"
    assert told["summary"]["mean_nodes"] <= 4


def test_a_seed_decides_the_text_whatever_the_method(specdec, folders) -> None:
    law = {"target": folders.target, "draft": folders.draft, "max_new_tokens": 24, "temperature": 1, "top_k": 20}
    ar, talon, other = (
        specdec("generate", "hello", method=method, seed=seed, **law).stdout
        for method, seed in (("ar", 1), ("talon", 1), ("talon", 2))
    )
    assert ar == talon != other


def test_the_tokenizer_and_the_template_are_what_the_tests_think(folders) -> None:
    tokenizer = character_tokenizer()
    text = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False)
    assert text == CHATTED
    assert CHAT in tokenizer.chat_template
    assert tokenizer.decode(tokenizer("a  b\n")["input_ids"]) == "a  b\n"
