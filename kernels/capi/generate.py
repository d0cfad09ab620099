"""Compiles the kernels for the NVIDIA targets and writes the GPU half of the C library.

    python generate.py FOLDER    writes into it
        specdec_entry_points.h     one declaration a variant that has a grid (see specdec_kernels.aot.Variant)
        entry_points.cpp           the binaries as byte arrays, and the definitions
        expected_launches.inc      what a fake driver has to see, for the tests; parameters as the PTX declares them

Needs torch and Triton; no GPU and no CUDA toolkit.
"""

from __future__ import annotations

import os
import re
import sys
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["TRITON_DISABLE_LINE_INFO"] = "1"  # a third of the size
sys.path.insert(0, str(Path(__file__).parents[1]))

from specdec_kernels import aot

TYPES = {"i32": "int32_t", "i64": "int64_t", "fp32": "float", "fp64": "double"}
ELEMENTS = {**TYPES, "i8": "int8_t", "i16": "int16_t", "fp16": "void", "bf16": "void", "i1": "uint8_t"}
NVIDIA = {name: target[1] for name, target in aot.TARGETS.items() if target[0] == "cuda"}
PARAMETER = re.compile(r"\.param \.[a-z](\d+) ")


@dataclass(frozen=True)
class Parameter:
    """One of an entry point's: its name, its C type, and whether it has to be a multiple of 16."""

    name: str
    type: str
    divisible: bool = False

    @property
    def pointer(self) -> bool:
        return self.type.endswith("*")

    def __str__(self) -> str:
        return f"{self.type} {self.name}"


def arguments(variant: aot.Variant) -> list[Parameter]:
    """The kernel's run-time arguments, in its order."""
    found = []
    for name in variant.kernel.arg_names:
        if name not in variant.arguments:
            continue
        kind, _, promise = variant.arguments[name].partition(":")
        kind = f"{ELEMENTS[kind[1:]]}*" if kind.startswith("*") else TYPES[kind]
        found.append(Parameter(name.removesuffix("_ptr"), kind, bool(promise)))
    return found


def extra(variant: aot.Variant) -> list[Parameter]:
    """What the grid needs and the kernel does not."""
    known = {"cdiv", *variant.constants, *(argument.name for argument in arguments(variant))}
    names = dict.fromkeys(name for axis in variant.grid for name in re.findall(r"[A-Za-z_]\w*", axis))
    return [Parameter(name, "int32_t") for name in names if name not in known]


def signature(variant: aot.Variant) -> str:
    parameters = ", ".join(map(str, arguments(variant) + extra(variant)))
    return wrap(f"int specdec_cuda_{variant.name}(specdec_context* context, specdec_stream stream, {parameters})")


def wrap(text: str) -> str:
    return textwrap.fill(text, 108, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)


def check_grid(variant: aot.Variant) -> None:
    """An entry point has one grid for all targets."""
    used = set(re.findall(r"[A-Za-z_]\w*", " ".join(variant.grid))) & set(variant.constants)
    for name, target in ((name, target) for name in used for target in NVIDIA):
        if variant.on(target).constants[name] != variant.constants[name]:
            raise ValueError(f"{variant.name}: the grid needs {name}, which differs on {target}")


def grid(variant: aot.Variant, values: Mapping[str, int]) -> list[int]:
    """The grid that the expressions give, by Python."""
    scope = {**values, **variant.constants, "cdiv": lambda a, b: -(-a // b)}
    return [eval(axis, scope) for axis in variant.grid] + [1] * (3 - len(variant.grid))  # our own strings


def declaration(variant: aot.Variant) -> str:
    module = sys.modules[variant.kernel.fn.__module__]
    what = (module.__doc__ or "").strip().splitlines()[0].rstrip(".:")
    sixteen = ", ".join(p.name for p in arguments(variant) + extra(variant) if p.divisible and not p.pointer)
    where = f"{variant.kernel.__name__} in specdec_kernels/{module.__name__.rpartition('.')[2]}.py"
    constants = ", ".join(f"{name} = {value}" for name, value in variant.constants.items() if value is not None)
    note = f" Multiples of 16: {sixteen}." if sixteen else ""
    return f"/* {wrap(f'{what}: {where}; {constants}.{note}')} */\nSPECDEC_API {signature(variant)};\n"


def definition(variant: aot.Variant, index: int) -> str:
    names = [argument.name for argument in arguments(variant)]
    sixteen = [p for p in arguments(variant) if p.divisible]
    checks = "\n      || ".join(f"specdec::odd({p.name})" for p in sixteen) or "false"
    known = {**variant.constants, "cdiv": "specdec::cdiv"}
    axes = [re.sub(r"[A-Za-z_]\w*", lambda m: str(known.get(m[0], m[0])), axis) for axis in variant.grid]
    return f"""extern "C" {signature(variant)} {{
  if ({checks}) return SPECDEC_INVALID;
  void* scratch = nullptr;  // Triton's kernels take two more pointers, which these do not use
  void* arguments[] = {{{", ".join(f"&{name}" for name in names)}, &scratch, &scratch}};
  return specdec::launch(context, {index}, {{{", ".join([*axes, *["1"] * (3 - len(axes))])}}}, arguments, stream);
}}
"""


def array(name: str, data: bytes) -> str:
    """A byte array as a string literal: compilers read those ten times as fast as lists of numbers."""
    lines = ("".join(f"\\{byte:03o}" for byte in data[at : at + 64]) for at in range(0, len(data), 64))
    return f"alignas(16) const unsigned char {name}[] =\n" + "\n".join(f'    "{line}"' for line in lines) + ";\n"


def image(variant: aot.Variant, target: str, compiled: Any) -> str:
    metadata, ptx = compiled.metadata, compiled.asm["ptx"]
    unsupported = {"num_ctas": 1, "global_scratch_size": 0, "profile_scratch_size": 0, "launch_cooperative_grid": False}
    for name, value in unsupported.items():
        if getattr(metadata, name, value) != value:
            raise ValueError(
                f"{variant.name} on {target}: {name} is {getattr(metadata, name)}; the library gives {value}"
            )
    exact = "true" if re.search(r"\.target sm_\d+[af]", ptx) else "false"
    threads = metadata.num_warps * metadata.warp_size
    return f"{{{NVIDIA[target]}, {exact}, {threads}, {metadata.shared}, {variant.name}_{target}}}"


def expected(variant: aot.Variant, compiled: Mapping[str, Any]) -> str:
    """One call with distinct arguments, and the launch that it has to make on each target."""
    parameters = arguments(variant) + extra(variant)
    values = {p.name: (2**33 if p.pointer else 0) + 16 * (i + 1) for i, p in enumerate(arguments(variant))}
    values |= {p.name: 3 + i for i, p in enumerate(extra(variant))}
    call = ", ".join(f"({p.type}){'(uintptr_t)' if p.pointer else ''}{values[p.name]}LL" for p in parameters)
    lines = []
    for target, kernel in compiled.items():
        sizes = [int(bits) // 8 for bits in PARAMETER.findall(kernel.asm["ptx"])]
        if len(sizes) != len(arguments(variant)) + 2:
            raise ValueError(
                f"{variant.name} on {target}: {len(sizes)} parameters in its PTX; expected two more than ours"
            )
        threads = int(re.search(r"\.reqntid (\d+)", kernel.asm["ptx"])[1])
        lines.append(
            f"    {{{NVIDIA[target]}, {threads}, {kernel.metadata.shared}, {{{', '.join(map(str, sizes))}}}}},"
        )
    wanted = ", ".join(
        f"as_word(({p.type}){'(uintptr_t)' if p.pointer else ''}{values[p.name]}LL)" for p in arguments(variant)
    )
    numbers = {p.name: values[p.name] for p in parameters if not p.pointer}
    return f"""{{"{variant.name}", "{variant.kernel.__name__}",
  [](specdec_context* c, specdec_stream s) {{ return specdec_cuda_{variant.name}(c, s, {call}); }},
  {{{", ".join(map(str, grid(variant, numbers)))}}}, {{{wanted}, 0, 0}},
  {{
{chr(10).join(lines)}
  }}}},
"""


def main(folder: Path) -> None:
    exported = [variant for variant in aot.variants() if variant.grid]
    declarations, binaries, kernels, definitions, launches = [], [], [], [], []
    for index, variant in enumerate(exported):
        check_grid(variant)
        compiled = {target: aot.compile_for(variant, target) for target in NVIDIA}
        binaries += (array(f"{variant.name}_{target}", kernel.asm["cubin"]) for target, kernel in compiled.items())
        images = ", ".join(image(variant, target, kernel) for target, kernel in compiled.items())
        kernels.append(f'    {{"{variant.kernel.__name__}", {{{images}}}}},')
        declarations.append(declaration(variant))
        definitions.append(definition(variant, index))
        launches.append(expected(variant, compiled))
    header = "/* Written by generate.py. */\n#ifndef SPECDEC_ENTRY_POINTS_H\n#define SPECDEC_ENTRY_POINTS_H\n\n"
    write(folder / "specdec_entry_points.h", header + "\n".join(declarations) + "\n#endif\n")
    table = f"const Kernel kernels[] = {{\n{chr(10).join(kernels)}\n}};\nconst int kernel_count = {len(exported)};\n"
    data = f"namespace {{\n{''.join(binaries)}}}  // namespace\n"
    body = f'#include "runtime.h"\n\nnamespace specdec {{\n{data}\n{table}}}  // namespace specdec\n\n'
    write(folder / "entry_points.cpp", body + "\n".join(definitions))
    write(folder / "expected_launches.inc", "".join(launches))


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
