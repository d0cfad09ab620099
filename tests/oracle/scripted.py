"""Drafts with a script: a test says which trees the target gets to see, and what of them is right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from specdec.drafters.eagle3 import Eagle3Drafter
from specdec.drafters.lm import LMDrafter
from specdec.growth.chain import Chain
from specdec.models.lm import CausalLM
from specdec.rows import Rows
from specdec.sampling import Stream
from specdec.tree import DraftTree, Layer


class _Scripted:
    """A drafter without a model."""

    taps: tuple[int, ...] = ()

    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size
        self.calls = 0

    def start(self, rows: Rows, capacity: int) -> None: ...

    def observe(self, rows: Rows, span, tree: DraftTree, verdict) -> None: ...

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        return draft_ids


class Oracle(_Scripted):
    """Knows the text. At each level the right token is the LAST sibling, behind `width - 1` wrong ones.

    Goes with `Bushy(width, depth)`.

    Args:
        texts: a row each, prompt and continuation.
        right: how many levels hold the right token (for every row, or one number a row); levels below it, and levels
            behind the end of the text, hold wrong tokens only.
    """

    def __init__(self, texts: Sequence[Sequence[int]], vocab_size: int, width: int, right: int | Sequence[int]):
        super().__init__(vocab_size)
        self.texts, self.width = texts, width
        self.right = [right] * len(texts) if isinstance(right, int) else list(right)

    def expand(self, rows: Rows, tree: DraftTree, nodes: Tensor) -> Tensor:
        self.calls += 1
        logits = torch.zeros(*nodes.shape, self.vocab_size)
        for row, text in enumerate(self.texts):
            position = int(rows.length[row]) + tree.depth
            known = position < len(text)
            true = text[position] if known else 0
            # the order of the siblings is that of their logits: 20, 19, ...
            siblings = [(true + 1 + i) % self.vocab_size for i in range(self.width)]
            if known and tree.depth < self.right[row]:
                siblings[-1] = true
            for rank, token in enumerate(siblings):
                logits[row, :, token] = 20.0 - rank
        return logits


@dataclass(frozen=True)
class Bushy:
    """Every frontier node gets its `width` best children; of the last family the first and the last are expanded.

    So the path of last siblings lies at scattered nodes, with wrong branches before each of its own.
    """

    width: int
    depth: int

    @property
    def capacity(self) -> int:
        return 1 + self.width + (self.depth - 1) * min(2, self.width) * self.width

    def grow(self, tree: DraftTree, nodes: Tensor, logits: Tensor, noise) -> Layer:
        best = torch.log_softmax(logits.float(), -1).sort(dim=-1, descending=True, stable=True)
        score, token = best.values[..., : self.width].flatten(1), best.indices[..., : self.width].flatten(1)
        parent = nodes[..., None].expand(-1, -1, self.width).flatten(1)
        columns = parent.shape[1]
        chosen = [columns - self.width, columns - 1] if self.width > 1 else [columns - 1]
        expand = torch.tensor(chosen).expand(len(nodes), -1)
        count = (nodes >= 0).sum(-1) * self.width
        more = (count > 0) * (expand.shape[1] if tree.depth + 1 < self.depth else 0)
        score = score + tree.scores.gather(1, parent.clamp(min=0))
        return Layer(parent, token, score, count, expand, more)

    def finish(self, tree: DraftTree) -> DraftTree:
        return tree


def oracle(texts: Sequence[Sequence[int]], vocab_size: int, depth: int, width: int, right=None) -> tuple[Oracle, Bushy]:
    """ORACLE(depth, width): the last level holds only wrong tokens, so the bonus row matters."""
    return Oracle(texts, vocab_size, width, depth - 1 if right is None else right), Bushy(width, depth)


def wrong(texts: Sequence[Sequence[int]], vocab_size: int, depth: int = 3, width: int = 2) -> tuple[Oracle, Bushy]:
    """WRONG: never right."""
    return Oracle(texts, vocab_size, width, right=0), Bushy(width, depth)


class Script(_Scripted):
    """SCRIPT: one given tree a round (the last one again when they run out), for a single row; drafter and growth.

    Args:
        trees: (tokens, parents) of the nodes below the root in level order; parent -1 is the root.
    """

    def __init__(self, trees: Sequence[tuple[Sequence[int], Sequence[int]]], vocab_size: int):
        super().__init__(vocab_size)
        self.trees = list(trees)
        self.round = -1
        self.capacity = 1 + max(len(tokens) for tokens, _ in self.trees)

    def expand(self, rows: Rows, tree: DraftTree, nodes: Tensor) -> Tensor:
        self.calls += 1
        self.round += tree.depth == 0
        return torch.zeros(*nodes.shape, self.vocab_size)

    def grow(self, tree: DraftTree, nodes: Tensor, logits: Tensor, noise) -> Layer:
        tokens, parents = self.trees[min(self.round, len(self.trees) - 1)]
        depths: list[int] = []
        for parent in parents:
            depths.append(0 if parent < 0 else depths[parent] + 1)
        assert depths == sorted(depths), "the script is not in level order"
        level = [i for i, depth in enumerate(depths) if depth == tree.depth]
        inner = [column for column, i in enumerate(level) if i in parents]
        return Layer(
            parent=torch.tensor([[parents[i] + 1 for i in level]], dtype=torch.long),
            token=torch.tensor([[tokens[i] for i in level]], dtype=torch.long),
            score=torch.full((1, len(level)), -float(tree.depth + 1)),
            count=torch.tensor([len(level)]),
            expand=torch.tensor([inner or [0]]),
            expand_count=torch.tensor([len(inner)]),
        )

    def finish(self, tree: DraftTree) -> DraftTree:
        return tree


def self_draft(model, length: int = 4) -> tuple[LMDrafter, Chain]:
    """SELF: the target itself drafts a chain. At T = 0 every token must be accepted."""
    return LMDrafter(CausalLM(model, "draft")), Chain(length)


class SampledSelf(LMDrafter):
    """SELF at T = 1: draws with the noise that the target will use at the same position."""

    def expand(self, rows: Rows, tree: DraftTree, nodes: Tensor) -> Tensor:
        logits = super().expand(rows, tree, nodes)
        depths = tree.depths.gather(1, nodes.clamp(min=0))
        return logits + rows.noise.gumbel(Stream.TARGET, rows.length[:, None] + depths, logits.shape[-1])


class Spoiled(Eagle3Drafter):
    """An EAGLE-3 draft whose logits a test may replace: `spoil(logits, tree) -> logits`."""

    def __init__(self, head, taps, spoil):
        super().__init__(head, taps)
        self._spoil = spoil

    def expand(self, rows: Rows, tree: DraftTree, nodes: Tensor) -> Tensor:
        return self._spoil(super().expand(rows, tree, nodes), tree)


def tree_of(parents: list[list[int]], tokens: list[list[int]] | None = None) -> DraftTree:
    """A tree a row, of parents per node below the root in level order (-1 = the root), appended node by node."""
    size = max(map(len, parents), default=0)
    tree = DraftTree(torch.tensor([1] * len(parents)), size + 1)
    for node in range(size):
        exists = torch.tensor([node < len(row) for row in parents])
        parent = torch.tensor([[row[node] + 1 if node < len(row) else 0] for row in parents])
        token = torch.tensor([[row[node] if node < len(row) else 0] for row in tokens or parents]).clamp(min=0)
        none = torch.zeros(len(parents), 0, dtype=torch.long)
        layer = Layer(parent, token, torch.zeros(len(parents), 1), exists.long(), none, exists.long() * 0)
        tree.append(layer, lambda ids: ids)
    return tree


@st.composite
def situations(draw) -> tuple[list[int], list[int], list[list[int]]]:
    """Rows of unequal length: entries cached, ids pending (the root the last of them), parents of tree nodes."""
    rows = draw(st.integers(1, 3))
    cached = [draw(st.integers(0, 7)) for _ in range(rows)]
    pending = [draw(st.integers(1, 3)) for _ in range(rows)]
    parents = []
    for _ in range(rows):
        size = draw(st.integers(0, 6))
        parents.append([draw(st.integers(-1, node - 1)) for node in range(size)])
    return cached, pending, parents
