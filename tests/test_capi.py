"""The C library: it builds, passes its own tests, and has an entry point for every variant with a grid."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import sys
from importlib import util
from pathlib import Path

import pytest
from specdec_kernels import aot

ROOT = Path(__file__).parents[1]


def load(name: str):
    spec = util.spec_from_file_location(f"capi_{name}", ROOT / f"kernels/capi/{name}.py")
    module = util.module_from_spec(spec)
    before = list(sys.path)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    sys.path[:] = before
    return module


@pytest.fixture(scope="module")
def generate():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_DISABLE_LINE_INFO", "1")  # which it sets itself, for its own process
        yield load("generate")


EXPORTED = {variant.name: variant for variant in aot.variants() if variant.grid}


def test_a_walk_has_the_signature_that_is_expected(generate) -> None:
    declared = " ".join(generate.declaration(EXPORTED["verify_walk"]).split())
    assert (
        "int specdec_cuda_verify_walk(specdec_context* context, specdec_stream stream, int64_t* path, int64_t* length, "
        "int64_t* bonus, int64_t* tokens, int64_t* parents, int64_t* count, int64_t* chosen, int32_t nodes, "
        "int32_t rows);"
    ) in declared


@pytest.mark.parametrize("name", EXPORTED)
def test_grids_and_arguments_are_sound(generate, name: str) -> None:
    """Grids are numbers for any arguments, in Python and in C; what the grid adds does not hide an argument."""
    variant = EXPORTED[name]
    arguments, extra = generate.arguments(variant), generate.extra(variant)
    names = [parameter.name for parameter in (*arguments, *extra)]
    assert len(set(names)) == len(names)
    numbers = {p.name: 48 for p in (*arguments, *extra) if not p.pointer}
    assert len(variant.grid) <= 3 and all(isinstance(n, int) and n > 0 for n in generate.grid(variant, numbers))
    launched = re.search(r"launch\(context, 0, \{(.*)\}, arguments", generate.definition(variant, 0))[1]
    left = set(re.findall(r"[A-Za-z_]\w*", launched.replace("specdec::cdiv", ""))) - set(numbers)
    assert not left, f"{left} is known neither to the kernel nor to C"


def test_the_golden_files_are_what_the_reference_gives(tmp_path, monkeypatch) -> None:
    """Integers alone: the others are printed floats of another machine."""
    golden = load("make_golden")
    folder = Path(golden.__file__).parent / "golden"
    written = {}
    monkeypatch.setattr(golden, "write", lambda op, cases: written.update({op: cases}))
    golden.main()
    assert {path.stem for path in folder.glob("*.txt")} == set(written)
    for op, cases in written.items():
        text = (folder / f"{op}.txt").read_text()
        for name, arrays in cases.items():
            lines = dict(
                line.split(":") for line in text.split(f"case {op}/{name}\n")[1].split("case ")[0].splitlines()
            )
            assert set(lines) == set(arrays)
            for key in {"path", "length", "bonus", "escalated", "token", "parent", "count"} & set(arrays):
                assert lines[key].split() == [str(n) for n in arrays[key].flatten().tolist()], f"{op}/{name}/{key}"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not shutil.which("cmake"), reason="needs CMake")
def test_build_and_its_tests(tmp_path) -> None:
    build = tmp_path / "build"
    for command in (
        ["cmake", "-S", ROOT, "-B", build, f"-DPython3_EXECUTABLE={sys.executable}"],
        ["cmake", "--build", build],
        ["ctest", "--test-dir", build, "--output-on-failure", "--no-tests=error"],
    ):
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    header = (build / "kernels/capi/generated/specdec_entry_points.h").read_text()
    assert set(re.findall(r"int specdec_cuda_(\w+)\(", header)) == set(EXPORTED)
    library = ctypes.CDLL(str(build / "kernels/capi/libspecdec_kernels.so"))
    assert all(hasattr(library, f"specdec_cuda_{name}") for name in EXPORTED)
    needed = subprocess.run(
        ["ldd", build / "kernels/capi/libspecdec_kernels.so"], capture_output=True, text=True
    ).stdout
    assert "cuda" not in needed


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("cmake"), reason="needs CMake")
def test_without_triton_it_has_the_cpu_ops(tmp_path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\ncase "$*" in *triton*) exit 1;; esac\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    build = tmp_path / "build"
    configured = subprocess.run(
        ["cmake", "-S", str(ROOT), "-B", str(build), f"-DPython3_EXECUTABLE={python}"], capture_output=True, text=True
    )
    assert configured.returncode == 0 and "the CPU ops only" in configured.stderr
    subprocess.run(["cmake", "--build", str(build)], check=True, capture_output=True)
    tested = subprocess.run(["ctest", "--test-dir", str(build)], capture_output=True, text=True)
    assert tested.returncode == 0, tested.stdout
    library = ctypes.CDLL(str(build / "kernels/capi/libspecdec_kernels.so"))
    assert not hasattr(library, "specdec_cuda_verify_walk")
