"""Linear layers prepacked for CPUs.

The stock fp32 product repacks its weights for every call with more than one row, which makes two tokens cost almost
twice as much as one. oneDNN's packed weights avoid that. The two ops are torch's own (its compiler emits them) but not
a public API, so a test pins them and `pack_linear` falls back to the stock product where they are missing.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_ROWS_HINT = 16  # the number of rows that the layout is chosen for: a small tree


class PackedLinear(nn.Module):
    """`x @ weight.T + bias` with the weight in oneDNN's blocked layout; fp32 on a CPU, inference only."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None):
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), _ROWS_HINT)

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")


class PlainLinear(nn.Module):
    """The fallback: the stock product."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None):
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight, self.bias = weight.detach(), bias

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


def packing_available() -> bool:
    """Whether this build of torch has oneDNN and the two ops."""
    return torch.backends.mkldnn.is_available() and all(
        hasattr(torch.ops.mkldnn, op) for op in ("_reorder_linear_weight", "_linear_pointwise")
    )


def pack_linear(weight: Tensor, bias: Tensor | None = None) -> PackedLinear | PlainLinear:
    """The fastest exact linear layer for this weight [out, in]: packed for fp32 on a CPU, else the stock product."""
    packable = packing_available() and weight.dtype == torch.float32 and weight.device.type == "cpu"
    return (PackedLinear if packable else PlainLinear)(weight, None if bias is None else bias.detach())


def pack_linears(module: nn.Module) -> None:
    """Replaces every `nn.Linear` below `module`, in place; the original weights are freed."""
    for name, child in module.named_children():
        if type(child) is nn.Linear:
            setattr(module, name, pack_linear(child.weight, child.bias))
        else:
            pack_linears(child)
