"""EAGLE-3 heads on disk, in the flat format of SafeAILab's releases.

A folder holds ``config.json`` (a Llama-like configuration with ``draft_vocab_size``) and ``model.safetensors`` (or
``pytorch_model.bin``) with ``fc``, ``midlayer.*``, ``norm``, ``lm_head``, ``d2t`` and ``t2d``. Sizes are read from the
tensors; the configuration adds what shapes cannot tell: the number of heads, epsilon, RoPE. SafeAILab's own reader
ignores names that it does not know and leaves missing ones random, which shows only as a draft that is never right;
this one refuses them by name.

Fields that may be absent: ``num_key_value_heads``, ``head_dim``, ``intermediate_size``, ``draft_vocab_size`` (from the
shapes); ``num_attention_heads`` (from head_dim); ``rms_norm_eps`` (1e-6); ``max_position_embeddings`` (2048);
``rope_theta`` (10000); ``tie_word_embeddings`` (false).
"""

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from specdec.checkpoints.files import (
    CONFIG,
    check_counts,
    read_config,
    read_weights,
    refuse_names,
    refuse_shapes,
    write_weights,
)
from specdec.models.eagle3 import Eagle3Config, Eagle3Head

# What marks a file of another dialect, and its name. They have converters of their own or none yet.
_OTHER_DIALECTS = {
    "speculators_model_type": "the speculators format of vLLM",
    "speculators_config": "the speculators format of vLLM",
    "transformer_layer_config": "the speculators format of vLLM",
}
_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
_COUNTS = ("num_attention_heads", "head_dim", "draft_vocab_size", "vocab_size", "target_hidden_size")


def holds_eagle3(config: Mapping[str, Any], names: Collection[str]) -> bool:
    """Whether a folder with this config.json and these tensors is an EAGLE-3 head, in whatever dialect."""
    if "draft_vocab_size" in config or config.keys() & _OTHER_DIALECTS.keys():
        return True
    return any(name == "fc.weight" or name.startswith("midlayer.") for name in names)


def load_eagle3(
    folder: str | Path,
    *,
    embed_tokens: nn.Embedding | None = None,
    lm_head_weight: Tensor | None = None,
    target_hidden_size: int,
    vocab_size: int,
    dtype: torch.dtype = torch.float32,
) -> Eagle3Head:
    """Read a head for one target.

    Args:
        folder: holds config.json and the weights.
        embed_tokens: the target's token embedding [V, h], shared with the head unless the checkpoint has its own.
        lm_head_weight: the target's output embedding [V, h]; its draft rows stand in for an absent ``lm_head.weight``
            where the configuration says ``tie_word_embeddings``.
        target_hidden_size: width of the target's hidden states.
        vocab_size: size V of the target's vocabulary.
        dtype: of the head's own weights (the shared embedding keeps its own).

    Raises:
        FileNotFoundError: no folder, configuration or weights there.
        ValueError: a damaged file; another dialect; missing, unknown or misshapen tensors; a head for another target;
            a wrong d2t.
    """
    folder = Path(folder)
    raw = read_config(folder, "an EAGLE-3 head")
    check_counts(raw, _COUNTS, folder)
    state = read_weights(folder)
    _refuse_other_dialects(raw, state, folder)
    refuse_names(state, _expected_names(), _OPTIONAL_NAMES, f"the EAGLE-3 head in {folder}")
    config = _config(raw, state, target_hidden_size, vocab_size, folder)
    d2t, t2d = draft_vocabulary_maps(state.get("d2t"), state.get("t2d"), config.draft_vocab_size, vocab_size)
    state |= {"d2t": d2t, "t2d": t2d}
    if "lm_head.weight" not in state:
        state["lm_head.weight"] = _tied_rows(raw, lm_head_weight, d2t, config, folder)
    own_embedding = "embed_tokens.weight" in state
    if not own_embedding:
        _check_embedding(embed_tokens, config, folder)
    head = Eagle3Head(config, None if own_embedding else embed_tokens)
    refuse_shapes(state, head.state_dict(), f"the EAGLE-3 head in {folder}")
    head.load_state_dict(state)
    return head.to(dtype).requires_grad_(False).eval()


def save_eagle3(
    head: Eagle3Head,
    folder: str | Path,
    *,
    tied: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Write config.json and model.safetensors.

    Args:
        tied: leave ``lm_head.weight`` out, because it is the target's output embedding at the draft's ids.
        dtype: of the floating-point tensors in the file.
        extra: any JSON object, kept under the key ``specdec`` of config.json.
    """
    folder = Path(folder)
    kept = {name: t for name, t in head.state_dict().items() if not (tied and name == "lm_head.weight")}
    write_weights(folder, kept, dtype)
    write_config(head.config, folder, tied=tied, extra=extra)


def write_config(config: Eagle3Config, folder: Path, *, tied: bool, extra: Mapping[str, Any] | None = None) -> None:
    """Write config.json; `tied` and `extra` as in ``save_eagle3``."""
    fields: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        **config.rope,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "tie_word_embeddings": tied,
    }
    if config.target_hidden_size != config.hidden_size:
        fields["target_hidden_size"] = config.target_hidden_size
    if extra:
        fields["specdec"] = dict(extra)
    (folder / CONFIG).write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


def draft_vocabulary_maps(
    d2t: Tensor | None, t2d: Tensor | None, draft_vocab_size: int, vocab_size: int
) -> tuple[Tensor, Tensor]:
    """The checked maps (d2t int64 [Vd] of offsets, t2d bool [V]); what is absent is completed if there is only one way.

    Raises ValueError where ids leave the target's vocabulary or repeat, where t2d says otherwise, or where Vd < V
    comes without a table ("the first Vd ids" would be a guess).
    """
    if d2t is None:
        if draft_vocab_size != vocab_size:
            raise ValueError(
                f"the draft predicts {draft_vocab_size} of the target's {vocab_size} ids, but its checkpoint has no "
                "d2t table that says which; use the checkpoint's complete files"
            )
        d2t = torch.zeros(vocab_size, dtype=torch.int64)
    if d2t.dtype not in (torch.int64, torch.int32) or d2t.shape != (draft_vocab_size,):
        raise ValueError(f"d2t is {d2t.dtype} {tuple(d2t.shape)}, expected int64 ({draft_vocab_size},)")
    d2t = d2t.long()
    ids = torch.arange(draft_vocab_size) + d2t
    hint = "; the table seems to hold absolute ids: subtract 0, 1, 2, ..." if _absolute(d2t, t2d, vocab_size) else ""
    rule = f"the format wants offsets, target id = draft id + d2t[draft id]{hint}"
    outside = ((ids < 0) | (ids >= vocab_size)).nonzero()[:, 0]
    if len(outside):
        first = int(outside[0])
        raise ValueError(
            f"d2t leads draft id {first} to {int(ids[first])}, outside the target's {vocab_size} ids; {rule}"
        )
    if len(ids.unique()) != len(ids):
        raise ValueError(f"d2t leads {len(ids)} draft ids to only {len(ids.unique())} target ids; {rule}")
    expected = torch.zeros(vocab_size, dtype=torch.bool)
    expected[ids] = True
    if t2d is not None:
        if t2d.shape != (vocab_size,):
            raise ValueError(f"t2d has shape {tuple(t2d.shape)}, but the target's vocabulary has {vocab_size} ids")
        differing = (t2d.bool() != expected).nonzero()[:, 0]
        if len(differing):
            raise ValueError(
                f"t2d and d2t disagree about {len(differing)} target ids, {int(differing[0])} first; {rule}"
            )
    return d2t, expected


def _absolute(d2t: Tensor, t2d: Tensor | None, vocab_size: int) -> bool:
    """Whether the table makes sense as target ids themselves."""
    if not bool((d2t[1:] > d2t[:-1]).all()) or int(d2t.min()) < 0 or int(d2t.max()) >= vocab_size:
        return False
    return t2d is None or t2d.shape != (vocab_size,) or bool(t2d[d2t].all())


def _refuse_other_dialects(raw: Mapping[str, Any], state: Mapping[str, Tensor], folder: Path) -> None:
    here = "expected SafeAILab's flat EAGLE-3 format (fc, midlayer.*, norm, lm_head, d2t, t2d)"
    for key, dialect in _OTHER_DIALECTS.items():
        if key in raw:
            raise ValueError(f"{folder} is in {dialect} ({CONFIG} has {key}), which is not read yet; {here}")
    if flags := [flag for flag in _FLAGS if raw.get(flag)]:
        raise ValueError(f"{folder} sets {', '.join(flags)}, an EAGLE-3.1 variant that is not read yet; {here}")
    if "midlayer.self_attn.q_proj.weight" not in state and any(name.startswith("layers.") for name in state):
        raise ValueError(
            f"{folder} names its layer layers.0.*: an EAGLE-1 or EAGLE-2 head, or an EAGLE-3 head in the speculators "
            f"format, neither of which is read here; {here}"
        )


def _expected_names() -> set[str]:
    """The names that every head has, apart from the optional ones."""
    layer = ["hidden_norm", "input_layernorm", "post_attention_layernorm"]
    layer += [f"self_attn.{part}_proj" for part in "qkvo"] + [f"mlp.{part}_proj" for part in ("gate", "up", "down")]
    return {"fc.weight", "norm.weight", *(f"midlayer.{name}.weight" for name in layer)}


_OPTIONAL_NAMES = {"lm_head.weight", "d2t", "t2d", "embed_tokens.weight"}


def _config(
    raw: Mapping[str, Any], state: Mapping[str, Tensor], target_hidden_size: int, vocab_size: int, folder: Path
) -> Eagle3Config:
    hidden_size, fused = state["fc.weight"].shape
    trained_for = raw.get("target_hidden_size") or target_hidden_size
    if trained_for != target_hidden_size or fused % target_hidden_size:
        stated = (
            f"target_hidden_size {trained_for}" if trained_for != target_hidden_size else f"an fc of {fused} inputs"
        )
        raise ValueError(
            f"the head in {folder} has {stated}, but this target's hidden states are {target_hidden_size} wide: "
            "it was trained for another target"
        )
    if (stated_vocab := raw.get("vocab_size", vocab_size)) != vocab_size:
        raise ValueError(
            f"the head in {folder} was trained for a vocabulary of {stated_vocab} ids, but this target has {vocab_size}"
        )
    q_rows, k_rows = (state[f"midlayer.self_attn.{part}_proj.weight"].shape[0] for part in "qk")
    head_dim = _head_dim(raw, q_rows, folder)
    if k_rows % head_dim:
        raise ValueError(
            f"k_proj of {folder} has {k_rows} rows, not a multiple of the head width {head_dim} that q_proj gives"
        )
    return Eagle3Config(
        hidden_size=hidden_size,
        target_hidden_size=target_hidden_size,
        num_heads=q_rows // head_dim,
        num_kv_heads=k_rows // head_dim,
        head_dim=head_dim,
        intermediate_size=state["midlayer.mlp.gate_proj.weight"].shape[0],
        vocab_size=vocab_size,
        draft_vocab_size=_draft_vocab_size(raw, state, vocab_size, folder),
        num_features=fused // target_hidden_size,
        rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
        max_position_embeddings=raw.get("max_position_embeddings", 2048),
        rope={key: raw[key] for key in ("rope_theta", "rope_scaling", "rope_parameters") if raw.get(key) is not None},
    )


def _head_dim(raw: Mapping[str, Any], q_rows: int, folder: Path) -> int:
    """From q_proj and the number of heads: published configurations state a wrong head_dim or none."""
    heads = raw.get("num_attention_heads")
    if not heads and raw.get("head_dim"):
        heads = q_rows // raw["head_dim"]
    if not heads or q_rows % heads:
        raise ValueError(
            f"{CONFIG} of {folder} gives num_attention_heads = {heads}, which does not divide q_proj's {q_rows} rows"
        )
    return q_rows // heads


def _draft_vocab_size(raw: Mapping[str, Any], state: Mapping[str, Tensor], vocab_size: int, folder: Path) -> int:
    sizes = {name: state[name].shape[0] for name in ("d2t", "lm_head.weight") if name in state}
    if raw.get("draft_vocab_size"):
        sizes["draft_vocab_size of config.json"] = raw["draft_vocab_size"]
    if len(set(sizes.values())) > 1:
        raise ValueError(f"{folder} contradicts itself about its vocabulary: {sizes}")
    return next(iter(sizes.values()), vocab_size)


def _tied_rows(
    raw: Mapping[str, Any], lm_head_weight: Tensor | None, d2t: Tensor, config: Eagle3Config, folder: Path
) -> Tensor:
    if not raw.get("tie_word_embeddings"):
        raise ValueError(
            f"the head in {folder} lacks lm_head.weight, and its {CONFIG} does not say tie_word_embeddings: true"
        )
    expected = (config.vocab_size, config.hidden_size)
    if lm_head_weight is None or tuple(lm_head_weight.shape) != expected:
        given = "none was given" if lm_head_weight is None else f"it is {tuple(lm_head_weight.shape)}"
        raise ValueError(f"the head in {folder} reads the target's output embedding, expected {expected}, but {given}")
    rows = (torch.arange(len(d2t)) + d2t).to(lm_head_weight.device)
    return lm_head_weight.detach()[rows].cpu()


def _check_embedding(embed_tokens: nn.Embedding | None, config: Eagle3Config, folder: Path) -> None:
    if embed_tokens is None:
        raise ValueError(f"the head in {folder} has no embed_tokens.weight of its own; pass the target's embed_tokens")
    given, expected = tuple(embed_tokens.weight.shape), (config.vocab_size, config.hidden_size)
    if given != expected:
        raise ValueError(
            f"the head in {folder} reads token embeddings of {expected}, but the target's are {given}; "
            "a head of another width needs embed_tokens.weight in its own checkpoint"
        )
