"""Every op on a device: against its reference, from run to run, in a CUDA graph, and its time. For gpu_check.py."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from specdec_kernels import (
    ancestor_words,
    ancestors,
    confidence_gate,
    kv_commit,
    merge_attention,
    reference,
    rejection_walk,
    topk_logprobs,
    tree_attention,
    verify_walk,
)
from specdec_kernels.margin_scan import margin_scan
from specdec_kernels.sample_tokens import sample_tokens
from specdec_kernels.trust_walk import trust_walk
from torch import Tensor

from specdec.evaluation.ops.measure import cold_copies, copy_bandwidth, graph_sampler
from specdec.evaluation.ops.tree_build import kept, same_candidates

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
NODES = 61


@dataclass(frozen=True)
class Job:
    """One op on one shape.

    Attributes:
        name: of the shape.
        op, definition: of `inputs`; the kernel's and the reference's results.
        inputs: made on the CPU by a seed, so that two seeds give two problems of the same shape.
        bytes: read and written at least.
        compare: asserts that the first result is the second; default `close`.
    """

    name: str
    op: Callable[..., Any]
    definition: Callable[..., Any]
    inputs: Callable[[int], tuple[Tensor, ...]]
    bytes: int
    compare: Callable[[tuple[Tensor, ...], tuple[Tensor, ...]], None] | None = None


def close(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    """Integers exactly; floats as far as their dtype and another order of sums allow."""
    for one, other in zip(found, expected, strict=True):
        if one.is_floating_point():
            slack = max(4 * torch.finfo(one.dtype).eps, 2e-5)
            torch.testing.assert_close(one, other, rtol=slack, atol=slack, equal_nan=True)
        else:
            assert torch.equal(one, other), f"{int((one != other).sum())} of {one.numel()} integers differ"


def check(op: str, device: str) -> dict[str, Any]:
    """Raises AssertionError where a result is wrong, changes from run to run, or differs in a graph."""
    done = []
    for job in jobs(op):
        first, second = job.inputs(0), job.inputs(1)
        expected = [_tuple(job.definition(*given)) for given in (first, second)]
        held = _to(first, device)
        runs = [_tuple(job.op(*held)) for _ in range(5)]
        compare = job.compare or close
        compare(_to(runs[0], "cpu"), expected[0])
        for again in runs[1:]:
            assert all(_same(x, y) for x, y in zip(runs[0], again, strict=True)), f"{job.name}: differs from run to run"
        if device == "cuda":
            in_graph = _replay(job.op, held, _to(second, device))
            compare(_to(in_graph, "cpu"), expected[1])
        done.append(job.name)
    return {"checked": done, "graph": device == "cuda"}


def times(device: str) -> dict[str, Any]:
    """Microseconds of each job in a graph with cold inputs and with warm ones."""
    found = {}
    for op in OPS:
        for job in jobs(op, large=True):
            held = _to(job.inputs(0), device)
            row: dict[str, Any] = {"bytes": job.bytes}
            row["limit_us"] = 1e6 * job.bytes / copy_bandwidth(torch.device(device))
            for name, copies in (("cold", cold_copies(held, job.bytes, torch.device(device))), ("warm", [held])):
                calls = [copies[i % len(copies)] for i in range(max(20, len(copies)))]
                sample = graph_sampler([partial(job.op, *args) for args in calls])
                row[f"{name}_us"] = 1000 * median(sample() for _ in range(30))
            found[f"{op} {job.name}"] = row
    return found


def _tuple(out: Any) -> tuple[Tensor, ...]:
    return (out,) if isinstance(out, Tensor) else tuple(out)


def _to(tensors: tuple[Any, ...], device: str) -> tuple[Any, ...]:
    return tuple(x.to(device) for x in tensors)


def _same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def _replay(op: Callable[..., Any], held: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Captures op(*held), then puts `other` into the same memory and replays twice."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out = _tuple(op(*held))
    graph.replay()
    for there, new in zip(held, other, strict=True):
        there.copy_(new)
    graph.replay()
    graph.replay()
    torch.cuda.synchronize()
    return out


# --- jobs ------------------------------------------------------------------------------------------------------------


def jobs(op: str, large: bool = False) -> Iterator[Job]:
    """To check: a small and a ragged shape in every dtype. `large`: three shapes to time, in bf16 where it matters."""
    yield from OPS[op](large)


def _normal(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _logits_shapes(large: bool, rows: int) -> Iterator[tuple[int, int, torch.dtype]]:
    if large:
        yield from ((rows, vocab, torch.bfloat16) for vocab in (32000, 128256, 152064))
    else:
        yield from ((rows, vocab, dtype) for vocab in (1000, 50257) for dtype in DTYPES)


def _name(rows: int, vocab: int, dtype: torch.dtype) -> str:
    return f"{rows} x {vocab} {str(dtype).removeprefix('torch.')}"


def _gate(large: bool) -> Iterator[Job]:
    def same(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
        same_candidates(kept(*found), kept(*expected), expected[2].max().item() + math.log(0.03))

    for normalized in (True, False):
        for parents, vocab, dtype in _logits_shapes(large, 10):

            def inputs(seed: int, p=parents, v=vocab, d=dtype, normalized=normalized) -> tuple[Tensor, ...]:
                logits = 3 * _normal(seed, 1, p, v)
                scores = torch.log_softmax(_normal(seed + 100, 1, p), -1)
                logits = torch.log_softmax(logits, -1) if normalized else logits
                return logits.to(d), scores, torch.tensor([60])

            def op(x, s, b, normalized=normalized):
                return confidence_gate(x, s, 0.03, b, 60, normalized=normalized)

            def definition(x, s, b, normalized=normalized):
                exact = x if normalized else torch.log_softmax(x.double(), -1).float()
                return reference.confidence_gate(exact, s, 0.03, b, 60, normalized=True)

            name = f"{'logprobs' if normalized else 'logits'} {_name(parents, vocab, dtype)}"
            size = parents * vocab * dtype.itemsize
            yield Job(name, op, definition, inputs, size, None if normalized else same)


def _topk(large: bool) -> Iterator[Job]:
    def same(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
        torch.testing.assert_close(found[0], expected[0], rtol=0, atol=2e-5)
        swapped = found[1] != expected[1]
        assert not swapped.any(), f"{int(swapped.sum())} tokens differ"

    for rows, vocab, dtype in _logits_shapes(large, 10):
        yield Job(
            _name(rows, vocab, dtype),
            lambda x: topk_logprobs(x, 10),
            lambda x: reference.topk_logprobs(x, 10),
            lambda seed, r=rows, v=vocab, d=dtype: (_normal(seed, 1, r, v, dtype=d) * 3,),
            rows * vocab * dtype.itemsize,
            same,
        )


def _margin(large: bool) -> Iterator[Job]:
    for rows, vocab, dtype in _logits_shapes(large, NODES if large else 5):
        yield Job(
            _name(rows, vocab, dtype),
            margin_scan,
            reference.margin_scan,
            lambda seed, r=rows, v=vocab, d=dtype: (_normal(seed, 1, r, v, dtype=d) * 3,),
            rows * vocab * dtype.itemsize,
        )


def _sample(large: bool) -> Iterator[Job]:
    for rows, vocab, dtype in _logits_shapes(large, NODES if large else 5):

        def inputs(seed: int, r=rows, v=vocab, d=dtype) -> tuple[Tensor, ...]:
            return _normal(seed, 1, r, v, dtype=d) * 3, torch.tensor([seed + 7]), torch.arange(r)[None] + seed

        yield Job(
            _name(rows, vocab, dtype),
            lambda x, seeds, at: sample_tokens(x, seeds, 1, at),
            lambda x, seeds, at: reference.sample_tokens(x, seeds, 1, at),
            inputs,
            rows * vocab * dtype.itemsize,
        )


def _tree(seed: int, rows: int, nodes: int, vocab: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, parents and counts of random trees; with few tokens, so that walks are long."""
    draw = torch.Generator().manual_seed(seed)
    parents = torch.stack([(torch.rand(rows, generator=draw) * n).long() for n in range(nodes)], 1)
    parents[:, 0] = -1
    tokens = torch.randint(vocab, (rows, nodes), generator=draw)
    return tokens, parents, torch.randint(1, nodes + 1, (rows,), generator=draw)


def _walk(large: bool) -> Iterator[Job]:
    def inputs(seed: int, rows: int) -> tuple[Tensor, ...]:
        return *_tree(seed, rows, NODES), _tree(seed + 100, rows, NODES)[0]

    for rows in (1, 8, 64):
        yield Job(
            f"{rows} trees of {NODES}",
            verify_walk,
            reference.verify_walk,
            lambda seed, r=rows: inputs(seed, r),
            32 * rows * NODES,
        )


def _trust(large: bool) -> Iterator[Job]:
    def inputs(seed: int, rows: int) -> tuple[Tensor, ...]:
        chosen = _tree(seed + 100, rows, NODES)[0]
        return *_tree(seed, rows, NODES), chosen, _normal(seed, rows, NODES).sigmoid()

    for rows in (1, 8, 64):
        yield Job(
            f"{rows} trees of {NODES}",
            lambda *given: trust_walk(*given, 0.2),
            lambda *given: reference.trust_walk(*given, 0.2),
            lambda seed, r=rows: inputs(seed, r),
            36 * rows * NODES,
        )


def _rejection(large: bool) -> Iterator[Job]:
    for nodes, vocab in ((8, 32000), (8, 152064), (24, 32000)) if large else ((8, 97), (24, 1000), (5, 32001)):

        def inputs(seed: int, n=nodes, v=vocab) -> tuple[Tensor, ...]:
            tokens, parents, count = _tree(seed, 1, n)
            p, q = (torch.softmax(3 * _normal(seed + i, 1, n, v), -1) for i in (1, 2))
            tokens = torch.topk(q, 4, dim=-1).indices.gather(2, tokens[..., None])[..., 0]
            draw = torch.Generator().manual_seed(seed)
            coins = torch.rand(1, n + 1, generator=draw, dtype=torch.float64).clamp(1e-9, 1 - 1e-9)
            return tokens, parents, count, p, q, coins[:, :n].contiguous(), coins[:, n].contiguous()

        yield Job(f"{nodes} x {vocab}", rejection_walk, reference.rejection_walk, inputs, 8 * vocab)


def _commit(large: bool) -> Iterator[Job]:
    def moved(move: Callable[..., None]) -> Callable[..., Tensor]:
        def run(cache: Tensor, source: Tensor, start: Tensor, count: Tensor) -> Tensor:
            move(cache, source, start, count)
            return cache

        return run if large else lambda cache, *rest: run(cache.clone(), *rest)

    for layers, moves in ((32, 4), (72, 8), (72, 60)) if large else ((2, 5), (6, 12)):
        for dtype in (torch.bfloat16,) if large else DTYPES:

            def inputs(seed: int, n=layers, m=moves, d=dtype) -> tuple[Tensor, ...]:
                order = torch.randperm(64, generator=torch.Generator().manual_seed(seed))[:m].sort().values
                return _normal(seed, n, 1, 96, 8, 128, dtype=d), 32 + order[None], torch.tensor([32]), torch.tensor([m])

            name = f"{layers} layers, {moves} moves {str(dtype).removeprefix('torch.')}"
            size = 2 * layers * moves * 8 * 128 * dtype.itemsize
            yield Job(name, moved(kv_commit), moved(reference.kv_commit), inputs, size)


def _attention(large: bool) -> Iterator[Job]:
    shapes = ((16, 2048), (61, 2048), (61, 8192)) if large else ((1, 100), (7, 33), (61, 500))
    for count, prefix in shapes:
        for dtype in (torch.bfloat16,) if large else DTYPES:

            def inputs(seed: int, t=count, s=prefix, d=dtype) -> tuple[Tensor, ...]:
                query = _normal(seed, 1, t, 32, 128, dtype=d)
                keys, values = (_normal(seed + i, 1, s + t, 8, 128, dtype=d) for i in (1, 2))
                _, parents, _ = _tree(seed, 1, t)
                return query, keys, values, torch.tensor([s]), ancestor_words(ancestors(parents))

            name = f"T {count}, S {prefix}, 32/8 heads of 128 {str(dtype).removeprefix('torch.')}"
            size = 2 * (prefix + count) * 8 * 128 * dtype.itemsize
            yield Job(
                name,
                lambda q, k, v, at, words, t=count: tree_attention(q, k, v, at, words, t),
                lambda q, k, v, at, words, t=count: reference.tree_attention(q, k, v, at, words, t, 128**-0.5),
                inputs,
                size,
            )


def _merge(large: bool) -> Iterator[Job]:
    for count in (1, 16, 61):
        for dtype in (torch.bfloat16,) if large else DTYPES:

            def inputs(seed: int, t=count, d=dtype) -> tuple[Tensor, ...]:
                parts = (_normal(seed + i, 1, t, 32, 128, dtype=d) for i in (0, 1))
                return tuple(x for i, out in enumerate(parts) for x in (out, _normal(seed + 9 + i, 1, t, 32)))

            name = f"T {count}, 32 heads of 128 {str(dtype).removeprefix('torch.')}"
            yield Job(name, merge_attention, reference.merge_attention, inputs, 3 * count * 32 * 128 * dtype.itemsize)


OPS: dict[str, Callable[[bool], Iterator[Job]]] = {
    "confidence_gate": _gate,
    "topk_logprobs": _topk,
    "margin_scan": _margin,
    "trust_walk": _trust,
    "sample_tokens": _sample,
    "verify_walk": _walk,
    "rejection_walk": _rejection,
    "kv_commit": _commit,
    "tree_attention": _attention,
    "merge_attention": _merge,
}
