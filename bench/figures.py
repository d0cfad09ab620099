"""Writes the figures that README and docs show, from the files under bench/results/: `make figures`.

No figure in a document is typed by hand. Each file under bench/results/ names its machine and versions.
"""

from __future__ import annotations

import json
import math
from itertools import groupby
from pathlib import Path
from typing import Any

from specdec.cli.report import bench_peers, bench_shape
from specdec.methods import METHODS
from specdec.training.export import comparison_table, fill_page, render_page

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "bench" / "results"


def read(name: str) -> Any:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def methods_table() -> str:
    rows = []
    for name, method in METHODS.items():
        file = Path(method.growth.__module__.replace(".", "/") + ".py") if method.growth else "specdec/decoder.py"
        rows.append(
            [f"`{name}`", method.description, method.needs, "yes" if method.lossless else "no", f"[{file}]({file})"]
        )
    return table(["method", "what it does", "needs", "exact", "file"], rows)


def acceptance_table(reports: list[dict[str, Any]]) -> str:
    rows = [
        [report["file"], f"`{line['growth']}`", f"{line['tau']:.2f}", f"{line['mean_nodes']:.1f}", str(line["prompts"])]
        for report in reports
        for line in report["results"]
    ]
    return table(["prompts", "tree", "tau", "nodes a round", "number of prompts"], rows)


def resources_table(found: dict[str, Any]) -> str:
    version, kernels = next(iter(found.items()))  # the newest comes first
    targets = list(dict.fromkeys(target for by_target in kernels.values() for target in by_target))
    rows = []
    for name, by_target in kernels.items():
        cells = [by_target.get(target) for target in targets]
        shown = [f"{cell['registers']} / {cell['shared'] / 1024:.3g}" if cell else "-" for cell in cells]
        rows.append([f"`{name}`", *shown])
    return f"triton {version}:\n\n{table(['kernel', *targets], rows)}"


def ops_table(found: dict[str, Any]) -> str:
    """A bench of ops, a table for each set of peers, under its machine."""
    machine = found["machine"]
    tables = []
    for peers, group in groupby(found["rows"], key=bench_peers):
        rows = list(group)
        shape = [name for name in bench_shape(rows[0]) if len({row.get(name) for row in found["rows"]}) > 1]
        head = [*shape, "ours, ms", *(cell for peer in peers for cell in (f"`{peer}`, ms", "×"))]
        cells = [
            [
                *(str(row[name]) for name in shape),
                f"{row['ours_ms']:.3g}",
                *(cell for peer in peers for cell in (f"{row[f'{peer}_ms']:.3g}", f"{row[f'ratio_{peer}']:.1f}")),
            ]
            for row in rows
        ]
        tables.append(table(head, cells))
    device = machine["processor"] if machine["device"] == "cpu" else machine["device"]
    place = (
        f"{device}, {machine['threads']} thread(s), torch {machine['torch']}, load average {machine['load_average']}"
    )
    return "\n\n".join([f"{place}:", *tables, *found["notes"]])


def gpu_table() -> str:
    """What bench/gpu_check.py found, if it ever ran on a GPU."""
    reports = [report for path in sorted(RESULTS.glob("gpu-*.json")) if (report := read(path.name))["device"] == "cuda"]
    if not reports:
        return (
            "The kernels have been compiled for all of these targets and run in Triton's interpreter, but not yet "
            "timed on a GPU. `bench/gpu_check.py` is the script that will: every op against its reference, then times."
        )
    parts = []
    for report in reports:
        stages = {name: stage.get("found", {}) for name, stage in report["stages"].items()}
        about, floor = stages.get("environment", {}), stages.get("floor", {})
        parts.append(
            f"{about.get('device')}, torch {about.get('torch')}, triton {about.get('triton')}, {report['date']}; "
            f"a launch in a graph takes {floor.get('launch_us', math.nan):.2f} us, a copy moves "
            f"{floor.get('copy_tb_per_s', math.nan):.2f} TB/s:"
        )
        head = ["op", "bytes", "limit, us", "cold, us", "warm, us"]
        parts.append(
            table(
                head,
                [
                    [name, f"{row['bytes']:,}", *(f"{row[key]:.2f}" for key in ("limit_us", "cold_us", "warm_us"))]
                    for name, row in stages.get("ops_times", {}).items()
                ],
            )
        )
        for name in ("tree_build", "margin", "attention"):
            if rows := stages.get(name, {}).get("rows"):
                machine = {"device": about["device"], "threads": 1, "torch": about["torch"], "load_average": "-"}
                parts.append(ops_table({"machine": machine, "rows": rows, "notes": []}))
    return "\n\n".join(parts)


def kernels_page() -> None:
    ops = read("ops-cpu.json")
    benches = {name: ops_table(ops[name]) for name in ("tree-build", "margin", "attention")}
    resources = resources_table(read("kernel_resources.json"))
    fill_page(ROOT / "docs" / "kernels.md", {"resources": resources, "gpu": gpu_table(), **benches})


def transcript() -> str:
    return f"```console\n{(RESULTS / 'transcript.txt').read_text(encoding='utf-8').strip()}\n```"


def main() -> None:
    speed = comparison_table(read("compare.json"))
    factors = comparison_table(read("factors.json"))
    acceptance = acceptance_table([read(path.name) for path in sorted(RESULTS.glob("acceptance-*.json"))])
    fill_page(
        ROOT / "README.md",
        {"transcript": transcript(), "methods": methods_table(), "speed": speed, "factors": factors},
    )
    page = ROOT / "docs" / "demo_models.md"
    render_page(page, RESULTS / "smollm2-eagle3", [RESULTS / "compare.json"])
    fill_page(page, {"acceptance": acceptance})
    kernels_page()


if __name__ == "__main__":
    main()
