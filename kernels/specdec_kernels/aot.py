"""Compiling the kernels for GPUs that are not here: the tests, the C library and the resource table use this.

Each op's module lists its `VARIANTS`: one entry per kernel and combination of compile-time values that is worth a
binary. Compiling needs no GPU and no CUDA toolkit; Triton brings the assembler and `cuobjdump`.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any

OPS = (
    "verify_walk",
    "rejection_walk",
    "kv_commit",
    "topk_logprobs",
    "confidence_gate",
    "merge_attention",
    "tree_attention",
    "margin_scan",
    "trust_walk",
    "sample_tokens",
)
TARGETS = {
    "sm_80": ("cuda", 80, 32),
    "sm_90": ("cuda", 90, 32),
    "sm_100": ("cuda", 100, 32),
    "sm_120": ("cuda", 120, 32),
    "gfx942": ("hip", "gfx942", 64),
}


@dataclass(frozen=True)
class Variant:
    """One binary of one kernel.

    Attributes:
        name: unique; the entry point of the C library is called so.
        kernel: the `@triton.jit` function.
        arguments: run-time argument -> type: "*fp32", "*i64", "i32", "fp32"; ":16" behind it promises divisibility.
        constants: the constexpr arguments.
        num_warps, num_stages: launch options.
        wide_loads: the kernel streams much data and has to do so in 128-bit loads.
        targets: constants and launch options that differ on a target: {"gfx942": {"BLOCK_N": 32, "num_stages": 1}}.
        grid: how many programs the C library starts: up to three expressions over the run-time integers, the constants
            and `cdiv`. Other names in them (`rows`) become arguments of the entry point, behind the kernel's own.
            Without a grid the kernel has no entry point.
    """

    name: str
    kernel: Any
    arguments: Mapping[str, str]
    constants: Mapping[str, Any] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 2
    wide_loads: bool = False
    grid: tuple[str, ...] = ()
    targets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def on(self, target: str) -> Variant:
        """With what `targets` says for this one."""
        own = dict(self.targets.get(target, {}))
        options = {name: own.pop(name) for name in ("num_warps", "num_stages") if name in own}
        return replace(self, constants={**self.constants, **own}, **options)


@dataclass(frozen=True)
class Resources:
    """What a compiled kernel takes: registers a thread, spilled bytes, shared memory in bytes, 128-bit loads in it."""

    registers: int
    spills: int
    shared: int
    wide_loads: int


def variants() -> list[Variant]:
    """All variants of all ops that are there."""
    found = []
    for op in OPS:
        found += import_module(f"specdec_kernels.{op}").VARIANTS
    return found


def compile_for(variant: Variant, target: str) -> Any:
    """Triton's CompiledKernel for one of `TARGETS`; `.asm["cubin"]` (or "hsaco") is the binary."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    variant = variant.on(target)
    names = variant.kernel.arg_names
    missing = set(names) ^ {*variant.arguments, *variant.constants}
    if missing:
        raise ValueError(f"{variant.name}: the kernel takes {names}; missing or unknown: {sorted(missing)}")
    signature = {name: variant.arguments.get(name, "constexpr").removesuffix(":16") for name in names}
    constants = {(names.index(name),): value for name, value in variant.constants.items()}
    divisible = {
        (names.index(name),): [["tt.divisibility", 16]]
        for name, kind in variant.arguments.items()
        if kind.endswith(":16")
    }
    source = ASTSource(variant.kernel, signature, constants, divisible)
    options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages, "enable_fp_fusion": True}
    return triton.compile(source, target=GPUTarget(*TARGETS[target]), options=options)


def resources(compiled: Any) -> Resources:
    """Registers, spills, shared memory and 128-bit loads of a compiled kernel."""
    if "cubin" not in compiled.asm:
        text = compiled.asm["amdgcn"]
        registers, spills = (int(_number(rf"\.{name}:\s*(\d+)", text)) for name in ("vgpr_count", "vgpr_spill_count"))
        return Resources(registers, spills, compiled.metadata.shared, len(re.findall(r"_load_dwordx4", text)))
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, "kernel.cubin")
        cubin.write_bytes(compiled.asm["cubin"])
        usage, sass = (
            subprocess.run([str(tool), flag, str(cubin)], check=True, capture_output=True, text=True).stdout
            for flag in ("--dump-resource-usage", "-sass")
        )
    return Resources(
        int(_number(r"REG:(\d+)", usage)),
        int(_number(r"LOCAL:(\d+)", usage)) + int(_number(r"STACK:(\d+)", usage)),
        compiled.metadata.shared,
        len(re.findall(r"LDG\.E[.\w]*\.128|LDGSTS[.\w]*\.128|UTMALDG", sass)),
    )


def _number(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    if not found:
        raise RuntimeError(f"the tool's output has no {pattern!r}: {text[:400]}")
    return found[1]
