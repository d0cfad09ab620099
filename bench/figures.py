"""Writes the figures that README and docs show, from the files under bench/results/: `make figures`.

No figure in a document is typed by hand. Each file under bench/results/ names its machine and versions.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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


if __name__ == "__main__":
    main()
