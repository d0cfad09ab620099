"""What a user did wrong is one clear message on standard error and exit code 2, without a traceback."""

from __future__ import annotations

import shutil

import pytest
import torch
from oracle.folders import CHARACTERS, character_tokenizer
from oracle.models import TAPS, tiny, tiny_head
from safetensors.torch import load_file, save_file
from transformers import AddedToken

from specdec.checkpoints.eagle3 import save_eagle3
from specdec.evaluation.exactness import random_head, random_target
from specdec.methods import METHODS, Method


def refused(done, *parts: str) -> None:
    """Exit code 2, nothing on standard output, one message that holds the parts."""
    assert done.exit_code == 2, done.output
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith(("Error: ", "Usage: "))
    for part in parts:
        assert part in done.stderr


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"max_new_tokens": 0}, ["--max-new-tokens is 0; expected at least 1"]),
        ({"temperature": -1}, ["temperature is -1.0; expected a finite number >= 0"]),
        ({"top_p": 0}, ["top_p is 0.0; expected a number in (0, 1]"]),
        ({"method": "talom"}, ["unknown method 'talom'; there are ar, sd, eagle3, talon"]),
        ({"set": "mux=1"}, ["method 'talon' has no option 'mux'; its options: budget, mu, top_k"]),
        ({"set": "mu"}, ["--set mu: expected key=value"]),
        ({"set": "mu=2"}, ["talon: mu is 2.0; expected a number in (0, 1]"]),
        ({"set": "budget=many"}, ["talon: budget is 'many'; expected int"]),
        ({"set": "budget=true"}, ["talon: budget is 'true'; expected int"]),
        ({"set": "max_depth=1.5"}, ["talon: max_depth is '1.5'; expected int | None"]),
        ({"draft": "no/such/folder"}, ["the draft 'no/such/folder' is neither a folder here nor a Hub id"]),
        ({"draft": None}, ["method 'talon' needs an EAGLE-3 head or a smaller model; give draft="]),
        ({"target": "/no/such/folder"}, ["the target '/no/such/folder' is neither a folder here nor a Hub id"]),
        ({"device": "gpu"}, ["device is 'gpu'; expected 'cpu', 'cuda'"]),
        ({"device": "meta"}, ["device is 'meta', which computes nothing; use 'cpu' or 'cuda'"]),
        pytest.param(
            {"device": "mps"},
            ["device is 'mps', which this torch cannot use; use 'cpu' or 'cuda'"],
            marks=pytest.mark.skipif(torch.backends.mps.is_available(), reason="this torch can use it"),
        ),
        ({"draft": ""}, ["the draft is ''; expected a folder or a Hub id (owner/name)"]),
        ({"target": ""}, ["the target is ''; expected a folder or a Hub id (owner/name)"]),
        ({"dtype": "int8"}, ["dtype is 'int8'; expected 'auto', 'float32'"]),
        ({"seed": "x"}, ["Invalid value for '--seed'"]),
    ],
    ids=lambda value: "-".join(map(str, next(iter(value.items())))) if isinstance(value, dict) else "",
)
def test_bad_options(specdec, folders, options: dict, parts: list[str]) -> None:
    given = {"target": folders.target, "draft": folders.draft, **options}
    refused(specdec("generate", "hello", **{name: value for name, value in given.items() if value is not None}), *parts)


def test_bad_options_arrive_together(specdec, folders) -> None:
    done = specdec("generate", "", target=folders.target, method="ar", max_new_tokens=-3, top_k=-1)
    refused(done, "the prompt is empty", "top_k is -1", "--max-new-tokens is -3")


@pytest.mark.parametrize("text", ["", "  ", "\n"])
@pytest.mark.parametrize("by", ["argument", "stdin"])
def test_empty_prompt(specdec, folders, text: str, by: str) -> None:
    arguments = (text,) if by == "argument" else ("-",)
    refused(specdec("generate", *arguments, input=text, target=folders.target, method="ar"), "the prompt is empty")


def test_prompt_beyond_the_context(specdec, folders) -> None:
    done = specdec("generate", "x" * 300, "--raw", target=folders.target, method="ar")
    refused(done, "the prompt has 300 tokens, but the target's context is 256; shorten it")


def test_folder_without_a_model(specdec, tmp_path) -> None:
    refused(specdec("generate", "hello", target=tmp_path, method="ar"), f"the target '{tmp_path}' could not be loaded")


def test_folder_without_a_tokenizer(specdec, tmp_path) -> None:
    tiny().save_pretrained(tmp_path)
    refused(specdec("generate", "hello", target=tmp_path, method="ar"), f"no tokenizer in '{tmp_path}'")


def test_draft_without_a_tokenizer(specdec, folders, tmp_path) -> None:
    tiny().save_pretrained(tmp_path)
    done = specdec("generate", "hello", target=folders.target, draft=tmp_path)
    refused(done, f"no tokenizer in '{tmp_path}'", "a draft's tokenizer is only compared with the target's")
    assert "tokenizer=..." not in done.stderr


@pytest.mark.parametrize("role", ["target", "draft"])
def test_missing_tensors(specdec, folders, tmp_path, role: str) -> None:
    shutil.copytree(getattr(folders, role), tmp_path, dirs_exist_ok=True)
    path = tmp_path / "model.safetensors"
    state = {name: tensor for name, tensor in load_file(path).items() if "layers.0.mlp" not in name}
    save_file(state, path, {"format": "pt"})
    done = specdec("generate", "hello", **{"target": folders.target, "draft": folders.draft, role: tmp_path})
    refused(done, f"the {role} '{tmp_path}' lacks model.layers.0.mlp.down_proj.weight", "it would write nonsense")


@pytest.mark.parametrize("command", [("generate", "hello"), ("compare",)], ids=["generate", "compare"])
@pytest.mark.parametrize("role", ["target", "draft", "head"])
def test_damaged_weights(specdec, folders, tmp_path, command: tuple[str, ...], role: str) -> None:
    shutil.copytree(getattr(folders, role), tmp_path, dirs_exist_ok=True)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:3000])
    given = {"target": folders.target, "draft": folders.draft, "draft" if role == "head" else role: tmp_path}
    refused(specdec(*command, **given), f"{path} is damaged or no weights file", "download or copy it again")


def test_head_as_the_target(specdec, folders) -> None:
    done = specdec("generate", "hello", target=folders.head, method="ar")
    refused(done, f"the target '{folders.head}' is an EAGLE-3 head, which only drafts; give it as the draft")


def test_another_models_tokenizer(specdec, tmp_path) -> None:
    tokenizer = character_tokenizer()
    tokenizer.add_tokens([AddedToken("hello")])
    tiny().save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    done = specdec("generate", "hello", target=tmp_path, method="ar")
    refused(done, f"holds the id {len(CHARACTERS)}", "vocabulary has 97 entries", "another model's tokenizer")


def test_draft_model_of_another_vocabulary(specdec, folders, tmp_path) -> None:
    random_target("llama", vocab_size=90).save_pretrained(tmp_path)
    character_tokenizer().save_pretrained(tmp_path)
    done = specdec("generate", "hello", target=folders.target, draft=tmp_path)
    refused(done, "the draft's vocabulary has 90 entries, the target's 97; they have to share a tokenizer")


def test_draft_model_with_another_tokenizer(specdec, folders, tmp_path) -> None:
    tiny().save_pretrained(tmp_path)
    tokenizer = character_tokenizer()
    tokenizer.add_tokens([AddedToken("hello")])
    tokenizer.save_pretrained(tmp_path)
    done = specdec("generate", "hello", target=folders.target, draft=tmp_path)
    refused(done, "different tokenizers (97 and 98 tokens): 'hello' is id None of the target and 97 of the draft")


def test_head_of_another_vocabulary(specdec, folders, tmp_path) -> None:
    save_eagle3(random_head(random_target("llama", vocab_size=90)), tmp_path, extra={"taps": TAPS})
    refused(specdec("generate", "hello", target=folders.target, draft=tmp_path), "90", "97")


def test_head_of_another_width(specdec, folders, tmp_path) -> None:
    save_eagle3(random_head(random_target("llama", hidden_size=32)), tmp_path, extra={"taps": TAPS})
    refused(specdec("generate", "hello", target=folders.target, draft=tmp_path), "an fc of 96 inputs", "64 wide")


def test_head_without_weights(specdec, folders, tmp_path) -> None:
    save_eagle3(tiny_head(), tmp_path, extra={"taps": TAPS})
    (tmp_path / "model.safetensors").unlink()
    done = specdec("generate", "hello", target=folders.target, draft=tmp_path)
    refused(done, f"neither model.safetensors nor pytorch_model.bin in {tmp_path}")


def test_exact_refuses_what_is_not_lossless(specdec, folders, monkeypatch) -> None:
    monkeypatch.setitem(METHODS, "sloppy", Method("sloppy", "guesses", lossless=False))
    done = specdec("generate", "hello", "--exact", target=folders.target, method="sloppy")
    refused(done, "exact=True refuses method 'sloppy', which is not lossless")


def test_logits_that_are_no_numbers(specdec, tmp_path) -> None:
    model = random_target("llama")
    model.lm_head.weight[:] = float("nan")
    model.save_pretrained(tmp_path)
    character_tokenizer().save_pretrained(tmp_path)
    refused(specdec("generate", "hello", target=tmp_path, method="ar"), "no finite maximum", "Check the weights")


def test_missing_python_package(specdec, folders, monkeypatch) -> None:
    import specdec as package

    def load(*_, **__):
        raise ModuleNotFoundError("No module named 'gguf'", name="gguf")

    monkeypatch.setattr(package, "load", load, raising=False)
    refused(
        specdec("generate", "hello", method="ar"), "'gguf' is not installed; run: pip install 'specdec-kernels[demo]'"
    )


def test_a_bug_keeps_its_traceback(specdec, folders, monkeypatch) -> None:
    import specdec as package

    def load(*_, **__):
        raise TypeError("ours")

    monkeypatch.setattr(package, "load", load, raising=False)
    assert isinstance(specdec("generate", "hello", method="ar").exception, TypeError)


def test_traceback_can_be_asked_for(specdec, folders) -> None:
    done = specdec("--traceback", "generate", "hello", target="/no/such/folder", method="ar")
    assert isinstance(done.exception, ValueError)


def test_interrupted(specdec, folders, monkeypatch) -> None:
    import specdec as package

    def load(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(package, "load", load, raising=False)
    done = specdec("generate", "hello", method="ar")
    assert (done.exit_code, done.output) == (130, "")


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"methods": "ar,talom"}, ["unknown method 'talom'"]),
        ({"methods": ","}, ["--methods is empty"]),
        ({"set": "mu=1"}, ["--set mu=1: expected method.key=value for one of ar, sd, eagle3, talon"]),
        ({"set": "talon.mux=1"}, ["method 'talon' has no option 'mux'"]),
        ({"max_new_tokens": 1}, ["--max-new-tokens is 1; expected at least 2"]),
        ({"limit": 0}, ["no prompt in", "with limit 0"]),
        ({"prompts": "/no/such/file.jsonl"}, ["there is no file /no/such/file.jsonl; expected JSON lines"]),
        ({"draft": None}, ["method 'sd' needs a smaller model or an EAGLE-3 head"]),
    ],
    ids=lambda value: "-".join(map(str, next(iter(value.items())))) if isinstance(value, dict) else "",
)
def test_bad_comparisons(specdec, folders, options: dict, parts: list[str]) -> None:
    given = {"target": folders.target, "draft": folders.draft, **options}
    refused(specdec("compare", **{name: value for name, value in given.items() if value is not None}), *parts)


@pytest.mark.parametrize("line", ["not json", '{"text": "hello"}', '{"turns": []}', '{"prompt": ""}', "[1]"])
def test_bad_line_of_a_prompt_file(specdec, folders, tmp_path, line: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(f'{{"prompt": "hello"}}\n{line}\n')
    refused(specdec("compare", target=folders.target, methods="ar", prompts=path), f"{path}:2: expected", line)
