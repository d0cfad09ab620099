"""The draft tree: B rows of fixed capacity, parents before children, node 0 the root."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from specdec_kernels import ancestors
from torch import Tensor


@dataclass(frozen=True)
class Layer:
    """What a growth policy adds to a tree in one step; all tensors have the leading row dimension."""

    parent: Tensor  # [B, W] int64, tree nodes
    token: Tensor  # [B, W] int64, draft vocabulary
    score: Tensor  # [B, W] fp32, path log-probability
    count: Tensor  # [B] int64, the first `count` columns exist
    expand: Tensor  # [B, E] int64, columns of this layer that the drafter forwards next
    expand_count: Tensor  # [B] int64, the first `expand_count` entries of `expand` exist

    def narrow(self) -> Layer:
        """Without the columns that exist in no row: reads two numbers, saves the padding's work."""
        width, expanded = torch.stack((self.count, self.expand_count)).max(dim=1).values.tolist()
        return Layer(
            self.parent[:, :width],
            self.token[:, :width],
            self.score[:, :width],
            self.count,
            self.expand[:, :expanded],
            self.expand_count,
        )


class Placement(NamedTuple):
    """Nodes as a forward pass sees them: W queries at consecutive slots behind the root, S = start + W slots in all.

    Slot 0 is the root. `visible[b, w, s]` says whether query w attends to slot s.
    """

    tokens: Tensor  # [B, W] int64, target vocabulary
    depths: Tensor  # [B, W] int64
    parent_slots: Tensor  # [B, W] int64
    start: int  # the slot of the first query
    visible: Tensor  # [B, W, S] bool
    slot_depths: Tensor  # [B, S] int64


class DraftTree:
    """Tokens that may follow the last committed one of each row.

    Attributes (N = `size`, the columns in use):
        tokens, parents, depths [B, N] int64: node 0 is the root, the token that every row is committed to and no model
            has read; the parent of the root and of padding is -1.
        scores [B, N] fp32: path log-probability under the draft, 0 for the root.
        slots [B, N] int64: where the drafter's cache holds the node behind the root, -1 = never forwarded.
        count [B] int64: nodes that exist, the root included.
        depth: layers appended so far.
    """

    def __init__(self, roots: Tensor, capacity: int):
        rows, device = roots.shape[0], roots.device
        self.capacity = capacity
        self.size = 1
        self.depth = 0
        # one scrap column behind the capacity takes the writes of columns that do not exist
        self._tokens = torch.zeros(rows, capacity + 1, dtype=torch.long, device=device)
        self._parents = torch.full_like(self._tokens, -1)
        self._depths = torch.zeros_like(self._tokens)
        self._slots = torch.full_like(self._tokens, -1)
        self._scores = torch.zeros(rows, capacity + 1, dtype=torch.float32, device=device)
        self._tokens[:, 0] = roots
        self._slots[:, 0] = 0
        self.count = torch.ones(rows, dtype=torch.long, device=device)
        self._lineage = torch.ones(rows, 1, 1, dtype=torch.bool, device=device)  # [B, slots, slots]
        self._slot_depths = torch.zeros(rows, 1, dtype=torch.long, device=device)

    tokens = property(lambda self: self._tokens[:, : self.size])
    parents = property(lambda self: self._parents[:, : self.size])
    depths = property(lambda self: self._depths[:, : self.size])
    scores = property(lambda self: self._scores[:, : self.size])
    slots = property(lambda self: self._slots[:, : self.size])

    @property
    def root(self) -> Tensor:
        """The frontier that holds the root alone: [B, 1]."""
        return torch.zeros_like(self._tokens[:, :1])

    def append(self, layer: Layer, target_ids: Callable[[Tensor], Tensor]) -> Tensor:
        """Adds the layer's nodes; `target_ids` maps draft ids to target ids.

        Returns:
            The new frontier [B, E]: the nodes to forward next, -1 where there is none.
        Raises:
            ValueError: a single row, whose columns all exist, grows beyond the capacity. (Rows of a batch have
                different widths, which the host does not read.)
        """
        size = self.size + layer.token.shape[1]
        if len(layer.count) == 1 and size > self.capacity:
            raise ValueError(
                f"the growth policy made a tree of {size} nodes, the root included, but its capacity is "
                f"{self.capacity}; raise the capacity, or grow fewer"
            )
        column = torch.arange(layer.token.shape[1], device=layer.token.device)
        exists = column < layer.count[:, None]
        where = torch.where(exists, self.count[:, None] + column, self.capacity)
        self._tokens.scatter_(1, where, target_ids(layer.token))
        self._parents.scatter_(1, where, torch.where(exists, layer.parent, -1))
        self._depths.scatter_(1, where, self._depths.gather(1, layer.parent.clamp(min=0)) + 1)
        self._scores.scatter_(1, where, layer.score)
        self.depth += 1
        self.size = min(size, self.capacity)
        wanted = torch.arange(layer.expand.shape[1], device=layer.expand.device) < layer.expand_count[:, None]
        frontier = torch.where(wanted, self.count[:, None] + layer.expand, -1)
        self.count = self.count + layer.count
        return frontier

    def place(self, nodes: Tensor) -> Placement:
        """Gives the frontier [B, W] its slots in the drafter's cache, behind those of the earlier calls."""
        rows, width = nodes.shape
        start = self._lineage.shape[1]
        at = nodes.clamp(min=0)
        slots = (torch.arange(width, device=nodes.device) + start).expand(rows, width)
        self._slots.scatter_(1, torch.where(nodes >= 0, at, self.capacity), slots)
        parent_slots = self._slots.gather(1, self._parents.gather(1, at).clamp(min=0)).clamp(min=0)
        depths = self._depths.gather(1, at)
        inherited = self._lineage.gather(1, parent_slots[..., None].expand(-1, -1, start))
        itself = torch.eye(width, dtype=torch.bool, device=nodes.device).expand(rows, width, width)
        visible = torch.cat((inherited, itself), dim=-1)
        blind = visible.new_zeros(rows, start, width)
        self._lineage = torch.cat((torch.cat((self._lineage, blind), dim=-1), visible), dim=1)
        self._slot_depths = torch.cat((self._slot_depths, depths), dim=1)
        return Placement(self._tokens.gather(1, at), depths, parent_slots, start, visible, self._slot_depths)

    def whole(self) -> Placement:
        """All nodes below the root, node i at slot i: what a verifier reads."""
        return Placement(
            self.tokens[:, 1:],
            self.depths[:, 1:],
            self.parents[:, 1:].clamp(min=0),
            1,
            self.lineage()[:, 1:],
            self.depths,
        )

    def lineage(self) -> Tensor:
        """[B, N, N] bool: [b, i, j] = node j is node i or one of its ancestors."""
        return ancestors(self.parents)

    def subset(self, keep: Tensor, count: Tensor) -> DraftTree:
        """The tree of the nodes `keep` [B, n], ascending, node 0 first, every node's parent among them.

        The only renumbering: reranks, prunings and cuts go through it. The first `count` [B] entries are kept; slots
        stay those that the drafter gave.
        """
        width = keep.shape[1]
        tree = DraftTree(self._tokens[:, 0], capacity=width)
        tree.size, tree.depth = width, self.depth
        kept = torch.arange(width, device=keep.device) < count[:, None]
        renumbered = torch.full_like(self._tokens, -1)
        renumbered.scatter_(
            1, torch.where(kept, keep, self.capacity), torch.arange(width, device=keep.device).expand_as(keep)
        )
        parents = self._parents.gather(1, keep)
        tree._parents[:, :-1] = torch.where(kept & (parents >= 0), renumbered.gather(1, parents.clamp(min=0)), -1)
        for name, pad in (("_tokens", 0), ("_depths", 0), ("_slots", -1), ("_scores", 0.0)):
            getattr(tree, name)[:, :-1] = torch.where(kept, getattr(self, name).gather(1, keep), pad)
        tree.count = count
        return tree
