"""Compiles every kernel for every target and writes what it takes: bench/results/kernel_resources.json."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import torch
import triton
from specdec_kernels import aot

OUT = Path(__file__).parent / "results/kernel_resources.json"


def main() -> None:
    kernels = {
        variant.name: {target: asdict(aot.resources(aot.compile_for(variant, target))) for target in aot.TARGETS}
        for variant in aot.variants()
    }
    versions = {"triton": triton.__version__, "torch": torch.__version__}
    OUT.write_text(json.dumps({"versions": versions, "kernels": kernels}, indent=1) + "\n")
    print(OUT)


if __name__ == "__main__":
    main()
