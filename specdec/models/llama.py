"""A lean forward pass of the Llama family for CPUs, on packed weights.

The arithmetic is that of transformers' Llama, Mistral, Qwen2 and Qwen3 (tests compare them); what is left out is the
per-call machinery, and q, k, v as well as gate and up are one product each.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdec.models.attention import Step
from specdec.models.packed import pack_linear
from specdec.protocols import FINAL

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


def supports(model: PreTrainedModel) -> str | None:
    """None where this forward computes what the model does, else the reason why not."""
    config = model.config
    if config.model_type not in FAMILIES:
        return f"model type {config.model_type!r} is not one of {', '.join(FAMILIES)}"
    if config.hidden_act != "silu":
        return f"activation {config.hidden_act!r} is not 'silu'"
    odd = [name for name, module in model.named_modules() if hasattr(module, "weight") and not _plain(module)]
    return f"{odd[0]} is not a plain layer" if odd else None


def _plain(module: nn.Module) -> bool:
    return type(module) in (nn.Linear, nn.Embedding) or type(module).__name__.endswith("RMSNorm")


class LeanLayer:
    """One decoder layer, taken from `transformers`' module; its projections are emptied as they are packed."""

    def __init__(self, layer: nn.Module, window: int | None):
        attention, mlp = layer.self_attn, layer.mlp
        self.index = attention.layer_idx
        self.window = window
        self.head_dim = attention.head_dim
        self.scale = attention.scaling
        self.heads = attention.q_proj.out_features // self.head_dim
        self.kv_heads = attention.k_proj.out_features // self.head_dim
        self.qkv = _fused(attention.q_proj, attention.k_proj, attention.v_proj)
        self.out = _fused(attention.o_proj)
        self.gate_up = _fused(mlp.gate_proj, mlp.up_proj)
        self.down = _fused(mlp.down_proj)
        self.norm_in = layer.input_layernorm
        self.norm_post = layer.post_attention_layernorm
        self.norm_q = getattr(attention, "q_norm", None)
        self.norm_k = getattr(attention, "k_norm", None)

    def __call__(self, hidden: Tensor, cos: Tensor, sin: Tensor, step: Step) -> Tensor:
        query, key, value = (
            self.qkv(_rms_norm(hidden, self.norm_in))
            .unflatten(-1, (-1, self.head_dim))
            .split((self.heads, self.kv_heads, self.kv_heads), dim=2)
        )
        if self.norm_q is not None:
            query, key = _rms_norm(query, self.norm_q), _rms_norm(key, self.norm_k)
        query, key = _rotate(query, cos, sin), _rotate(key, cos, sin)
        hidden = hidden + self.out(step.attend(self.index, query, key, value, self.scale, self.window))
        gate, up = self.gate_up(_rms_norm(hidden, self.norm_post)).chunk(2, dim=-1)
        return hidden + self.down(F.silu(gate) * up)


class LeanLlama:
    """Takes over the weights of a `transformers` model, which is not usable afterwards."""

    def __init__(self, model: PreTrainedModel):
        if (reason := supports(model)) is not None:
            raise ValueError(f"no lean forward for this model: {reason}")
        self.config = model.config
        base = model.base_model
        self.embed_tokens = base.embed_tokens
        self.rotary = base.rotary_emb
        self.norm = base.norm
        self.lm_head = pack_linear(model.lm_head.weight, model.lm_head.bias)
        if model.lm_head.weight is not self.embed_tokens.weight:
            model.lm_head.weight = None
        self.layers = [
            LeanLayer(layer, window) for layer, window in zip(base.layers, layer_windows(model.config), strict=True)
        ]
        for parameter in base.parameters():  # what is left would keep the checkpoint's memory map, all of it, in memory
            parameter.data = parameter.data.clone()
        self.dtype, self.device = self.embed_tokens.weight.dtype, self.embed_tokens.weight.device

    def run(self, ids: Tensor, step: Step, taps: tuple[int, ...]) -> tuple[Tensor, list[Tensor]]:
        """ids [B, T] to the last hidden state after the final norm [B, T, h], and the features `taps`."""
        hidden = self.embed_tokens(ids)
        cos, sin = self.rotary(hidden, step.positions)
        half = cos.shape[-1] // 2
        cos, sin = cos[:, :, None, :half], sin[:, :, None, :half]
        inputs = {}
        for layer in self.layers:
            if layer.index in taps:
                inputs[layer.index] = hidden
            hidden = layer(hidden, cos, sin, step)
        inputs[len(self.layers)] = hidden
        inputs[FINAL] = _rms_norm(hidden, self.norm)
        return inputs[FINAL], [inputs[tap] for tap in taps]

    def head(self, hidden: Tensor) -> Tensor:
        return self.lm_head(hidden)


def layer_windows(config: object) -> list[int | None]:
    """The sliding window of each layer in positions, None for full attention."""
    window = getattr(config, "sliding_window", None)
    layers: int = config.num_hidden_layers  # type: ignore[attr-defined]
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return [window] * layers
    return [window if kind == "sliding_attention" else None for kind in kinds]


def _fused(*linears: nn.Linear) -> nn.Module:
    weight = torch.cat([linear.weight for linear in linears]) if len(linears) > 1 else linears[0].weight
    bias = None if linears[0].bias is None else torch.cat([linear.bias for linear in linears])
    packed = pack_linear(weight, bias)
    for linear in linears:
        linear.weight = None  # the packed copy is the only one that stays
    return packed


def _rms_norm(x: Tensor, norm: nn.Module) -> Tensor:
    return F.rms_norm(x, norm.weight.shape, norm.weight, norm.variance_epsilon)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of [B, T, heads, d] by half angles [B, T, 1, d / 2]."""
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)
