"""What a target computes on its training text, recorded once.

A row is one prompt with its answer. For each of its positions the store keeps the hidden states that a draft head
reads (the taps) and the final hidden state, from which ``lm_head`` gives the target's distribution. Rows are recorded
when they are first asked for, so training starts at once; later passes read a memory map. bf16 on disk, and at most
the bytes that ``FeatureStore.disk_bytes`` announces.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Row:
    """One training text: token ids, of which the first `prompt_length` are the prompt in the chat template."""

    ids: np.ndarray
    prompt_length: int
    kind: str = ""
    greedy: bool = False
    """The answer is the target's own argmax at every position, so its argmaxes need not be computed."""


class FeatureBatch(NamedTuple):
    """Rows padded on the right to T positions; padding holds zeros, `best` -1 where nothing was recorded."""

    ids: Tensor
    """int64 [B, T]"""
    features: Tensor
    """[B, T, F*h_t], hidden states entering the tapped layers, low | mid | high"""
    final: Tensor
    """[B, T, h_t], after the target's last norm"""
    best: Tensor
    """int64 [B, T], the target's most likely next id, from the last prompt position on"""
    prompt_length: Tensor
    """int64 [B]"""
    length: Tensor
    """int64 [B]"""


@contextmanager
def tapped(base: nn.Module, taps: Sequence[int]) -> Iterator[list[Tensor]]:
    """A list that every forward of `base` (it has ``.layers``) in the block fills with the tapped layers' inputs."""
    caught: list[Tensor] = [torch.empty(0)] * len(taps)

    def hook(slot: int) -> Any:
        def catch(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            caught[slot] = args[0] if args else kwargs["hidden_states"]

        return catch

    layers: Any = base.layers
    handles = [layers[tap].register_forward_pre_hook(hook(slot), with_kwargs=True) for slot, tap in enumerate(taps)]
    try:
        yield caught
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def target_features(target: Any, ids: Tensor, taps: Sequence[int]) -> tuple[Tensor, Tensor]:
    """(features [B, T, F*h_t], final [B, T, h_t]) of ids [B, T] padded on the right, which causality keeps out."""
    base = target.get_decoder() if hasattr(target, "get_decoder") else target.model
    with tapped(base, taps) as caught:
        final = base(input_ids=ids, use_cache=False).last_hidden_state
    return torch.cat(caught, dim=-1), final


class FeatureStore:
    """Recorded rows of one target in one folder.

    Args:
        folder: made when missing; a store of another target, other taps or other rows there is refused.
        rows: the whole corpus; the order is part of the store.
        target: the model, needed for rows that were not recorded yet.
        taps: see ``default_taps``.
    """

    def __init__(self, folder: Path, rows: Sequence[Row], target: Any, taps: Sequence[int]):
        self.rows, self.target, self.taps = rows, target, tuple(taps)
        width: int = target.config.hidden_size
        self.offsets = np.concatenate(([0], np.cumsum([len(row.ids) for row in rows])))
        total = int(self.offsets[-1])
        folder.mkdir(parents=True, exist_ok=True)
        self._check_identity(folder)
        self._features = _memmap(folder / "features.bf16", np.uint16, (total, len(self.taps) * width))
        self._final = _memmap(folder / "final.bf16", np.uint16, (total, width))
        self._best = _memmap(folder / "best.i32", np.int32, (total,))
        self._done = _memmap(folder / "done.u8", np.uint8, (len(rows),))

    @staticmethod
    def disk_bytes(rows: Sequence[Row], width: int, num_taps: int) -> int:
        """Bytes that these rows will take: (F + 1) * h_t bf16 numbers and one id a position."""
        return sum(len(row.ids) for row in rows) * ((num_taps + 1) * width * 2 + 4)

    def _check_identity(self, folder: Path) -> None:
        digest = hashlib.sha256()
        for row in self.rows:
            digest.update(np.int64(row.prompt_length).tobytes() + row.ids.astype(np.int32).tobytes())
        config = self.target.config
        identity = {
            "text": digest.hexdigest(),
            "taps": list(self.taps),
            "target": [config.model_type, config.num_hidden_layers, config.hidden_size, config.vocab_size],
        }
        path = folder / "store.json"
        if not path.exists():
            path.write_text(json.dumps(identity))
        elif json.loads(path.read_text()) != identity:
            raise ValueError(
                f"{folder} holds features of another text, target or taps: {path.read_text()}, "
                f"not {json.dumps(identity)}; name another folder or delete this one"
            )

    def recorded(self) -> int:
        """How many rows are on disk."""
        return int(self._done.sum())

    def batch(self, indices: Sequence[int]) -> FeatureBatch:
        """The rows of these indices in fp32, recording those that are missing."""
        missing = [index for index in indices if not self._done[index]]
        if missing:
            self._record(missing)
        spans = [slice(self.offsets[index], self.offsets[index + 1]) for index in indices]
        length = torch.tensor([span.stop - span.start for span in spans])
        padded = int(length.max())

        def stack(source: np.memmap, fill: int = 0) -> Tensor:
            out = np.full((len(spans), padded, *source.shape[1:]), fill, dtype=source.dtype)
            for row, span in enumerate(spans):
                out[row, : span.stop - span.start] = source[span]
            return torch.from_numpy(out)

        return FeatureBatch(
            ids=_pad([self.rows[index].ids for index in indices]),
            features=stack(self._features).view(torch.bfloat16).float(),
            final=stack(self._final).view(torch.bfloat16).float(),
            best=stack(self._best, fill=-1).long(),
            prompt_length=torch.tensor([self.rows[index].prompt_length for index in indices]),
            length=length,
        )

    @torch.no_grad()
    def _record(self, indices: Sequence[int]) -> None:
        features, final = target_features(self.target, _pad([self.rows[index].ids for index in indices]), self.taps)
        for slot, index in enumerate(indices):
            row, start = self.rows[index], int(self.offsets[index])
            stop, first = start + len(row.ids), row.prompt_length - 1
            self._features[start:stop] = _bf16(features[slot, : len(row.ids)])
            self._final[start:stop] = _bf16(final[slot, : len(row.ids)])
            best = np.full(len(row.ids), -1, dtype=np.int32)
            if row.greedy:
                best[first:-1] = row.ids[first + 1 :]
            else:
                best[first:-1] = self.target.lm_head(final[slot, first : len(row.ids) - 1]).argmax(-1).numpy()
            self._best[start:stop] = best
            self._done[index] = 1  # last, so that an interrupted write is done again


def _pad(sequences: Sequence[np.ndarray]) -> Tensor:
    return nn.utils.rnn.pad_sequence([torch.from_numpy(ids.astype(np.int64)) for ids in sequences], batch_first=True)


def _bf16(x: Tensor) -> np.ndarray:
    return x.to(torch.bfloat16).view(torch.uint16).numpy()


def _memmap(path: Path, dtype: Any, shape: tuple[int, ...]) -> np.memmap:
    return np.memmap(path, dtype=dtype, mode="r+" if path.exists() else "w+", shape=shape)  # sparse until written
