"""The EAGLE-3 draft: one decoder layer that reads the target's features, then its own hidden states.

Entry t of its cache comes from the pair (feature_t, id_{t+1}) at position t, so it stands one behind the target's. The
entries of committed tokens are always made from the target's features: those that were guessed while drafting are
dropped at the end of the round.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from specdec.models.attention import Step
from specdec.models.cache import KVCache
from specdec.models.eagle3 import Eagle3Head
from specdec.protocols import Span, Verdict
from specdec.rows import Rows
from specdec.tree import DraftTree

_NAME = "draft"


class Eagle3Drafter:
    """Drafts with an EAGLE-3 head.

    Args:
        head: the network; its dtype is the dtype of the cache.
        taps: the target layers whose inputs it was trained on, lowest first.
        rank_acceptance: chance that the b-th best child is accepted, where it was measured (see `cost.plan`).
    """

    def __init__(self, head: Eagle3Head, taps: tuple[int, ...], rank_acceptance: tuple[float, ...] | None = None):
        config = head.config
        if len(taps) != config.num_features:
            raise ValueError(
                f"{len(taps)} taps {taps} were given, but the head's fc reads {config.num_features} features"
            )
        self.head, self.taps, self.rank_acceptance = head, taps, rank_acceptance
        self.vocab_size = config.draft_vocab_size
        self.dtype = head.norm.weight.dtype
        self.cache = KVCache(1, config.num_kv_heads, config.head_dim, self.dtype, head.d2t.device)
        self.calls = 0
        self._rows: Callable[[], Rows | None] = lambda: None  # whose entries the cache holds
        self._span: Span | None = None
        self._hidden = torch.empty(0)  # by slot of the current tree, [B, S, h]

    def start(self, rows: Rows, capacity: int) -> None:
        rows.start_cache(_NAME)
        self.cache.start(len(rows), capacity)
        self._rows = weakref.ref(rows)

    def observe(self, rows: Rows, span: Span | None, tree: DraftTree, verdict: Verdict) -> None:
        if self._rows() is rows:  # else `expand` will refuse to go on
            self._span = span

    def expand(self, rows: Rows, tree: DraftTree, nodes: Tensor) -> Tensor:
        if self._rows() is not rows:
            raise RuntimeError(
                "another generation was started on this EAGLE-3 drafter while this one was running; "
                "finish a stream before the next one starts, or give each a drafter of its own"
            )
        self.calls += 1
        if tree.depth == 0:
            return self._catch_up(rows)
        placement = tree.place(nodes)
        step = Step(self.cache, rows.cached[_NAME], rows.length - 2, 0, max(rows.host.length) - 2, placement)
        slots = placement.parent_slots[..., None].expand(-1, -1, self._hidden.shape[-1])
        out = self._layer(placement.tokens, self._hidden.gather(1, slots), step)
        self._hidden = torch.cat((self._hidden, out), dim=1)
        return self.head.logits(out)

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        return self.head.target_ids(draft_ids)

    @torch.inference_mode()
    def _catch_up(self, rows: Rows) -> Tensor:
        """The first forward of a round: the pairs that were committed since the last one; logits of the newest."""
        pairs = rows.pending(_NAME) - 1
        step = Step(self.cache, rows.cached[_NAME], rows.length - 2, pairs, max(rows.host.length) - 2)
        start, features, _ = self._span  # type: ignore[misc]
        columns = (step.positions - start[:, None]).clamp(min=0)
        features = features.gather(1, columns[..., None].expand(-1, -1, features.shape[-1])).to(self.dtype)
        out = self._layer(rows.window(pairs), self.head.fuse(features), step)
        rows.set_cached(_NAME, behind=1)
        self._hidden = out[:, -1:]
        return self.head.logits(self._hidden)

    @torch.inference_mode()
    def _layer(self, tokens: Tensor, hidden: Tensor, step: Step) -> Tensor:
        head = self.head
        cos, sin = head.rope(step.positions)
        embeds = head.embed_tokens(tokens).to(self.dtype)
        query, key, value = head.project(embeds, hidden, cos, sin)
        scale = head.config.head_dim**-0.5
        return head.finish(hidden, step.attend(0, query, key, value, scale))
