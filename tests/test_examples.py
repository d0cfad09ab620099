"""The code of the documents, run: on a tiny model that takes the preset's name, and on the preset itself."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from oracle.folders import save_tiny

from specdec.checkpoints.smollm2 import smollm2_folder
from specdec.evaluation.exactness import greedy_reference, random_draft, random_target
from specdec.loading import PRESETS, Preset

FOLDER = Path(__file__).resolve().parents[1] / "examples"
FOREIGN = FOLDER / "foreign_decoder.py"  # takes arguments, so it has tests of its own
EXAMPLES = sorted(set(FOLDER.glob("*.py")) - {FOREIGN})
SHOWN = {
    "quickstart.py": "lossless: True",
    "stream.py": "target passes",
    "batch.py": "Name three rivers in Europe.",
    "custom_growth.py": "the same text as talon's: True",
}


def test_every_example_is_run() -> None:
    assert [path.name for path in EXAMPLES] == sorted(SHOWN)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_on_a_tiny_model(path: Path, one_thread, monkeypatch, tmp_path, capsys) -> None:
    folders = save_tiny(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setitem(PRESETS, "smollm2", Preset("a stand-in", lambda: folders.target, {"lm": lambda: folders.draft}))
    capsys.readouterr()
    runpy.run_path(str(path), run_name="__main__")
    assert SHOWN[path.name] in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_on_the_preset(path: Path) -> None:
    try:
        smollm2_folder()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=280, env=os.environ)
    assert done.returncode == 0, done.stderr
    assert SHOWN[path.name] in done.stdout


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_decoder_that_is_not_ours(family: str, one_thread) -> None:
    """The ops alone make a TALON decoder, whose text is that of transformers' generate."""
    foreign = runpy.run_path(str(FOREIGN))
    model = random_target(family)
    prompt = [3, 5, 8, 1]
    expected = greedy_reference(model, prompt, 40)
    pair = [foreign["CachedLM"](one, entries=128) for one in (model, random_draft(model, 1))]
    ids, passes = foreign["generate"](*pair, prompt, 40)
    assert ids == expected
    assert passes < 30


def test_a_decoder_that_is_not_ours_is_short_and_knows_nothing_of_specdec(tmp_path) -> None:
    source = FOREIGN.read_text()
    assert len(source.splitlines()) < 80
    assert "specdec" not in source.replace("specdec_kernels", "").replace("not specdec's", "")
    folders = save_tiny(tmp_path)
    command = [sys.executable, str(FOREIGN), str(folders.target), str(folders.draft), "abc"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "passes of the target" in done.stdout


def test_a_growth_policy_is_short() -> None:
    """What the README promises: a new policy costs one file of under 60 lines."""
    (path,) = (path for path in EXAMPLES if path.stem == "custom_growth")
    assert len(path.read_text().splitlines()) < 60
