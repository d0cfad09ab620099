"""Everything that only a GPU can show, in stages: PYTHONPATH=.:kernels python bench/gpu_check.py --name h200

Needs torch and triton; the last stage also transformers. Each stage is a process with a time limit of its own, so that
one that hangs costs no more than that. First correctness: every op against its reference in fp32, fp16 and bf16, the
same result from run to run, and in a CUDA graph whose inputs change between replays. Then times. All found so far is in
bench/results/gpu-<name>.json after every stage. `--device cpu` runs the stages that need no GPU.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels"), str(Path(__file__).parent)]

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
# Seconds on a GPU machine. An op's include the compilation of its kernels; all ops together have KERNELS. Nothing is
# paid by the minute on a CPU, which may be busy: there each has ten times as long.
LIMITS = {"environment": 60, "op": 60, "floor": 60, "ops_times": 90, "tree_build": 90, "margin": 60, "attention": 120}
LIMITS["end_to_end"] = 90
KERNELS = 240
NEED_CUDA = ("floor", "ops_times", "tree_build", "margin", "attention")


def stages(names: Sequence[str]) -> list[str]:
    every = ["environment", *(f"op:{op}" for op in OPS), *NEED_CUDA, "end_to_end"]
    return [stage for stage in every if not names or stage in names or stage.split(":")[0] in names]


# --- what a stage does -----------------------------------------------------------------------------------------------


def environment(device: str) -> dict[str, Any]:
    import platform
    from importlib.util import find_spec

    import torch

    found = {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "installed": [n for n in ("transformers", "flash_attn", "flashinfer") if find_spec(n)],
    }
    if find_spec("triton"):
        import triton

        found["triton"] = triton.__version__
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        found |= {
            "device": properties.name,
            "l2_bytes": properties.L2_cache_size,
            "sms": properties.multi_processor_count,
        }
        found["driver"] = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True
        ).stdout.strip()
    return found


def check_op(op: str, device: str) -> dict[str, Any]:
    import gpu_ops

    return gpu_ops.check(op, device)


def floor(device: str) -> dict[str, Any]:
    """What a launch costs, and what memory can do: the limits of everything below."""
    import torch
    from specdec_kernels._lang import triton

    from specdec.evaluation.ops.measure import copy_bandwidth, graph_sampler

    @triton.jit
    def empty_kernel():
        pass

    sample = graph_sampler([lambda: empty_kernel[(1,)]()] * 20)
    times = sorted(sample() for _ in range(50))
    return {"launch_us": 1000 * times[25], "copy_tb_per_s": copy_bandwidth(torch.device(device)) / 1e12}


def ops_times(device: str) -> dict[str, Any]:
    import gpu_ops

    return gpu_ops.times(device)


def tree_build(device: str) -> dict[str, Any]:
    import torch

    from specdec.evaluation.ops import tree_build as bench

    return _measured(bench.cases(dtype=dtype, device=device) for dtype in (torch.float32, torch.bfloat16))


def margin(device: str) -> dict[str, Any]:
    import torch

    from specdec.evaluation.ops import margin as bench

    return _measured(bench.cases(dtype=dtype, device=device) for dtype in (torch.float32, torch.bfloat16))


def attention(device: str) -> dict[str, Any]:
    import torch

    from specdec.evaluation.ops import attention as bench

    return _measured([bench.cases(dtype=torch.bfloat16, device=device)])


def _measured(benches: Any) -> dict[str, Any]:
    from itertools import chain

    from specdec.evaluation.ops.measure import measure

    found = measure(chain.from_iterable(benches), seconds=0.3)
    if found.wrong:
        raise AssertionError("; ".join(found.wrong))
    return asdict(found)


def end_to_end(device: str) -> dict[str, Any]:
    """A random model in fp32 decodes with TALON what it decodes without."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import specdec
    from specdec.drafters.lm import LMDrafter
    from specdec.growth.talon import Talon
    from specdec.models.lm import CausalLM

    def model(seed: int, layers: int) -> CausalLM:
        torch.manual_seed(seed)
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": layers, "vocab_size": 97}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3}
        return CausalLM(LlamaForCausalLM(LlamaConfig(**sizes, **heads)).eval().to(device))

    target, ids = model(1, 3), list(range(1, 20))
    plain = specdec.Decoder(target).generate(ids, max_new_tokens=64).tokens
    talon = specdec.Decoder(target, LMDrafter(model(1, 2)), Talon(budget=24)).generate(ids, max_new_tokens=64)
    assert talon.tokens == plain, "TALON's text differs from plain decoding's"
    return {"tokens": len(plain), "tau": talon.summary()["tau"]}


# --- stages in processes of their own --------------------------------------------------------------------------------


def run_stage(stage: str, device: str) -> dict[str, Any]:
    name, _, op = stage.partition(":")
    return check_op(op, device) if name == "op" else globals()[name](device)


def in_process(command: list[str], limit: float) -> dict[str, Any]:
    """Runs `command`, which is to write JSON to the path behind it; what came of it as `{status, seconds, ...}`."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "found.json")
        try:
            done = subprocess.run([*command, str(out)], timeout=limit, capture_output=True, text=True)
        except subprocess.TimeoutExpired:
            return {"status": f"stopped after {limit:.0f} s", "seconds": round(limit, 1)}
        found: dict[str, Any] = {"status": "ok", "seconds": round(time.monotonic() - began, 1)}
        if done.returncode:
            return found | {"status": "failed", "error": done.stderr.strip()[-4000:]}
        return found | {"found": json.loads(out.read_text())}


def main(
    device: str,
    out: Path,
    names: Sequence[str] = (),
    command: Callable[[str], list[str]] | None = None,
) -> int:
    """Runs the stages, prints a line each, and keeps `out` up to date; 1 if one of them did not end well."""
    command = command or (lambda stage: [sys.executable, __file__, "--device", device, "--stage", stage, "--out"])
    report: dict[str, Any] = {"date": time.strftime("%Y-%m-%d"), "name": out.stem, "device": device, "stages": {}}
    patience = 10 if device == "cpu" else 1
    kernels_left: float = KERNELS * patience
    for stage in stages(names):
        kind = stage.split(":")[0]
        if device == "cpu" and stage in NEED_CUDA:
            done: dict[str, Any] = {"status": "skipped: needs a CUDA device"}
        elif kind == "op" and kernels_left < 1:
            done = {"status": f"left out: the kernels' {KERNELS * patience} s are spent"}
        else:
            limit = LIMITS[kind] * patience
            limit = min(limit, kernels_left) if kind == "op" else limit
            done = in_process(command(stage), limit)
            kernels_left -= done["seconds"] if kind == "op" else 0
        report["stages"][stage] = done
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(report, indent=1) + "\n")
        last = done.get("error", "").splitlines()[-1:]
        print(f"{stage:24} {done['status']}", *(f"{done[k]} s" for k in ("seconds",) if k in done), *last, flush=True)
    print(out)
    return int(any(not s["status"].startswith(("ok", "skipped")) for s in report["stages"].values()))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--name", default="here", help="of the result: bench/results/gpu-<name>.json")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--stages", nargs="*", default=(), help=f"some of: {', '.join(stages(()))}, op")
    parser.add_argument("--out", type=Path, help="another path for the result")
    parser.add_argument("--stage", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.stage:
        given.out.write_text(json.dumps(run_stage(given.stage, given.device)))
    else:
        path = given.out or ROOT / f"bench/results/gpu-{given.name}.json"
        sys.exit(main(given.device, path, given.stages))
