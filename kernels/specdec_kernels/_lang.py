"""Triton, or a stand-in where it is not installed, and the `@triton.jit` helpers that kernels share.

Set TRITON_INTERPRET=1 before the first import and every op on CPU tensors runs its Triton kernel in the interpreter:
that is how the kernels are tested without a GPU.
"""

from __future__ import annotations

import os
from typing import Any

from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # no Triton on this platform: the CPU code and the references work, a launch says what is missing

    class _Kernel:
        def __init__(self, function: Any = None, **options: Any):
            self.__name__ = getattr(function, "__name__", "")

        def __call__(self, function: Any) -> _Kernel:  # of a decorator with options
            return _Kernel(function)

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


def unit_stride(x: Tensor) -> Tensor:
    """The tensor with its last dimension contiguous, as the kernels read it; the others keep their strides."""
    return x if x.stride(-1) == 1 else x.contiguous()


@triton.jit
def last_arrival(counter_ptr, parts):
    """Whether this program is the last of `parts` that come here: it may read what the others stored before.

    The counter, zero at first, is zero again afterwards: a launch can be repeated.
    """
    tl.debug_barrier()  # the stores of all threads come before the ticket, which one thread takes
    last = tl.atomic_add(counter_ptr, 1, sem="acq_rel") == parts - 1
    if last:
        tl.store(counter_ptr, 0)
    return last


@triton.jit
def ordered(x):
    """fp32 -> int32 in the same order; NaN lies beyond the infinities, on either side."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def rank_key(score, index):
    """int64, larger is better: by score (no NaN, no -0.0) descending, then by index (int32, >= 0) ascending."""
    return (ordered(score).to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)


@triton.jit
def key_score(key):
    """The score in a `rank_key`."""
    bits = (key >> 32).to(tl.int32)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)


@triton.jit
def key_index(key):
    """The index in a `rank_key`."""
    return 0x7FFFFFFF - (key & 0x7FFFFFFF)
