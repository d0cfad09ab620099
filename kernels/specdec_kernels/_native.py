"""The ops in C++ for CPUs, called through ctypes; `library` is None where they were not built.

Built by CMake when the package is installed. Without a compiler the package works all the same, on the references.
SPECDEC_NATIVE=0 turns the native code off.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

PATH = Path(__file__).with_name("libspecdec_native.so")
DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}  # specdec_dtype
STATUS = {1: "an argument is out of range", 2: "out of memory"}  # specdec_status


def _load() -> tuple[ctypes.CDLL | None, str]:
    if os.environ.get("SPECDEC_NATIVE") == "0":
        return None, "turned off by SPECDEC_NATIVE=0"
    try:
        return ctypes.CDLL(str(PATH)), str(PATH)
    except OSError as error:
        return None, f"not built ({error}); install again where a C++ compiler is, for faster tree building"


library, reason = _load()


def direct(tensor: Tensor) -> bool:
    """Whether a public function may skip the registered op, which costs 20 to 40 us: nobody traces a plain tensor."""
    plain = type(tensor) is Tensor and tensor.device.type == "cpu" and not tensor.requires_grad
    return plain and not torch.compiler.is_compiling()


def call(name: str, *arguments: Tensor | int | float | None) -> None:
    """Calls `specdec_cpu_<name>`: tensors as data pointers (contiguous, on the CPU), ints as int64, floats as double.

    Raises:
        RuntimeError: the status that the function returned, in words.
    """
    function = _functions.get(name) or _typed(name, arguments)
    status = function(*[_pointer(value) if isinstance(value, Tensor) else value for value in arguments])
    if status:
        raise RuntimeError(f"{name}: {STATUS.get(status, f'status {status}')}")


_functions: dict[str, Any] = {}


def _typed(name: str, arguments: Sequence[Tensor | int | float | None]) -> Any:
    """The function with its argument types, which are the same in every call: converting each anew costs 10 us."""
    types = {int: ctypes.c_int64, float: ctypes.c_double}
    function = getattr(library, f"specdec_cpu_{name}")
    function.argtypes = [types.get(type(value), ctypes.c_void_p) for value in arguments]
    _functions[name] = function
    return function


def _pointer(tensor: Tensor) -> int:
    assert tensor.is_contiguous() and tensor.device.type == "cpu", (tensor.shape, tensor.stride(), tensor.device)
    return tensor.data_ptr()
