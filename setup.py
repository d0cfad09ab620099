"""Everything the package index needs to know; pyproject.toml holds the build system and tool settings only."""

import subprocess
import sys
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

HERE = Path(__file__).parent

demo = ["gguf>=0.19"]  # reads the weights of the embedded default
bench = ["pytest-benchmark>=5.3"]
train = ["accelerate>=1.15"]  # accelerate: transformers.Trainer asks for it


class CMakeBuild(build_ext):
    """The C++ ops by CMake. They are optional: without a compiler the package installs and runs on its references."""

    def get_ext_filename(self, name: str) -> str:  # a plain library for ctypes, of no Python version
        return "/".join([*name.split(".")[:-1], "libspecdec_native.so"])

    def build_extension(self, ext: Extension) -> None:
        library, build = Path(self.get_ext_fullpath(ext.name)), Path(self.build_temp).resolve() / "native"
        try:
            # the build is in a folder of its own, which a change of the installing Python does not spoil
            configure = [f"-B{build}", f"-S{HERE}", "-DSPECDEC_NATIVE_ONLY=ON", "-DCMAKE_BUILD_TYPE=Release"]
            subprocess.run(["cmake", *configure], check=True, stdout=sys.stderr)
            subprocess.run(
                ["cmake", "--build", str(build), "--target", "specdec_native"], check=True, stdout=sys.stderr
            )
            library.parent.mkdir(parents=True, exist_ok=True)
            self.copy_file(str(build / library.name), str(library))
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"specdec-kernels: the C++ ops were not built ({error}); torch does their work", file=sys.stderr)


setup(
    name="specdec-kernels",
    version="0.1.0",  # the only place; specdec.__version__ reads the installed metadata
    description="Speculative decoding with draft trees: the same text as your model alone, in fewer passes.",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE", "NOTICE"],
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
    keywords="speculative-decoding llm inference eagle talon transformers triton",
    # `kernels` is also the import name of a package that transformers imports, so the folder kernels/ is never a
    # package itself: only what lies in it is one, and it is mapped here. tests/test_packaging.py guards this.
    packages=[
        *find_packages(include=["specdec", "specdec.*"]),
        *find_packages("kernels", include=["specdec_kernels", "specdec_kernels.*"]),
    ],
    package_dir={"specdec_kernels": "kernels/specdec_kernels"},
    package_data={"specdec": ["data/**", "py.typed"], "specdec_kernels": ["py.typed", "native/*"]},
    ext_modules=[Extension("specdec_kernels._native_library", sources=[], optional=True)],
    cmdclass={"build_ext": CMakeBuild},
    entry_points={"console_scripts": ["specdec = specdec.cli:app"]},
    python_requires=">=3.10",
    # No upper caps: they only break other people's environments; `specdec doctor` warns past the tested versions.
    # The floors are what `make test-oldest` runs with (constraints-oldest.txt); those of the extras what CI has.
    install_requires=[
        "torch>=2.11",
        "transformers>=5.17",
        "safetensors>=0.8",
        "huggingface_hub>=1.24",
        "numpy>=2.0",
        "typer>=0.26",
        "rich>=14.0",
        "triton>=3.6; platform_system == 'Linux'",  # torch's CPU builds bring none
    ],
    extras_require={
        "demo": demo,
        "bench": bench,
        "train": train,
        "flash": ["flash-attn"],
        "dev": [
            *demo,
            *bench,
            *train,
            "hypothesis>=6.100",
            "mypy>=1.15",
            "pytest>=9.0",
            "pytest-timeout>=2.3",
            "ruff>=0.12",
            "setuptools>=77",  # test_packaging builds a wheel; Python 3.12+ venvs bring none
        ],
    },
)
