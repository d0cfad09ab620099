"""bench/gpu_check.py on a CPU: every op against its reference, and stages that fail or hang."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch

BENCH = Path(__file__).resolve().parents[1] / "bench"


@pytest.fixture(scope="module")
def gpu_check():
    sys.path.insert(0, str(BENCH))
    yield importlib.import_module("gpu_check")
    sys.path.remove(str(BENCH))


OPS = (
    "confidence_gate",
    "topk_logprobs",
    "margin_scan",
    "trust_walk",
    "sample_tokens",
    "verify_walk",
    "rejection_walk",
    "kv_commit",
    "tree_attention",
    "merge_attention",
)


def test_no_op_is_forgotten(gpu_check) -> None:
    import gpu_ops
    from specdec_kernels import aot

    assert gpu_check.OPS == OPS == tuple(gpu_ops.OPS)
    assert set(aot.OPS) <= set(OPS)


@pytest.mark.parametrize("op", OPS)
def test_every_op_is_right(gpu_check, one_thread, op: str) -> None:
    assert gpu_check.check_op(op, "cpu")["checked"]


@pytest.mark.parametrize("what", ["wrong", "restless"])
def test_a_wrong_op_is_found(gpu_check, monkeypatch, one_thread, what: str) -> None:
    import gpu_ops

    calls = []

    def broken(*tree):
        calls.append(1)
        path, length, bonus = gpu_ops.verify_walk(*tree)
        return path, length, bonus + (1 if what == "wrong" else len(calls) == 3)

    job = next(gpu_ops.jobs("verify_walk"))
    monkeypatch.setitem(
        gpu_ops.OPS,
        "verify_walk",
        lambda large: iter([gpu_ops.Job("broken", broken, job.definition, job.inputs, 1)]),
    )
    with pytest.raises(AssertionError, match="1 of 1 integers differ" if what == "wrong" else "run to run"):
        gpu_check.check_op("verify_walk", "cpu")


def test_stages_fail_and_hang_by_themselves(gpu_check, tmp_path, monkeypatch, capsys) -> None:
    scripts = {
        "environment": "import json, sys; json.dump({'torch': 'x'}, open(sys.argv[1], 'w'))",
        "op:kv_commit": "import time; time.sleep(60)",
        "op:verify_walk": "raise AssertionError('all wrong')",
    }
    monkeypatch.setitem(gpu_check.LIMITS, "op", 0.1)
    out = tmp_path / "results" / "gpu-test.json"
    stages = [*scripts, "floor"]
    code = gpu_check.main("cpu", out, stages, lambda stage: [sys.executable, "-c", scripts[stage]])
    assert code == 1
    found = json.loads(out.read_text())
    assert found["name"] == "gpu-test"
    assert found["date"]
    told = {stage: done["status"] for stage, done in found["stages"].items()}
    assert told == {
        "environment": "ok",
        "op:verify_walk": "failed",
        "op:kv_commit": "stopped after 1 s",
        "floor": "skipped: needs a CUDA device",
    }
    assert "all wrong" in found["stages"]["op:verify_walk"]["error"]
    assert found["stages"]["environment"]["found"] == {"torch": "x"}
    assert "all wrong" in capsys.readouterr().out


def test_a_stage_from_a_plain_checkout(gpu_check, tmp_path) -> None:
    out = tmp_path / "gpu.json"
    assert gpu_check.main("cpu", out, ["environment"]) == 0
    assert json.loads(out.read_text())["stages"]["environment"]["found"]["torch"] == torch.__version__
