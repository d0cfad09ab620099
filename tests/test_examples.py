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
from specdec.loading import PRESETS, Preset

EXAMPLES = sorted((Path(__file__).resolve().parents[1] / "docs" / "examples").glob("*.py"))
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
    monkeypatch.setitem(PRESETS, "smollm2", Preset("a stand-in", lambda: folders.target, lambda: folders.draft))
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


def test_a_growth_policy_is_short() -> None:
    """What the README promises: a new policy costs one file of under 60 lines."""
    (path,) = (path for path in EXAMPLES if path.stem == "custom_growth")
    assert len(path.read_text().splitlines()) < 60
