"""Any `transformers` causal LM through its own, unmodified modules: our attention and cache, hooks for the features."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from specdec.models.attention import Step
from specdec.protocols import FINAL

_NAME = "specdec_tree"
# what some models hand to their attention to change its result: sinks, biases, caps, chosen entries
_UNSUPPORTED = ("s_aux", "sinks", "position_bias", "softcap", "indices")


def _tree_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    specdec_step: Step | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """The function that transformers calls instead of SDPA; tensors [B, heads, T, d]."""
    if specdec_step is None:
        raise RuntimeError(f"attention {_NAME!r} was called outside of specdec; set another attn_implementation")
    for name in _UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise ValueError(f"its attention takes {name!r}, which tree attention does not support")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer: int = module.layer_idx  # type: ignore[assignment]
    out = specdec_step.attend(
        layer, query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), scale, sliding_window
    )
    return out.unflatten(-1, (query.shape[1], -1)), None


AttentionInterface.register(_NAME, _tree_attention)


class HuggingFaceModel:
    """Borrows a model: nothing of it is changed between two calls."""

    def __init__(self, model: PreTrainedModel):
        self.model = model
        self.config = model.config
        self.dtype, self.device = model.dtype, model.device

    def run(self, ids: Tensor, step: Step, taps: tuple[int, ...]) -> tuple[Tensor, list[Tensor]]:
        """ids [B, T] to the last hidden state after the final norm [B, T, h], and the features `taps`."""
        base = self.model.base_model
        mask = step.mask()
        if mask is None:  # a 4-D mask is what tells transformers to build none of its own
            mask = torch.ones(1, 1, 1, step.end, dtype=torch.bool, device=ids.device)
        with self._attention(), _inputs_of(base, [tap for tap in taps if tap != FINAL]) as inputs:
            out = base(
                input_ids=ids, position_ids=step.positions, attention_mask=mask, use_cache=False, specdec_step=step
            )
        inputs[FINAL] = out.last_hidden_state
        return out.last_hidden_state, [inputs[tap] for tap in taps]

    def head(self, hidden: Tensor) -> Tensor:
        return self.model.get_output_embeddings()(hidden)

    @contextmanager
    def _attention(self) -> Iterator[None]:
        before = self.config._attn_implementation
        self.config._attn_implementation = _NAME
        try:
            yield
        finally:
            self.config._attn_implementation = before


@contextmanager
def _inputs_of(base: nn.Module, taps: Sequence[int]) -> Iterator[dict[int, Tensor]]:
    """Catches the hidden states that enter the layers `taps`; tap n (the number of layers) is what the last gives."""
    inputs: dict[int, Tensor] = {}
    hooks = []
    for tap in taps:
        module = base.norm if tap == len(base.layers) else base.layers[tap]

        def catch(_: nn.Module, args: tuple, kwargs: dict, tap: int = tap) -> None:
            inputs[tap] = args[0] if args else kwargs["hidden_states"]

        hooks.append(module.register_forward_pre_hook(catch, with_kwargs=True))
    try:
        yield inputs
    finally:
        for hook in hooks:
            hook.remove()
