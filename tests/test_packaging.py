"""What gets installed: the mapping of kernels/, the wheel, the floors, and what an import pulls in."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import requires, version
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {"specdec": ROOT / "specdec", "specdec_kernels": ROOT / "kernels" / "specdec_kernels"}


def python(code: str, **options) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, **options)


def imported(statement: str) -> set[str]:
    """Top-level modules in memory after the statement, in a fresh interpreter."""
    done = python(f"{statement}\nimport sys; print(*sorted({{m.split('.')[0] for m in sys.modules}}))", cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """A wheel of the working tree, built from a copy so that the tree stays clean."""
    folder = tmp_path_factory.mktemp("wheel")
    tree = folder / "tree"
    for part in ("specdec", "kernels"):
        shutil.copytree(ROOT / part, tree / part, ignore=shutil.ignore_patterns("__pycache__"))
    for part in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "NOTICE"):
        shutil.copy(ROOT / part, tree)
    build = "from setuptools import build_meta; print(build_meta.build_wheel('..'))"
    done = python(build, cwd=tree)
    assert done.returncode == 0, done.stderr
    return zipfile.ZipFile(next(folder.glob("*.whl")))


def test_kernels_is_no_package() -> None:
    """`kernels` is a package that transformers imports: ours would shadow it, or overwrite it when installed."""
    assert not (ROOT / "kernels" / "__init__.py").exists(), "see kernels/README.md"


def test_transformers_imports_with_the_repository_first_on_the_path() -> None:
    """From the repository's root, `import kernels` finds our folder as a namespace; transformers must not take it."""
    done = python(
        "from importlib.metadata import distributions\n"
        "from transformers import LlamaForCausalLM\n"
        "from transformers.utils import is_kernels_available\n"
        "installed = 'kernels' in {d.name for d in distributions()}\n"
        "assert installed or not is_kernels_available(), 'transformers takes kernels/ for the package'\n",
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr


def test_wheel_has_every_file_and_no_kernels(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == set(PACKAGES)
    for package, folder in PACKAGES.items():
        sources = {f"{package}/{path.relative_to(folder)}" for path in folder.rglob("*.py")}
        assert sources <= names, f"not in the wheel (no __init__.py beside it?): {sorted(sources - names)}"
    data = {f"specdec/{path.relative_to(ROOT / 'specdec')}" for path in files(ROOT / "specdec" / "data")}
    assert data <= names, f"package data not in the wheel: {sorted(data - names)}"
    assert sum(name.endswith(("licenses/LICENSE", "licenses/NOTICE")) for name in names) == 2


def test_wheel_imports_from_anywhere(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    wheel.extractall(tmp_path)
    done = python(
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "import specdec_kernels; print(specdec_kernels.__file__)\n"
        "import specdec; print(specdec.__file__)",
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert all(line.startswith(str(tmp_path)) for line in done.stdout.split()), done.stdout


def test_kernels_need_neither_transformers_nor_specdec() -> None:
    assert not imported("import specdec_kernels") & {"transformers", "specdec", "safetensors", "typer", "gguf"}


@pytest.mark.parametrize("module", ["specdec", "specdec.cli"])
def test_help_is_instant(module: str) -> None:
    """Heavy and optional packages load when something needs them: `specdec --help` must not wait for them."""
    assert not imported(f"import {module}") & {"torch", "transformers", "triton", "gguf", "accelerate", "datasets"}


def test_version_is_the_installed_one() -> None:
    import specdec

    assert specdec.__version__ == version("specdec-kernels")


def test_floors_are_what_the_oldest_run_installs() -> None:
    floors = {
        name: floor
        for line in requires("specdec-kernels") or ()
        if "extra ==" not in line
        for name, floor in re.findall(r"^([\w-]+)>=([\d.]+)", line)
    }
    pins = dict(re.findall(r"^([\w-]+)==([\d.]+)", (ROOT / "constraints-oldest.txt").read_text(), re.MULTILINE))
    untried = {"torch", "triton"}  # their floors have no small CPU build
    assert set(pins) == set(floors) - untried
    for name, pin in pins.items():
        floor = floors[name].split(".")
        assert pin.split(".")[: len(floor)] == floor, f"{name}: setup.py says >={floors[name]}, tested is {pin}"


def test_no_upper_caps() -> None:
    """A cap in a library only breaks other people's environments."""
    capped = [line for line in requires("specdec-kernels") or () if re.search(r"<|==|~=", line.split(";")[0])]
    assert not capped


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
