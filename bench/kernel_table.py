"""Compiles every kernel for every target and writes what it takes to bench/results/kernel_resources.json.

Each version of Triton has its own part there, since each counts other registers; a run rewrites the installed one's.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import triton
from specdec_kernels import aot

OUT = Path(__file__).parent / "results/kernel_resources.json"


def main() -> None:
    kernels = {
        variant.name: {target: asdict(aot.resources(aot.compile_for(variant, target))) for target in aot.TARGETS}
        for variant in aot.variants()
    }
    found = json.loads(OUT.read_text()) if OUT.exists() else {}
    found[triton.__version__] = kernels
    newest_first = sorted(found, key=lambda version: [int(part) for part in version.split(".")[:2]], reverse=True)
    OUT.write_text(json.dumps({version: found[version] for version in newest_first}, indent=1) + "\n")
    print(OUT)


if __name__ == "__main__":
    main()
