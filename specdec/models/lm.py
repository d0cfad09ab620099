"""One wrapper for target, proxy and draft model: pending ids and tree nodes in, logits and features out."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdec.models import llama
from specdec.models.attention import Step
from specdec.models.cache import KVCache
from specdec.models.huggingface import HuggingFaceModel
from specdec.models.support import check_config, check_forward
from specdec.protocols import Span
from specdec.rows import Rows
from specdec.tree import Placement


class Backbone(Protocol):
    """The arithmetic of a model: `huggingface.HuggingFaceModel` or `llama.LeanLlama`."""

    config: object
    dtype: torch.dtype
    device: torch.device

    def run(self, ids: Tensor, step: Step, taps: tuple[int, ...]) -> tuple[Tensor, list[Tensor]]: ...

    def head(self, hidden: Tensor) -> Tensor: ...


class CausalLM:
    """A causal language model with a cache of its own.

    Attributes:
        name: its key in `Rows.cached`.
        taps: layers whose inputs are the features (n, of n layers: what the last one gives), or `FINAL`.
        calls: forward passes so far.
        generation_config: the model's, or its config where it has none.
    """

    def __init__(self, model: PreTrainedModel, name: str = "target", lean: bool = False):
        """
        Args:
            model: a `transformers` causal LM; it is borrowed.
            lean: take over its weights for the lean CPU forward; the model is not usable afterwards.

        Raises:
            ValueError: the model's text would not be its own here; it says why.
        """
        check_config(model.config)
        self.backbone: Backbone = llama.LeanLlama(model) if lean else HuggingFaceModel(model)
        self.config = config = model.config
        self.name = name
        self.embed_tokens: nn.Embedding = model.get_input_embeddings()
        self.taps: tuple[int, ...] = ()
        self.calls = 0
        self._rows: Callable[[], Rows | None] = lambda: None  # whose entries the cache holds
        self.vocab_size: int = config.vocab_size
        self.context: int = config.max_position_embeddings
        # as `transformers.generate` has it: the generation config decides, even where the model's config says otherwise
        generation = getattr(model, "generation_config", None) or config
        self.generation_config = generation
        self.eos_token_ids = _as_ids(generation.eos_token_id)
        self.dtype, self.device = self.backbone.dtype, self.backbone.device
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        self.cache = KVCache(config.num_hidden_layers, kv_heads, head_dim, self.dtype, self.device)
        if isinstance(self.backbone, HuggingFaceModel):
            check_forward(self.backbone, self.cache)

    @torch.inference_mode()
    def output_embedding(self) -> Tensor:
        """The head's weight [V, h], read by asking the head: it may be packed or quantised, or share the embedding."""
        if self.config.tie_word_embeddings:
            return self.embed_tokens.weight
        width = self.embed_tokens.weight.shape[1]
        return self.backbone.head(torch.eye(width, dtype=self.dtype, device=self.device)).T

    def start(self, rows: Rows, capacity: int) -> None:
        """Empties the cache for new rows and makes room for `capacity` entries a row."""
        rows.start_cache(self.name)
        self.cache.start(len(rows), capacity)
        self._rows = weakref.ref(rows)

    @torch.inference_mode()
    def forward(self, rows: Rows, tree: Placement | None = None) -> tuple[Tensor, Span | None]:
        """Reads the pending ids of each row, then the nodes of its tree.

        The entries are written but not counted: `Rows.cached` moves when they are committed.

        Returns:
            Logits [B, M, V] behind the last pending id (column 0, if anything was pending) and behind each node, and
            the features of every column (None without taps).
        Raises:
            RuntimeError: the cache has been given to other rows meanwhile.
        """
        if self._rows() is not rows:
            raise RuntimeError(
                f"another generation was started on this model ({self.name}) while this one was running; "
                "finish a stream before the next one starts, or give each a model of its own"
            )
        self.calls += 1
        pending = rows.pending(self.name)
        last = max(rows.host.length) - 1
        step = Step(self.cache, rows.cached[self.name], rows.root_entries, pending, last, tree)
        ids = rows.window(pending)
        if tree is not None:
            ids = torch.cat((ids, tree.tokens), dim=1)
        hidden, features = self.backbone.run(ids, step, self.taps)
        logits = self.backbone.head(hidden[:, max(pending - 1, 0) :])
        if not features:
            return logits, None
        return logits, Span(rows.length - pending, torch.cat(features, dim=-1), self.name)

    def commit(self, rows: Rows, slots: Tensor, length: Tensor) -> None:
        """Keeps the pending ids and the tree entries at `slots` [B, D], the first `length` [B] of them.

        Called before the rows are extended: the root is still the last id.
        """
        if slots.shape[1]:
            self.cache.commit(rows.length[:, None] - 1 + slots.clamp(min=0), rows.length, length)
        rows.cached[self.name] = rows.length + length


def _as_ids(value: int | list[int] | None) -> frozenset[int]:
    return frozenset() if value is None else frozenset([value] if isinstance(value, int) else value)
