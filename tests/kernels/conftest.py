"""The ops' tests run three ways: on the native code, under TRITON_INTERPRET=1 on the Triton kernels (`make test`
starts both), and on a GPU (`make test-gpu`). `device` is where the inputs of a test live."""

from __future__ import annotations

import sys

import pytest
import torch
from specdec_kernels import _native
from specdec_kernels._lang import INTERPRETED

UNWRITTEN = -(2**40) - 7  # an index that crashes or differs, never one that happens to be right


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that take `device` are the ones that the interpreter's process runs."""
    for item in items:
        if "device" in getattr(item, "fixturenames", ()):
            item.add_marker("kernel")


@pytest.fixture(scope="session", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda":
        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")
    elif not (INTERPRETED or _native.library):
        pytest.skip(f"the native ops are missing: {_native.reason}")
    return request.param


@pytest.fixture(autouse=True)
def unwritten_outputs_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the package allocates uninitialised comes filled with NaN, or with an absurd integer."""

    def poisoned(make):
        def call(*args, **kwargs):
            out = make(*args, **kwargs)
            ours = sys._getframe(1).f_globals.get("__name__", "").startswith("specdec_kernels")
            if ours and type(out) is torch.Tensor and out.dtype not in (torch.bool, torch.uint8):
                value = float("nan") if out.is_floating_point() else max(UNWRITTEN, torch.iinfo(out.dtype).min)
                out.fill_(value)
            return out

        return call

    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poisoned(torch.empty_like))
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned(torch.Tensor.new_empty))
