"""Every kernel compiles for every target, spills nothing, and takes no more than the table that the docs show."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import triton
from specdec_kernels import aot

TABLE = Path(__file__).parents[2] / "bench/results/kernel_resources.json"
VARIANTS = {variant.name: variant for variant in aot.variants()}
QUICK = ("sm_90",)  # the others are in `make test-slow`


@pytest.mark.parametrize("target", [t if t in QUICK else pytest.param(t, marks=pytest.mark.slow) for t in aot.TARGETS])
@pytest.mark.parametrize("name", VARIANTS)
def test_resources(name: str, target: str) -> None:
    found = aot.resources(aot.compile_for(VARIANTS[name], target))
    if target.startswith("sm"):
        assert found.spills == 0
    if VARIANTS[name].wide_loads:
        assert found.wide_loads > 0
    assert found.shared <= {"sm_80": 163, "sm_120": 99, "gfx942": 64}.get(target, 227) * 1024
    tables = json.loads(TABLE.read_text())
    if triton.__version__ in tables:
        tables = {triton.__version__: tables[triton.__version__]}
    known = [table[name][target] for table in tables.values() if target in table.get(name, {})]
    assert known, f"{name} on {target} is not in {TABLE.name}; write it with `make kernel-table`"
    limit = 1.1 * max(entry["registers"] for entry in known) + 4
    assert found.registers <= limit, f"{asdict(found)} where {TABLE.name} has {known}"
