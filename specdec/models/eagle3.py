"""The EAGLE-3 draft head: one decoder layer over (token, target features), as in SafeAILab's published checkpoints.

For a draft position t that consumes the token x_{t+1} and the target's features f_t (EAGLE-3, section 3.1 and figure 5;
shapes and order from the released weights):

    g      = fc(f_t)                                       f_t: F hidden states of the target, [F * h_t] -> [h]
    q,k,v  = W_q,k,v [RMS_in(embed(x_{t+1})) | RMS_hid(g)]  embedding first; RoPE at position t on q and k
    y      = g + W_o attention(q, k, v)                    the residual is g before its norm
    out    = y + SwiGLU(RMS_post(y))                       out stands in for g at the next step of the recursion
    logits = lm_head(RMS(out))                             over the draft vocabulary, Vd <= V ids

The head holds no cache and computes no attention: training and drafting each bring their own.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding


@dataclass(frozen=True)
class Eagle3Config:
    """Sizes and constants of a head; the loader takes the sizes from the tensors, the rest from ``config.json``."""

    hidden_size: int
    """Width h of the draft layer and of its token embedding."""
    target_hidden_size: int
    """Width h_t of one target hidden state."""
    num_heads: int
    """Query heads."""
    num_kv_heads: int
    """Key and value heads."""
    head_dim: int
    """Width of one head; num_heads * head_dim need not be hidden_size."""
    intermediate_size: int
    """Inner width of the MLP."""
    vocab_size: int
    """Size V of the target's vocabulary."""
    draft_vocab_size: int
    """Size Vd of the vocabulary that the head predicts."""
    num_features: int = 3
    """How many target hidden states are concatenated (F)."""
    rms_norm_eps: float = 1e-6
    """Epsilon of every RMSNorm."""
    max_position_embeddings: int = 2048
    """Only a parameter of some RoPE scalings; positions beyond it are computed like any other."""
    rope: dict[str, Any] = field(default_factory=dict)
    """The draft's own RoPE fields as its config.json has them: rope_theta and rope_scaling, or rope_parameters."""
    # Flags of later dialects (norm_before_residual, norm_before_fc, fc_norm, norm_output) belong here.

    def rotary_config(self) -> LlamaConfig:
        """The same RoPE as a transformers config, which knows both the old and the new spelling of the fields."""
        return LlamaConfig(
            hidden_size=self.hidden_size,
            num_attention_heads=self.num_heads,
            head_dim=self.head_dim,
            max_position_embeddings=self.max_position_embeddings,
            **self.rope,
        )


def default_taps(num_layers: int) -> tuple[int, int, int]:
    """EAGLE-3's three layers (0-based), whose *inputs* are the features: 2, n // 2, n - 3 of n.

    Raises ValueError where the rule does not give three different layers (n < 7).
    """
    taps = (2, num_layers // 2, num_layers - 3)
    if not 0 <= taps[0] < taps[1] < taps[2]:
        raise ValueError(
            f"the rule (2, n // 2, n - 3) gives {taps} for n = {num_layers} layers; name the taps yourself, as "
            '"specdec": {"taps": [...]} in the config.json of the head'
        )
    return taps


class RMSNorm(nn.Module):
    """x / rms(x) * weight, computed in fp32 and returned in the dtype of `x`; [..., width] -> [..., width]."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).to(x.dtype)


class _Attention(nn.Module):
    """The projections around the attention, which the caller computes."""

    def __init__(self, config: Eagle3Config):
        super().__init__()
        width, inner = 2 * config.hidden_size, config.num_heads * config.head_dim
        self.q_proj = nn.Linear(width, inner, bias=False)
        self.k_proj = nn.Linear(width, config.num_kv_heads * config.head_dim, bias=False)
        self.v_proj = nn.Linear(width, config.num_kv_heads * config.head_dim, bias=False)
        self.o_proj = nn.Linear(inner, config.hidden_size, bias=False)


class _SwiGLU(nn.Module):
    def __init__(self, config: Eagle3Config):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class _MidLayer(nn.Module):
    def __init__(self, config: Eagle3Config):
        super().__init__()
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = _Attention(config)
        self.mlp = _SwiGLU(config)


class Eagle3Head(nn.Module):
    """The head's weights, named as in the checkpoint format, and the pieces of its forward.

    Args:
        config: sizes and constants.
        embed_tokens: the token embedding [V, h] to share with the target. It is not registered, so ``state_dict``,
            ``parameters`` and ``to`` leave it alone. Without one, the head owns (and saves) its own.

    Buffers ``d2t`` int64 [Vd] (target id minus draft id) and ``t2d`` bool [V] (is this target id drafted) start as the
    identity, that is, zeros and the first Vd ids.
    """

    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: Eagle3Config, embed_tokens: nn.Embedding | None = None):
        super().__init__()
        self.config = config
        self.embed_tokens: nn.Embedding
        if embed_tokens is None:
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        else:
            self.__dict__["embed_tokens"] = embed_tokens  # past nn.Module.__setattr__, which would register it
        self.fc = nn.Linear(config.num_features * config.target_hidden_size, config.hidden_size, bias=False)
        self.midlayer = _MidLayer(config)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.arange(config.vocab_size) < config.draft_vocab_size)
        self.rotary = LlamaRotaryEmbedding(config.rotary_config())

    def _apply(self, fn: Any, recurse: bool = True) -> "Eagle3Head":
        super()._apply(fn, recurse)
        frequencies = self.rotary.inv_freq
        if frequencies.dtype != torch.float32:  # half-precision weights, yet never half-precision angles
            self.rotary = LlamaRotaryEmbedding(self.config.rotary_config()).to(device=frequencies.device)
        return self

    def fuse(self, features: Tensor) -> Tensor:
        """Target features [..., F*h_t] (low | mid | high) of any float dtype to [..., h] in the head's dtype."""
        return self.fc(features.to(self.norm.weight.dtype))

    def rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """(cos, sin), each fp32 [B, T, head_dim], of absolute positions [B, T], from the draft's own RoPE fields."""
        like = torch.empty(0, dtype=torch.float32, device=positions.device)
        return self.rotary(like, positions)

    def project(self, token_embeds: Tensor, hidden: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The attention's inputs.

        Args:
            token_embeds: [B, T, h], embeddings of the tokens one ahead of their features.
            hidden: [B, T, h], fused features, or `out` of the previous step.
            cos, sin: [B, T, head_dim] from `rope`.

        Returns:
            q [B, T, num_heads, head_dim], k and v [B, T, num_kv_heads, head_dim]; q and k are rotated, not scaled.
        """
        layer, head_dim = self.midlayer, self.config.head_dim
        pair = torch.cat((layer.input_layernorm(token_embeds.to(hidden.dtype)), layer.hidden_norm(hidden)), dim=-1)
        q, k, v = (
            projection(pair).unflatten(-1, (-1, head_dim))
            for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj)
        )
        return _rotate(q, cos, sin), _rotate(k, cos, sin), v

    def finish(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """The rest of the layer.

        Args:
            hidden: [B, T, h], the same un-normed tensor that `project` took: the residual.
            attended: [B, T, num_heads*head_dim], the attention's output, heads side by side.

        Returns:
            [B, T, h], before the final norm: what `logits` reads and what the next step takes as `hidden`.
        """
        layer = self.midlayer
        hidden = hidden + layer.self_attn.o_proj(attended)
        return hidden + layer.mlp(layer.post_attention_layernorm(hidden))

    def logits(self, out: Tensor) -> Tensor:
        """Raw logits [..., Vd] of the token after the one that was embedded, from `out` [..., h]."""
        return self.lm_head(self.norm(out))

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """Ids of the target's vocabulary for ids of the draft's; any shape, int64."""
        return draft_ids + self.d2t[draft_ids]


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate-half RoPE of x [B, T, H, d] by cos, sin [B, T, d]."""
    cos, sin = cos.unsqueeze(-2).to(x.dtype), sin.unsqueeze(-2).to(x.dtype)
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin
