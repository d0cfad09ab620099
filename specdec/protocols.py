"""The three choices that make a method: who proposes, how the tree grows, who decides.

Anything with these attributes and methods plugs into `specdec.Decoder`; nothing has to be registered or inherited.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from specdec.rows import Rows
from specdec.sampling import Noise, Sampler
from specdec.tree import DraftTree, Layer

FINAL = -1  # the tap that is the last hidden state behind the final norm; tap n, of n layers, is the one before it


class Span(NamedTuple):
    """Features of consecutive positions, handed over once and stored by nobody.

    `features[b, t]` belongs to absolute position `start[b] + t`. Columns of positions that the model did not compute
    in this call (before the row's first pending token, behind its last accepted one) are undefined.
    """

    start: Tensor  # [B] int64
    features: Tensor  # [B, T, F], the taps concatenated in their order
    source: str  # the model that made them


class Verdict(NamedTuple):
    """What a verifier decided on a tree."""

    path: Tensor  # [B, D] int64, accepted nodes from depth 1 on, -1 behind the last
    length: Tensor  # [B] int64, accepted nodes
    bonus: Tensor  # [B] int64, the verifier's own token behind the path; -1 = its logits were unusable
    span: Span | None  # features of the pending tokens, the root and the path


@runtime_checkable
class Drafter(Protocol):
    """Proposes: raw logits for the children of tree nodes.

    Attributes:
        taps: layers of the target whose inputs it wants as features, or `FINAL`; `()` for none.
        vocab_size: Vd, its own vocabulary.
    """

    taps: tuple[int, ...]
    vocab_size: int

    def start(self, rows: Rows, capacity: int) -> None:
        """Empties its cache for new rows and makes room for `capacity` entries a row.

        If it counts the entries in `rows`, then under a name that no other model of the generation has.
        """

    def observe(self, rows: Rows, span: Span | None, tree: DraftTree, verdict: Verdict) -> None:
        """Learns what was committed: drops what it guessed, queues the pairs (feature_i, id_{i+1})."""

    def expand(self, rows: Rows, tree: DraftTree, nodes: Tensor) -> Tensor:
        """One draft forward over the frontier [B, W] (-1 = nobody): raw logits [B, W, Vd].

        On the root it first catches up with what `observe` queued, in the same forward.
        """

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """Maps draft ids to target ids, any shape."""


@runtime_checkable
class Growth(Protocol):
    """Decides which children join the tree. Stateless; every method is a pure, batched tensor function.

    Attributes:
        capacity: the most nodes its tree ever holds, the root included.
    """

    @property
    def capacity(self) -> int: ...

    def grow(self, tree: DraftTree, nodes: Tensor, logits: Tensor, noise: Noise) -> Layer:
        """The next layer from the frontier [B, W] (-1 = nobody) and its logits [B, W, Vd]."""

    def finish(self, tree: DraftTree) -> DraftTree:
        """The tree to verify."""


@runtime_checkable
class Verifier(Protocol):
    """Decides which nodes are accepted, and commits the caches of the models that it asks.

    Attributes:
        lossless: the text is distributed as the target's own.
    """

    @property
    def lossless(self) -> bool: ...

    def start(self, rows: Rows, capacity: int) -> None:
        """Empties its models' caches for new rows and makes room for `capacity` entries a row."""

    def verify(self, rows: Rows, tree: DraftTree, sampler: Sampler) -> Verdict:
        """Reads the pending tokens and the tree; a tree of roots alone is a plain step, or the prefill."""

    def commit(self, rows: Rows, tree: DraftTree, verdict: Verdict) -> None:
        """Moves the accepted path's cache entries into place; called before the rows are extended."""
