"""Runs `specdec bench` in all its forms and keeps what it tells: bench/results/ops-cpu.json (`make bench-ops`).

Arguments are passed on: `make bench-ops BENCH_ARGS="--seconds 5"`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

OUT = Path(__file__).parent / "results/ops-cpu.json"
BENCHES = ("tree-build", "margin", "attention")


def main() -> None:
    run = "from specdec.cli import app; app()"
    found = {"date": time.strftime("%Y-%m-%d"), "command": "make bench-ops"}
    for name in BENCHES:
        command = [sys.executable, "-c", run, "bench", name, "--device", "cpu", "--json", *sys.argv[1:]]
        found[name] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    OUT.write_text(json.dumps(found, indent=1) + "\n")
    print(OUT)


if __name__ == "__main__":
    main()
