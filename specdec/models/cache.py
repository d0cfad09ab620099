"""A preallocated key-value cache. Nothing is rolled back: an entry beyond a row's length is overwritten or masked."""

from __future__ import annotations

import torch
from specdec_kernels import kv_commit
from torch import Tensor


class KVCache:
    """Keys and values of all layers in one buffer `data` [2 * layers, B, entries + 1, kv_heads, head_dim].

    Keys come first, then values. The last entry is scrap: padding is written there and nobody reads it. How many
    entries of a row are valid is the row's business (`Rows.cached`), not the cache's. The buffer is kept between
    generations and replaced only by a larger one.
    """

    def __init__(self, layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device):
        self.layers = layers
        self._buffer = torch.zeros(2 * layers, 0, 0, kv_heads, head_dim, dtype=dtype, device=device)
        self.data = self._buffer

    def start(self, rows: int, entries: int) -> None:
        """Makes room for `rows` x `entries` entries; what was in the cache is gone."""
        planes, held_rows, held_entries, *shape = self._buffer.shape
        if rows > held_rows or entries + 1 > held_entries:
            grown = (planes, max(rows, held_rows), max(entries + 1, held_entries), *shape)
            self.data = self._buffer = self._buffer.new_empty(0)  # freed before its successor is made
            self._buffer = self._buffer.new_zeros(grown)
        self.data = self._buffer[:, :rows]
        if rows > 1:  # short rows are computed over the entries of the longest; masked, but 0 x NaN is NaN
            self.data.zero_()

    @property
    def scrap(self) -> int:
        """The entry that takes what must not be kept."""
        return self.data.shape[2] - 1

    def write(self, layer: int, entries: Tensor | slice, keys: Tensor, values: Tensor) -> None:
        """Stores keys and values [B, T, kv_heads, head_dim] at `entries` [B, T], or at a slice shared by all rows."""
        row: Tensor | slice = slice(None)
        if isinstance(entries, Tensor):
            row = torch.arange(keys.shape[0], device=keys.device)[:, None]
        own_keys, own_values = self.planes(layer)
        own_keys[row, entries], own_values[row, entries] = keys, values

    def read(self, layer: int, end: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the first `end` entries [B, kv_heads, end, head_dim]: views, valid till the next write."""
        keys, values = self.planes(layer)
        return keys[:, :end].transpose(1, 2), values[:, :end].transpose(1, 2)

    def planes(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of all entries [B, entries + 1, kv_heads, head_dim], views."""
        return self.data[layer], self.data[self.layers + layer]

    def commit(self, source: Tensor, start: Tensor, count: Tensor) -> None:
        """Moves entries `source` [B, M] to `start` [B] onwards, the first `count` [B] of them."""
        kv_commit(self.data, source, start, count)
