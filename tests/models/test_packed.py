"""Packed linear layers: the same product, two private torch ops that are pinned here, and the fallback."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from specdec.models import packed
from specdec.models.packed import PackedLinear, PlainLinear, pack_linear, pack_linears, packing_available

needs_packing = pytest.mark.skipif(not packing_available(), reason="this torch has no oneDNN packing ops")


@needs_packing
def test_the_private_ops_have_the_signature_we_call() -> None:
    """If a torch release changes them, this fails first; `packing_available` only sees whether they exist."""
    ops = torch.ops.mkldnn
    arguments = "Tensor X, Tensor W, Tensor? B, str attr, Scalar?[] scalars, str? algorithm"
    assert f"({arguments})" in str(ops._linear_pointwise.default._schema)
    assert re.search(
        r"\(Tensor self, (Sym)?[Ii]nt\? batch_size=None\)", str(ops._reorder_linear_weight.default._schema)
    )


@needs_packing
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 1, 48), (1, 2, 48), (3, 7, 48), (60, 48), (1, 60, 48)], ids=str)
def test_equals_the_stock_product(shape, bias: bool) -> None:
    """For every number of rows: the layout is chosen for few, and must be right for all."""
    torch.manual_seed(0)
    linear = nn.Linear(48, 80, bias=bias)
    layer = pack_linear(linear.weight, linear.bias)
    assert isinstance(layer, PackedLinear)
    x = torch.randn(shape)
    torch.testing.assert_close(layer(x), linear(x), atol=1e-5, rtol=1e-5)
    strided = torch.randn(*shape[:-1], 96)[..., ::2]
    torch.testing.assert_close(layer(strided), linear(strided), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("missing", ["_reorder_linear_weight", "_linear_pointwise"])
def test_the_fallback(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch without one of the ops (or without oneDNN) computes the same with the stock product."""

    class Ops:
        def __getattr__(self, name):
            if name == missing:
                raise AttributeError(name)
            return lambda *args: None

    monkeypatch.setattr(packed.torch.ops, "mkldnn", Ops())
    assert not packing_available()
    weight, bias, x = torch.randn(5, 4), torch.randn(5), torch.randn(2, 3, 4)
    layer = pack_linear(weight, bias)
    assert isinstance(layer, PlainLinear)
    assert torch.equal(layer(x), F.linear(x, weight, bias))


def test_other_dtypes_are_not_packed() -> None:
    """oneDNN would round differently, or not at all."""
    assert isinstance(pack_linear(torch.randn(3, 4).bfloat16()), PlainLinear)


def test_a_module_is_packed_in_place() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 8), nn.Sequential(nn.ReLU(), nn.Linear(8, 3, bias=False))).requires_grad_(False)
    x = torch.randn(2, 4)
    expected = module(x)
    pack_linears(module)
    assert not any(type(child) is nn.Linear for child in module.modules())
    torch.testing.assert_close(module(x), expected)
