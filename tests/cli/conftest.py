"""Commands on tiny models: everything runs in this process, with a cache folder of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from oracle.folders import Folders, save_tiny
from transformers.utils import logging
from typer.testing import CliRunner


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds the cost curves of this session."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def specdec(cache: Path, one_thread: None) -> Iterator[Callable]:
    """Runs a command: `specdec("generate", "text", target=...)`; options are given as keywords, repeated as lists."""
    from specdec.cli import app

    runner = CliRunner(env={"XDG_CACHE_HOME": str(cache), "COLUMNS": "200", "TERM": "dumb"})
    verbosity = logging.get_verbosity()

    def run(*arguments: str, input: str | None = None, **options):
        line = [*arguments]
        for name, values in options.items():
            flag = f"--{name.strip('_').replace('_', '-')}"
            for value in values if isinstance(values, list) else [values]:
                line += [flag] if value is True else [flag, str(value)]
        return runner.invoke(app, line, input=input)

    yield run
    logging.set_verbosity(verbosity)
    logging.enable_progress_bar()
