"""Triton, or a stand-in where it is not installed, and the `@triton.jit` helpers that kernels share.

Set TRITON_INTERPRET=1 before the first import and every op on CPU tensors runs its Triton kernel in the interpreter:
that is how the kernels are tested without a GPU.
"""

from __future__ import annotations

import os
from typing import Any

try:
    import triton
    import triton.language as tl
except ImportError:  # no Triton on this platform: the CPU code and the references work, a launch says what is missing

    class _Kernel:
        def __init__(self, function: Any):
            self.__name__ = function.__name__

        def __getitem__(self, grid: Any) -> Any:
            raise ImportError(f"{self.__name__} is a Triton kernel, and triton is not installed: pip install triton")

    class _Missing:
        def __getattr__(self, name: str) -> Any:
            return _Kernel if name == "jit" else self

    triton = tl = _Missing()

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def block(n: int, least: int = 1) -> int:
    """The power of two that holds `n`: the width of a block."""
    return max(least, 1 << max(n - 1, 0).bit_length())
