"""A smaller language model as the draft; any `transformers` causal LM that shares the target's tokenizer."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.models.lm import CausalLM
from specdec.protocols import Span, Verdict
from specdec.rows import Rows
from specdec.tree import DraftTree


class LMDrafter:
    """Its cache keeps the accepted nodes that it forwarded; what it did not forward is pending in the next round."""

    taps: tuple[int, ...] = ()

    def __init__(self, model: CausalLM):
        self.model = model
        self.vocab_size = model.vocab_size

    def start(self, rows: Rows, capacity: int) -> None:
        self.model.name = "draft"  # "target", a CausalLM's name by default, is taken
        self.model.start(rows, capacity)

    def observe(self, rows: Rows, span: Span | None, tree: DraftTree, verdict: Verdict) -> None:
        if tree.depth == 0:  # nothing was drafted, so the last id is pending in this cache too
            return
        slots = tree.slots.gather(1, verdict.path.clamp(min=0))
        slots = torch.where(verdict.path >= 0, slots, -1)
        self.model.commit(rows, slots, (slots >= 0).sum(-1))

    def expand(self, rows: Rows, tree: DraftTree, nodes: Tensor) -> Tensor:
        if tree.depth == 0:
            logits, _ = self.model.forward(rows)
            rows.set_cached(self.model.name, behind=0)
            return logits
        return self.model.forward(rows, tree.place(nodes))[0]

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        return draft_ids
