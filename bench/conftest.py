"""The real model for all benches, and a line of findings for each behind the table."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from transformers import AutoModelForCausalLM

import specdec
from specdec.evaluation.setting import machine
from specdec.models.lm import CausalLM

_FINDINGS: list[str] = []


@pytest.fixture(scope="session")
def talon() -> specdec.Decoder:
    try:
        return specdec.load("smollm2", method="talon")
    except (FileNotFoundError, ValueError) as error:
        _FINDINGS.append(f"skipped, as smollm2 is not here: {error}")
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def targets(talon: specdec.Decoder) -> dict[str, CausalLM]:
    """The same weights through the lean forward and through transformers' modules."""
    model = AutoModelForCausalLM.from_pretrained(specdec.PRESETS["smollm2"].target(), dtype=torch.float32).eval()
    return {"lean": talon.target, "transformers": CausalLM(model)}


@pytest.fixture
def finding(request: pytest.FixtureRequest, benchmark) -> Iterator[dict]:
    """What a bench found besides its time; also in the JSON of `--benchmark-json`."""
    yield benchmark.extra_info
    told = [
        f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in benchmark.extra_info.items()
    ]
    if told:
        _FINDINGS.append(f"{request.node.name}: {', '.join(told)}")


def pytest_terminal_summary(terminalreporter) -> None:
    if _FINDINGS:
        terminalreporter.section("findings")
        terminalreporter.write_line(", ".join(f"{name} {value}" for name, value in machine().items()))
        for line in _FINDINGS:
            terminalreporter.write_line(line)
