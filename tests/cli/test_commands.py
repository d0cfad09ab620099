"""Help, version, methods, doctor, train."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

import specdec as package
from specdec.cli import diagnosis
from specdec.methods import METHODS
from specdec.training.data import DataOptions
from specdec.training.eagle3 import Eagle3Options

ROOT = Path(__file__).resolve().parents[2]


def test_help_does_not_wait_for_torch() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from specdec.cli import app\n"
        "names = 'generate', 'compare', 'methods', 'doctor', 'train', 'train eagle3', 'bench', 'bench margin'\n"
        "for line in ([], *map(str.split, names)):\n"
        "    done = CliRunner().invoke(app, [*line, '--help'])\n"
        "    assert done.exit_code == 0 and 'Usage' in done.output, done.output\n"
        "print(*({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr


def test_version(specdec) -> None:
    assert specdec("--version").stdout == f"specdec {package.__version__}\n"


def test_unknown_command(specdec) -> None:
    assert specdec("generat").exit_code == 2


def test_methods_come_from_the_registry(specdec) -> None:
    told = json.loads(specdec("methods", "--json").stdout)
    assert list(told) == list(METHODS)
    assert told["talon"]["options"]["mu"] == 0.03
    assert told["talon"]["lossless"] is True
    shown = specdec("methods").stdout
    assert all(re.search(rf"^{name}\s", shown, re.MULTILINE) for name in METHODS)


def test_doctor_explains(specdec, folders) -> None:
    done = specdec("doctor", "--json", target=folders.target, draft=folders.head)
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert told["problems"] == []
    assert told["target"]["device"] == "cpu"
    assert told["target"]["forward"].startswith("lean")
    assert told["target"]["dtype"].startswith("float32")
    assert "Eagle3Drafter" in told["draft"]["draft"]
    assert told["cost"]["verify_ms"]["1"] > 0 < told["cost"]["draft_ms"]
    assert told["cost"]["plan"]["budget"] >= 2
    assert f"budget={4 * told['cost']['plan']['budget']}" in told["methods"]["talon"], "the floors end it, N caps it"
    shown = specdec("doctor", target=folders.target, draft=folders.head).stdout
    for word in ("torch", "lean", "T(n), ms", "T(n) / T(1)", "nodes with the root", "Talon(budget="):
        assert word in shown


def test_doctor_measures_again_when_asked(specdec, folders, monkeypatch) -> None:
    target = {"target": folders.target, "draft": folders.draft}
    path = Path(json.loads(specdec("doctor", "--json", **target).stdout)["cost"]["file"])
    stored = json.loads(path.read_text())
    path.write_text(json.dumps({**stored, "draft": 123.0}))
    assert json.loads(specdec("doctor", "--json", **target).stdout)["cost"]["draft_ms"] == 123_000
    assert json.loads(specdec("doctor", "--json", "--remeasure", **target).stdout)["cost"]["draft_ms"] < 123_000


def test_doctor_on_a_target_that_does_not_load(specdec) -> None:
    done = specdec("doctor", target="/no/such/folder")
    assert done.exit_code == 1
    assert "problem: the target '/no/such/folder' is neither a folder here nor a Hub id" in done.stdout
    assert "torch" in done.stdout


def test_doctor_without_a_draft(specdec, folders) -> None:
    told = json.loads(specdec("doctor", "--json", target=folders.target).stdout)
    assert list(told["methods"]) == ["ar"]


@pytest.mark.parametrize(
    ("here", "warned"), [("2.13.0", 0), ("2.13.1+cpu", 0), ("2.14.0.dev1", 1), ("3.0", 1), (None, 0)]
)
def test_doctor_warns_beyond_the_tested_versions(monkeypatch, here: str | None, warned: int) -> None:
    monkeypatch.setattr(diagnosis, "_version", lambda name: here if name == "torch" else None)
    assert len(diagnosis._warnings()) == warned


def test_tested_versions_are_those_of_the_constraints() -> None:
    pins = re.findall(r"^([\w-]+)==([\w.]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    first = dict(reversed(pins))  # where a pin depends on the Python, the first line is the newest
    assert {name: first[name] for name in diagnosis.TESTED} == diagnosis.TESTED


@pytest.mark.parametrize(("command", "options"), [("data", DataOptions), ("eagle3", Eagle3Options)])
def test_train_has_every_option_with_its_sentence(specdec, command: str, options: type) -> None:
    shown = " ".join(specdec("train", command, "--help").stdout.split())
    for field in fields(options):
        assert f"--{field.name.replace('_', '-')}" in shown
    assert "target" in shown
    first = {"data": "Longest answer", "eagle3": "How many ids the head can predict"}
    assert first[command] in shown


def test_train_hands_the_options_on(specdec, folders, tmp_path, monkeypatch) -> None:
    from specdec.training import data, eagle3

    seen = []
    monkeypatch.setattr(data, "generate_data", lambda *given: seen.append(given))
    file = tmp_path / "file.jsonl"
    file.touch()
    done = specdec("train", "data", target=folders.target, prompts=file, out="a", temperatures=[0, 0.5], limit=3)
    assert done.exit_code == 0, done.output
    model, _tokenizer, prompts, out, options = seen.pop()
    assert (type(model).__name__, prompts, out) == ("LlamaForCausalLM", file, Path("a"))
    assert options == DataOptions(temperatures=(0.0, 0.5), limit=3)
    monkeypatch.setattr(
        eagle3, "train_eagle3", lambda *given, **named: seen.append((*given, named)) or "out/checkpoint-1"
    )
    done = specdec("train", "eagle3", "--no-resume", target=folders.target, data=file, out="out", minutes=1.5, seed=7)
    assert done.stdout == "out/checkpoint-1\n", done.output
    *_, options, named = seen.pop()
    assert options == Eagle3Options(minutes=1.5, seed=7)
    assert named == {"features": None, "resume": False}


def test_train_refuses_bad_options(specdec, folders, tmp_path) -> None:
    file = tmp_path / "file.jsonl"
    done = specdec("train", "data", target=folders.target, prompts=file, out=tmp_path / "a")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "file.jsonl' does not exist" in " ".join(done.stderr.split())
    file.touch()
    done = specdec("train", "data", target=folders.target, prompts=file, out=tmp_path / "a", batch_size=0)
    assert (done.exit_code, done.stdout) == (2, "")
    assert "batch_size is 0, expected at least 1" in done.stderr
