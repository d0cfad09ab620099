"""Tree attention for one forward pass: where its tokens are written and which entries each of them sees."""

from __future__ import annotations

from functools import cached_property

import torch
import torch.nn.functional as F
from specdec_kernels import ancestor_words, tree_attention
from specdec_kernels._lang import INTERPRETED
from torch import Tensor

from specdec.models.cache import KVCache
from specdec.tree import Placement

_FUSED_PENDING = 128  # more pending tokens are a prefill: their words would outweigh the mask


class Step:
    """P pending tokens, then W tree nodes, of B rows against one cache.

    A row's entry i holds position i up to its root, entry `root[b]`. Slot s of the tree is entry root + s; its
    position is root + depth, so siblings share one. Pending tokens are aligned to the right: column j holds position
    root - P + 1 + j, and columns of positions that the row has already cached are padding.

    Attributes:
        positions [B, P + W] int64: for the rotary embedding.
        pending: P.
    """

    def __init__(
        self, cache: KVCache, cached: Tensor, root: Tensor, pending: int, last: int, tree: Placement | None = None
    ):
        """
        Args:
            cached: [B] valid entries of each row; root: [B] entry of its root.
            last: the largest of `root`, known to the host.
            tree: the nodes; None for pending tokens alone.
        """
        self.cache, self.root, self.pending, self.tree = cache, root, pending, tree
        device = root.device
        offsets = torch.arange(1 - pending, 1, device=device)
        index = root[:, None] + offsets
        self.end = last + 1
        positions, entries, seen = (
            [index.clamp(min=0)],
            [torch.where(index < cached[:, None], cache.scrap, index)],
            [index],
        )
        width = 0
        if tree is not None:
            width = tree.tokens.shape[1]
            self.end += tree.visible.shape[2] - 1
            positions.append(root[:, None] + tree.depths)
            entries.append(root[:, None] + tree.start + torch.arange(width, device=device))
            seen.append(root[:, None].expand(-1, width))
        self.positions = torch.cat(positions, dim=1)
        # one row without padding is written as a slice: an indexed write costs more than the attention on a CPU
        first = last - pending + 1 if pending else last + (tree.start if tree else 0)
        contiguous = root.shape[0] == 1 and (tree is None or pending == 0 or tree.start == 1)
        self._entries = slice(first, first + pending + width) if contiguous else torch.cat(entries, dim=1)
        self._seen = torch.cat(seen, dim=1).clamp(min=0)
        self._masks: dict[int | None, Tensor | None] = {}
        self._fused = (root.is_cuda or INTERPRETED) and pending <= _FUSED_PENDING

    def mask(self, window: int | None = None) -> Tensor | None:
        """[B, 1, P + W, end] bool, True = visible; None where everything is. `window` counts positions, not entries."""
        if window not in self._masks:
            self._masks[window] = self._mask(window)
        return self._masks[window]

    def _mask(self, window: int | None) -> Tensor | None:
        rows, queries = self.positions.shape
        if rows == 1 and queries == 1 and self.tree is None and (window is None or self.end <= window):
            return None
        entry = torch.arange(self.end, device=self.root.device)
        visible = entry <= self._seen[..., None]
        position = entry.expand(rows, -1)
        if self.tree is not None:
            slot = entry - self.root[:, None]
            in_tree = (slot > 0) & (slot < self.tree.visible.shape[2])
            slot = torch.where(in_tree, slot, 0)
            below = self.tree.visible.gather(2, slot[:, None].expand(-1, queries - self.pending, -1)) & in_tree[:, None]
            visible[:, self.pending :] |= below
            position = torch.where(in_tree, self.root[:, None] + self.tree.slot_depths.gather(1, slot), position)
        if window is not None:
            visible &= self.positions[..., None] - position[:, None] < window
        return visible[:, None]

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None = None
    ) -> Tensor:
        """Caches key and value [B, T, kv_heads, d], then attends with query [B, T, heads, d]: [B, T, heads * d]."""
        self.cache.write(layer, self._entries, key, value)
        rows, queries, heads, dim = query.shape
        if self._fused and 16 <= dim <= 256:
            return self._attend_fused(layer, query, scale, window).reshape(rows, queries, heads * dim)
        keys, values = self.cache.read(layer, self.end)
        groups = heads // key.shape[2]
        # the query heads that share a key head become rows of one product, so no key is repeated
        folded = (
            query.view(rows, queries, -1, groups, dim).permute(0, 2, 3, 1, 4).reshape(rows, -1, groups * queries, dim)
        )
        mask = self.mask(window)
        if mask is not None:
            mask = mask.repeat(1, 1, groups, 1)
        out = F.scaled_dot_product_attention(folded, keys, values, attn_mask=mask, scale=scale)
        return out.view(rows, -1, groups, queries, dim).permute(0, 3, 1, 2, 4).reshape(rows, queries, heads * dim)

    def _attend_fused(self, layer: int, query: Tensor, scale: float, window: int | None) -> Tensor:
        keys, values = self.cache.planes(layer)
        prefix, words, depths, slot_depths = self._stream
        return tree_attention(
            query,
            keys,
            values,
            prefix,
            words,
            slot_depths.shape[1],
            scale=scale,
            window=window,
            depths=depths,
            slot_depths=slot_depths,
        )[0]

    @cached_property
    def _stream(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What this pass is to `tree_attention`: pending ids are the first slots, a chain; the tree hangs on the last.

        prefix [B]: negative where a row is shorter than what is pending; words; depths [B, T] of the queries and
        [B, slots] of the slots, counted from the prefix.
        """
        pending = self.pending or 1  # without pending ids the root, which is cached, is the chain
        rows, width = self.root.shape[0], self.positions.shape[1] - self.pending
        chain = torch.ones(pending, pending, dtype=torch.bool, device=self.root.device).tril().expand(rows, -1, -1)
        prefix = self.root - pending + 1
        depths = slot_depths = torch.arange(pending, device=self.root.device).expand(rows, -1)
        if self.tree is None:
            return prefix, ancestor_words(chain), depths, slot_depths
        below = self.tree.visible[..., 1:]
        visible = torch.cat((below.new_ones(rows, width, pending), below), dim=2)
        if self.pending:
            visible = torch.cat((F.pad(chain, (0, below.shape[2])), visible), dim=1)
        depths = self.positions - prefix[:, None]
        slot_depths = torch.cat((slot_depths, self.tree.slot_depths[:, 1:] + pending - 1), dim=1)
        return prefix, ancestor_words(visible), depths, slot_depths
