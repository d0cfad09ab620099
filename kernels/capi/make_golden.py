"""Writes golden/*.txt, cases of the CPU entry points, from the reference: run it where an op's definition changes."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from specdec_kernels import reference as ops
from torch import Tensor

DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}  # specdec_dtype
INF, NAN = float("inf"), float("nan")


def write(op: str, cases: dict[str, dict[str, Tensor | float]]) -> None:
    lines = []
    for name, arrays in cases.items():
        lines.append(f"case {op}/{name}")
        lines += (f"{key}: {' '.join(map(repr, torch.as_tensor(x).flatten().tolist()))}" for key, x in arrays.items())
    (Path(__file__).parent / f"golden/{op}.txt").write_text("\n".join(lines) + "\n")


def logits(values: Tensor) -> dict[str, Tensor | int]:
    bits = values if values.dtype == torch.float32 else values.view(torch.uint16).int()
    return {"logits": bits, "dtype": DTYPES[values.dtype], "vocab": values.shape[-1]}


def tree(rows: int, nodes: int, vocab: int) -> dict[str, Tensor]:
    parents = torch.tensor([[-1] + [int(torch.randint(0, i, ())) for i in range(1, nodes)] for _ in range(rows)])
    count = torch.randint(2, nodes + 1, (rows,))
    return {"tokens": torch.randint(0, vocab, (rows, nodes)), "parents": parents, "count": count}


def named(result: tuple[Tensor, ...], *names: str) -> dict[str, Tensor]:
    return dict(zip(names, result, strict=True))


def main() -> None:
    torch.manual_seed(0)
    walk = ("path", "length", "bonus")

    forest = tree(4, 12, 3) | {"chosen": torch.randint(-1, 3, (4, 12))}
    alone = {key: torch.zeros(1, 1, dtype=torch.long) for key in ("tokens", "chosen")}
    alone |= {"parents": torch.tensor([[-1]]), "count": torch.tensor([1])}
    write(
        "verify_walk",
        {name: x | named(ops.verify_walk(**x), *walk) for name, x in {"forest": forest, "alone": alone}.items()},
    )

    margins = torch.rand(4, 12).index_put((torch.tensor([1]), torch.tensor([0])), torch.tensor(NAN))
    trusted = ops.trust_walk(**forest, margins=margins, margin_threshold=0.25)
    write("trust_walk", {"forest": forest | {"margins": margins, "threshold": 0.25}
                         | named(trusted, *walk, "escalated")})  # fmt: skip

    cases = {}
    for name, replacement in (("with", True), ("without", False)):
        p, q = (torch.softmax(2 * torch.randn(4, 8, 6), -1) for _ in range(2))
        case = tree(4, 8, 6) | {"p": p, "q": q, "coins": torch.rand(4, 8).double(), "draw": torch.rand(4).double()}
        cases[name] = case | {"replacement": int(replacement)}
        cases[name] |= named(ops.rejection_walk(**case, replacement=replacement), *walk)
    write("rejection_walk", cases)

    cases = {}
    moves = {"source": torch.tensor([[5, 3, 4, -1], [1, 0, 0, 0]]), "start": torch.tensor([3, 0])}
    moves["count"] = torch.tensor([3, 2])
    for name, shape, table in (
        ("rows", (2, 2, 6, 1, 3), None),
        ("pages", (2, 7, 2, 1, 3), torch.tensor([[4, 0, 6], [1, 5, 2]])),
    ):
        cache = torch.arange(torch.Size(shape).numel()).float().view(shape)
        moved = cache.clone()
        ops.kv_commit(moved, **moves, block_table=table)
        rest = {"shape": torch.tensor([*shape[:3], shape[3] * shape[4]]), "moved": moved}
        cases[name] = {"cache": cache, **moves, "block_table": [] if table is None else table, **rest}
    write("kv_commit", cases)

    cases = {}
    for dtype in DTYPES:
        values = (3 * torch.randn(3, 40)).to(dtype)
        values[1, 7] = NAN
        values[2, :3] = -INF
        row = logits(values) | {"rows": 3, "k": 5}
        cases[str(dtype)] = row | named(tuple(x[0] for x in ops.topk_logprobs(values[None], 5)), "logprobs", "token")
    write("topk_logprobs", cases)

    cases = {}
    for dtype in DTYPES:
        values = (3 * torch.randn(2, 3, 40)).to(dtype)
        values[1, 2, 3] = NAN
        scores = torch.tensor([[0.0, -0.5, -2.0], [-1.0, -INF, -0.1]])
        budget, mu, width = torch.tensor([9, 3]), 0.05, 9
        *kept, count = ops.confidence_gate(values, scores, mu, budget, width)
        padding = torch.arange(width) >= count[:, None]
        kept = [x.masked_fill(padding, 0) for x in kept]
        case = logits(values) | {"parent_scores": scores, "budget": budget, "mu": mu, "width": width, "normalized": 0}
        cases[str(dtype)] = case | named((*kept, count), "parent", "token", "score", "count")
    write("confidence_gate", cases)

    cases = {}
    for dtype in DTYPES:
        values = (3 * torch.randn(4, 40)).to(dtype)
        values[1, 7], values[2, 5] = NAN, INF
        token, *rest = (x[0] for x in ops.margin_scan(values[None]))
        cases[str(dtype)] = logits(values) | {"rows": 4, "token": token, "values": torch.stack(rest)}
    write("margin_scan", cases)

    cases = {}
    for dtype in DTYPES:
        values = torch.randn(2, 3, 41).to(dtype)
        values[1, 0, 0] = NAN
        keys = {"seeds": torch.tensor([3, 2**40 + 1]), "stream": 2, "positions": torch.tensor([[5, 6, 5], [0, 1, 9]])}
        cases[str(dtype)] = logits(values) | keys | {"token": ops.sample_tokens(values, *keys.values())}
    write("sample_tokens", cases)


if __name__ == "__main__":
    main()
