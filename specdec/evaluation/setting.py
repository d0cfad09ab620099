"""What every measurement shares: the prompts that it is made on and the machine that it is made with."""

from __future__ import annotations

import json
import os
import platform
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
import transformers

from specdec.cost import processor


def read_prompts(path: Path | None = None, limit: int | None = None) -> list[str]:
    """The first turn of every prompt of a file of JSON lines (`turns` or `prompt`); by default the package's own.

    Raises:
        ValueError: no such file, a line that is not such an object, or no line at all.
    """
    path = path or Path(str(files("specdec") / "data" / "prompts.jsonl"))
    if not path.is_file():
        raise ValueError(f"there is no file {path}; expected JSON lines, each with `turns` or `prompt`")
    prompts: list[str] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip() or (limit is not None and len(prompts) >= limit):
            continue
        try:
            item = json.loads(line)
            prompt = item["prompt"] if "prompt" in item else item["turns"][0]
        except (ValueError, KeyError, IndexError, TypeError):
            prompt = None
        if not isinstance(prompt, str) or not prompt.strip():
            raise ValueError(f'{path}:{number}: expected {{"turns": ["..."]}} or {{"prompt": "..."}}, got {line:.60}')
        prompts.append(prompt)
    if not prompts:
        raise ValueError(f"no prompt in {path}{'' if limit is None else f' with limit {limit}'}; expected JSON lines")
    return prompts


def machine(device: torch.device | None = None) -> dict[str, Any]:
    """Where and with what a measurement was made."""
    on_gpu = device is not None and device.type == "cuda"
    return {
        "processor": processor(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if on_gpu else "cpu",
        "load_average": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "specdec": version("specdec-kernels"),
    }
