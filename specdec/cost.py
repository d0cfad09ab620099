"""How long a forward pass takes here, and the node budget that follows.

On a GPU at batch 1 a tree of 60 nodes costs about as much as one token; on a CPU every node costs. So the budget is
not a constant there: with T(n) the measured time of verifying n nodes, T_draft that of a draft forward, and the chance
of each tree position under typical acceptance rates, it is the N that maximises expected tokens per second.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import math
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from specdec.checkpoints.smollm2 import cache_root
from specdec.drafters.eagle3 import Eagle3Drafter
from specdec.drafters.lm import LMDrafter
from specdec.models.lm import CausalLM
from specdec.protocols import Drafter, Verdict
from specdec.rows import Rows
from specdec.tree import DraftTree, Layer

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 60)
# Chance that the b-th best child is the one the target takes, given that the path up to it was accepted. A guess for
# heads that say nothing of themselves; a head's config.json may hold its own under specdec.rank_acceptance.
RANK_ACCEPTANCE = (0.60, 0.12, 0.05, 0.03, 0.02, 0.015, 0.01, 0.008, 0.006, 0.005)
_CACHED_TOKENS = 200
_REPEATS = 5


@dataclass(frozen=True)
class CostCurve:
    """Measured times on this machine, behind a prefix of 200 tokens (fewer where the context is shorter).

    Attributes:
        verify: nodes -> seconds of one target forward over that many tokens.
        draft: seconds of one draft forward of width 1; 0.0 without a draft.
    """

    verify: dict[int, float]
    draft: float

    def __post_init__(self) -> None:
        """More tokens cannot take less time: where noise says so, the shorter time counts for both."""
        sizes = sorted(self.verify, reverse=True)
        least = accumulate((self.verify[nodes] for nodes in sizes), min)
        object.__setattr__(self, "verify", dict(sorted(zip(sizes, least, strict=True))))

    def at(self, nodes: int) -> float:
        """T(n) in seconds, by linear interpolation (and extrapolation behind the last size)."""
        sizes = sorted(self.verify)
        right = next((i for i, n in enumerate(sizes) if n >= nodes), len(sizes) - 1)
        if sizes[right] == nodes or right == 0:
            return self.verify[sizes[right]]
        a, b = sizes[right - 1], sizes[right]
        return self.verify[a] + (self.verify[b] - self.verify[a]) * (nodes - a) / (b - a)


@dataclass(frozen=True)
class Plan:
    """Tree sizes for one machine.

    Attributes:
        budget, top_k, depth: nodes with the root, children of the root and levels of the best static tree.
        chain: the best length of a chain.
        speedup: what the model expects of that tree over plain decoding.
        min_probability: verifying one more node takes as long as producing so many tokens; a less likely one loses.
        min_mass: the same for a draft forward and the node that it leads to: how likely its layer has to be in all.
    """

    budget: int
    top_k: int
    depth: int
    chain: int
    speedup: float
    min_probability: float
    min_mass: float


def plan(curve: CostCurve, rank_acceptance: Sequence[float] | None = None, largest: int = 60) -> Plan:
    """The tree that yields the most expected tokens per second.

    For each N the best static tree under the acceptance rates is the N - 1 most likely positions (a position's chance
    is the product of the rates along its path, so the set is closed under parents: Sequoia's objective).
    """
    rates = rank_acceptance or RANK_ACCEPTANCE
    tau, top_k, depth = 1.0, 0, 0
    found = []
    for nodes, (chance, level) in enumerate(_positions(rates, largest - 1), start=2):
        tau, top_k, depth = tau + chance, top_k + (level == 1), max(depth, level)
        found.append((tau * curve.at(1) / (curve.at(nodes) + depth * curve.draft), nodes, top_k, depth))
    speedup, budget, top_k, depth = max(found, key=lambda tree: tree[0])

    def of_chain(length: int) -> float:
        return sum(rates[0] ** i for i in range(length + 1)) / (curve.at(length + 1) + length * curve.draft)

    token = curve.at(1) / max(speedup, 1.0)
    span = max(2 * budget, 16)  # wide enough that the noise of two measured points does not decide
    node = (curve.at(span) - curve.at(1)) / (span - 1)
    return Plan(
        budget,
        top_k,
        depth,
        max(range(1, 17), key=of_chain),
        speedup,
        min(node / token, 0.9),
        min((curve.draft + node) / (rates[0] * token), 0.9),
    )


def _positions(rates: Sequence[float], count: int) -> list[tuple[float, int]]:
    """The `count` most likely tree positions as (chance, level), most likely first."""
    heap = [(-rates[0], 1, 0, 1.0)]
    found: list[tuple[float, int]] = []
    while heap and len(found) < count:
        chance, level, rank, parent = heapq.heappop(heap)
        found.append((-chance, level))
        if rank + 1 < len(rates):
            heapq.heappush(heap, (-parent * rates[rank + 1], level, rank + 1, parent))
        heapq.heappush(heap, (chance * rates[0], level + 1, 0, -chance))
    return found


def measure(target: CausalLM, drafter: Drafter | None = None, sizes: Sequence[int] = SIZES) -> CostCurve:
    """Times the target at each size, and a draft forward: the fastest of several runs, least spoiled by other work.

    Prefix and tree stay within the contexts of target and draft: sizes that would not are left out.
    """
    context = _context(target, drafter)
    sizes = [nodes for nodes in sizes if nodes <= max(1, context // 2)]
    prefix = max(2, min(_CACHED_TOKENS, context - max(sizes)))
    rows = Rows([[i % target.vocab_size for i in range(prefix)]], 2 * max(sizes), [0], device=target.device)
    capacity = rows.limit[0] + max(sizes)
    target.start(rows, capacity)
    taps, target.taps = target.taps, drafter.taps if drafter else ()
    try:
        _, span = target.forward(rows)
        rows.cached[target.name], rows.host.cached[target.name] = rows.length - 1, [prefix - 1]
        trees = {nodes: _chain_tree(rows, nodes).whole() if nodes > 1 else None for nodes in sizes}
        verify = _fastest({nodes: partial(target.forward, rows, tree) for nodes, tree in trees.items()}, target)
    finally:
        target.taps = taps
    draft = 0.0
    if drafter is not None:
        drafter.start(rows, capacity)
        # the row's last id plays the new root, so the pairs end one position before it
        verdict = Verdict(rows.ids[:, :0], rows.length * 0, rows.roots, span)
        drafter.observe(rows, span, DraftTree(rows.roots, 1), verdict)
        tree = DraftTree(rows.roots, 3)
        drafter.expand(rows, tree, tree.root)
        one = torch.ones_like(rows.length)
        node = tree.append(Layer(tree.root, tree.root, tree.scores.clone(), one, tree.root, one), lambda ids: ids)
        draft = _fastest({1: partial(drafter.expand, rows, tree, node)}, target)[1]
    return CostCurve(verify, draft)


def _chain_tree(rows: Rows, nodes: int) -> DraftTree:
    tree = DraftTree(rows.roots, nodes)
    frontier, one, score = tree.root, torch.ones_like(rows.length), torch.zeros_like(tree.scores)
    for _ in range(nodes - 1):
        frontier = tree.append(Layer(frontier, frontier, score, one, tree.root, one), lambda ids: ids)
    return tree


def _fastest(runs: Mapping[int, Callable[[], Any]], target: CausalLM) -> dict[int, float]:
    """Seconds of the fastest of several runs of each; in turn, so that a busy spell does not hit one of them alone."""
    times: dict[int, list[float]] = {key: [] for key in runs}
    for _ in range(1 + _REPEATS):
        for key, run in runs.items():
            begin = time.perf_counter()
            run()
            if target.device.type == "cuda":
                torch.cuda.synchronize()
            times[key].append(time.perf_counter() - begin)
    return {key: min(seconds[1:]) for key, seconds in times.items()}


def cached_curve(target: CausalLM, drafter: Drafter | None = None) -> CostCurve:
    """The curve of this model on this machine: measured once, then read from the user's cache directory.

    A file that holds no such curve is measured anew, and a directory that takes no file costs the measurement alone.
    """
    path = curve_path(target, drafter)
    with suppress(OSError, ValueError, ArithmeticError, LookupError, TypeError, AttributeError):  # none, or not ours
        return _parsed(json.loads(path.read_text()), drafter is not None)
    curve = measure(target, drafter)
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_suffix(f".{os.getpid()}.tmp")
        scratch.write_text(json.dumps({**asdict(curve), "identity": identity(target, drafter)}, indent=1))
        scratch.replace(path)
    return curve


def _parsed(stored: Any, drafted: bool) -> CostCurve:
    """The curve in a file's JSON; raises whatever it meets, ValueError for numbers that are no times."""
    verify, draft = {int(n): float(t) for n, t in stored["verify"].items()}, float(stored["draft"])
    times = [verify[1], *verify.values(), *([draft] if drafted else [])]
    if min(verify) < 1 or not all(0 < seconds < math.inf for seconds in times):
        raise ValueError(f"{verify}, {draft} hold a size or a time that cannot be; expected positive ones")
    return CostCurve(verify, draft)


def planned(target: CausalLM, drafter: Drafter | None) -> tuple[CostCurve | None, Plan | None]:
    """Curve and plan where verification is not free, that is, on a CPU; None where the papers' sizes hold."""
    if drafter is None or target.device.type != "cpu":
        return None, None
    curve = cached_curve(target, drafter)
    return curve, plan(curve, getattr(drafter, "rank_acceptance", None))


def curve_path(target: CausalLM, drafter: Drafter | None) -> Path:
    """Where `cached_curve` keeps it."""
    key = json.dumps(identity(target, drafter), sort_keys=True)
    return cache_root() / "cost" / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"


def identity(target: CausalLM, drafter: Drafter | None) -> dict[str, Any]:
    """What a curve depends on: shapes of model and draft, forward path, machine, threads, torch."""
    return {
        "model": _shape(target),
        "context": _context(target, drafter),
        "draft": type(drafter).__name__ if drafter else None,
        "draft_shape": _draft_shape(drafter),
        "device": torch.cuda.get_device_name() if target.device.type == "cuda" else processor(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def _shape(model: CausalLM) -> dict[str, Any]:
    names = ["model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"]
    names += ["num_key_value_heads", "head_dim", "vocab_size"]
    shape = {name: getattr(model.config, name, None) for name in names}
    return {**shape, "path": type(model.backbone).__name__, "dtype": str(model.dtype)}


def _draft_shape(drafter: Drafter | None) -> dict[str, Any] | None:
    if isinstance(drafter, LMDrafter):
        return _shape(drafter.model)
    if isinstance(drafter, Eagle3Drafter):
        return {**asdict(drafter.head.config), "dtype": str(drafter.dtype)}
    return {"vocab_size": drafter.vocab_size} if drafter else None


def _context(target: CausalLM, drafter: Drafter | None) -> int:
    """Positions that both have; a head computes any position like every other."""
    return min(target.context, drafter.model.context) if isinstance(drafter, LMDrafter) else target.context


def processor() -> str:
    """The CPU's name and how many of its cores this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{cpu_name()}, {cores} cores"


def cpu_name() -> str:
    """The CPU's model name, as the kernel or the platform tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
