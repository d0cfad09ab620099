"""Which models can be decoded here: asked once, when a model is wrapped, so that none gives wrong text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specdec.models.attention import Step
from specdec.models.cache import KVCache

if TYPE_CHECKING:
    from specdec.models.huggingface import HuggingFaceModel

_NEEDED = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
_LOGIT_FIELDS = ("logits_scaling", "logit_scale", "final_logit_softcapping")
_LAYERS = ("full_attention", "sliding_attention")
_TRY = "take a model of another family (Llama, Mistral and Qwen are tested), or decode this one with transformers"


class UnsupportedModel(ValueError):
    """A model whose text or law would not be its own if it were decoded here."""

    def __init__(self, reason: object):
        super().__init__(f"this model cannot be decoded here: {reason}; {_TRY}")


def check_config(config: Any) -> None:
    """Refuses, by name, what a config says of a forward that trees and a cache of ours cannot follow.

    Raises:
        UnsupportedModel: it is a ValueError.
    """
    if missing := [name for name in _NEEDED if getattr(config, name, None) is None]:
        raise UnsupportedModel(
            f"its config ({type(config).__name__}) has no {missing[0]}; expected a text-only causal LM with "
            "attention layers"
        )
    for name in _LOGIT_FIELDS:
        if (value := getattr(config, name, None)) not in (None, 1):
            raise UnsupportedModel(f"its config has {name} = {value}, and logits are taken from the head as they are")
    for rope in sorted(_rope_types(config)):
        if "dynamic" in rope or rope == "longrope":
            raise UnsupportedModel(f"its rope type {rope!r} changes cached positions as the text grows longer")
    if other := sorted(set(getattr(config, "layer_types", None) or ()) - set(_LAYERS)):
        raise UnsupportedModel(f"it has layers of type {other[0]!r}; expected {' or '.join(_LAYERS)}")


def _rope_types(config: Any) -> set[str]:
    """All rope types of a config; its parameters may be one table or one for each type of layer."""
    parameters = getattr(config, "rope_parameters", None) or {}
    tables = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
    return {table["rope_type"] for table in tables if table.get("rope_type")}


@torch.inference_mode()
def check_forward(backbone: HuggingFaceModel, cache: KVCache) -> None:
    """Compares our forward, of two tokens and then of two more, with the model's own of the four.

    The second pass reads what the first one cached, so a model that keeps its state elsewhere is found out too.

    Raises:
        UnsupportedModel: they differ, or ours fails.
    """
    if backbone.device.type == "meta":
        return
    ids = (torch.arange(4, device=backbone.device) % backbone.config.vocab_size)[None]
    theirs = backbone.model(input_ids=ids, use_cache=False).logits[0].float()
    try:
        ours = _logits(backbone, cache, ids)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise UnsupportedModel(f"its forward fails with tree attention ({type(error).__name__}: {error})") from error
    finite = theirs.isfinite()  # where the model itself fails, decoding says so
    if ours.shape == theirs.shape and not finite.any():
        return
    bound = (5e-3 if backbone.dtype == torch.float32 else 0.1) * theirs[finite].abs().max()
    if ours.shape != theirs.shape or not (gap := (ours - theirs)[finite].abs().max()) <= bound:
        found = f"shape {list(ours.shape)}" if ours.shape != theirs.shape else f"{gap:.3g} off"
        hint = " (it is in training mode: call eval() first)" if backbone.model.training else ""
        raise UnsupportedModel(f"logits with tree attention are not its own, {found}{hint}")


def _logits(backbone: HuggingFaceModel, cache: KVCache, ids: Tensor) -> Tensor:
    """[4, V] by two passes over a cache."""
    cache.start(1, 4)
    found = []
    for end in (2, 4):
        known, root = ids.new_tensor([end - 2]), ids.new_tensor([end - 1])
        hidden, _ = backbone.run(ids[:, end - 2 : end], Step(cache, known, root, 2, end - 1), ())
        found.append(backbone.head(hidden))
    return torch.cat(found, dim=1)[0].float()
