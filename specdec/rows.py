"""The state of a batch: a row (one request) is its ids and a length per cache; all else is derived."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.sampling import Noise
from specdec.tree import DraftTree

_SLACK = 16  # characters at the start of a decoded end that may differ from those of the whole text


@dataclass(frozen=True)
class Stopping:
    """When a row ends, besides its token budget.

    Attributes:
        eos: token ids that end the text; the id itself is kept, as Hugging Face does.
        strings: texts that end it; the token that completes one is the last.
        decode: ids to text, needed for `strings`.
    """

    eos: frozenset[int] = frozenset()
    strings: tuple[str, ...] = ()
    decode: Callable[[list[int]], str] | None = None

    def cut(self, before: list[int], emitted: list[int]) -> tuple[int, str | None]:
        """How many of the emitted ids stay, and why the text ends there (None: it goes on)."""
        for kept in range(1, len(emitted) + 1):
            if emitted[kept - 1] in self.eos:
                return kept, "eos"
            if self.strings and self._completed(before + emitted[:kept]):
                return kept, "stop"
        return len(emitted), None

    def _completed(self, ids: list[int]) -> bool:
        """Whether the last id completes a string: its end is decoded, and the whole text only where that may mislead.

        It may where the end is short, or has half a character, which can change characters far before it.
        """
        assert self.decode is not None
        reach = max(map(len, self.strings)) + _SLACK
        if len(ids) > 2 * reach:
            text, before = self.decode(ids[-2 * reach :]), self.decode(ids[-2 * reach : -1])
            clear = len(before) >= reach and "\N{REPLACEMENT CHARACTER}" not in text + before
            if clear and not any(string in text for string in self.strings):
                return False
        text = self.decode(ids)
        return any(string in text for string in self.strings)


@dataclass
class Host:
    """What the host knows since the last `fetch`."""

    length: list[int]
    cached: dict[str, list[int]] = field(default_factory=dict)


class Gain(NamedTuple):
    """What one row got out of a round; all empty for a row that had ended before."""

    tokens: list[int]  # cut where the text ends
    path: list[int]  # accepted nodes, before the cut
    nodes: int  # size of the tree, the root included


class Rows:
    """B requests in flight. Ids and lengths live on the device; `fetch` is the only place that reads them.

    Attributes:
        ids [B, C] int64, length [B] int64: the prompt and what was committed; ids behind the length are scrap.
        cached: model name -> [B] int64, how many of the ids that model holds in its cache. The rest is pending.
        active [B] bool: rows that have not ended.
        limit: for each row, the length at which it ends for lack of budget or context.
        host: lengths as of the last fetch; `new_tokens[b]`, `finish_reasons[b]`: what fetch has handed out.
    """

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        seeds: Sequence[int],
        stopping: Stopping | None = None,
        context: int | None = None,
        device: torch.device | str = "cpu",
    ):
        lengths = [len(prompt) for prompt in prompts]
        # a token may follow the last position of the context, but nothing is computed behind it
        self.limit = [min(n + max_new_tokens, n + max_new_tokens if context is None else context + 1) for n in lengths]
        self._cut_by_context = [limit < n + max_new_tokens for limit, n in zip(self.limit, lengths, strict=True)]
        self.stopping = stopping or Stopping()
        self.ids = torch.zeros(len(prompts), max(self.limit) + 1, dtype=torch.long, device=device)
        for row, prompt in enumerate(prompts):
            self.ids[row, : len(prompt)] = torch.tensor(prompt, dtype=torch.long)
        self.length = torch.tensor(lengths, device=device)
        self.active = torch.ones(len(prompts), dtype=torch.bool, device=device)
        self.cached: dict[str, Tensor] = {}
        self.noise = Noise(torch.tensor(list(seeds), device=device))
        self.host = Host(lengths)
        self.new_tokens: list[list[int]] = [[] for _ in prompts]
        self.finish_reasons: list[str | None] = [None] * len(prompts)
        self._limit = torch.tensor(self.limit, device=device)

    def __len__(self) -> int:
        return len(self.limit)

    @property
    def finished(self) -> bool:
        return None not in self.finish_reasons

    @property
    def roots(self) -> Tensor:
        """[B] the last committed token of each row."""
        return self.ids.gather(1, self.length[:, None] - 1)[:, 0]

    @property
    def root_entries(self) -> Tensor:
        """[B] position of each row's root, its last id; of a row that has ended, one that its context still has."""
        return torch.minimum(self.length, self._limit - 1) - 1

    @property
    def room(self) -> Tensor:
        """[B] the deepest level that a row's tree can still use; 0 for a row that has ended."""
        return torch.where(self.active, self._limit - self.length - 1, 0)

    @property
    def max_room(self) -> int:
        """The largest `room`, from the host's lengths."""
        rooms = zip(self.limit, self.host.length, self.finish_reasons, strict=True)
        return max(0 if reason else limit - length - 1 for limit, length, reason in rooms)

    def start_cache(self, name: str) -> None:
        """Declares that the model `name` has cached nothing yet.

        Raises:
            ValueError: another model of this generation has the name.
        """
        if name in self.cached:
            raise ValueError(
                f"two models of one generation are called {name!r}, and each needs a name of its own; "
                "give one another name: CausalLM(model, name=...)"
            )
        self.cached[name] = torch.zeros_like(self.length)
        self.host.cached[name] = [0] * len(self)

    def set_cached(self, name: str, behind: int) -> None:
        """The model `name` now holds everything but the last `behind` ids."""
        self.cached[name] = self.length - behind
        self.host.cached[name] = [length - behind for length in self.host.length]

    def pending(self, name: str) -> int:
        """The most ids that any row has and the model `name` has not, from the host's lengths."""
        return max(a - b for a, b in zip(self.host.length, self.host.cached[name], strict=True))

    def window(self, width: int) -> Tensor:
        """The last `width` ids of each row, aligned right: [B, width]; columns before its start repeat the first."""
        index = self.length[:, None] + torch.arange(-width, 0, device=self.ids.device)
        return self.ids.gather(1, index.clamp(min=0))

    def extend(self, tree: DraftTree, path: Tensor, length: Tensor, bonus: Tensor) -> Tensor:
        """Commits the accepted path and the bonus token of the rows that are active.

        Args:
            path [B, D], length [B], bonus [B]: as in `Verdict`.
        Returns:
            [B] how many ids each row gained.
        """
        column = torch.arange(path.shape[1] + 1, device=self.ids.device)
        tokens = torch.cat((tree.tokens.gather(1, path.clamp(min=0)), bonus[:, None]), dim=1)
        tokens = torch.where(column == length[:, None], bonus[:, None], tokens)
        gained = torch.where(self.active, length + 1, 0)
        where = torch.where(column < gained[:, None], self.length[:, None] + column, self.ids.shape[1] - 1)
        self.ids.scatter_(1, where, tokens)
        self.length = self.length + gained
        return gained

    def fetch(self, tree: DraftTree, path: Tensor, length: Tensor, gained: Tensor) -> list[Gain]:
        """The one read of a round: what each row gained, cut where its text ends.

        Args:
            tree, path [B, D], length [B]: as `extend` took them; gained [B]: what it returned.
        Raises:
            FloatingPointError: the verifier met logits without a usable value (NaN or infinite).
        """
        width = path.shape[1]
        index = self.length[:, None] + torch.arange(-width - 1, 0, device=self.ids.device)
        recent = self.ids.gather(1, index.clamp(min=0))
        numbers = torch.cat(
            (torch.stack((self.length, gained, length, tree.count, *self.cached.values()), dim=1), recent, path), dim=1
        ).tolist()
        ids_at = 4 + len(self.cached)
        path_at = ids_at + width + 1
        self.host = Host(
            [row[0] for row in numbers], {name: [row[4 + i] for row in numbers] for i, name in enumerate(self.cached)}
        )
        gains = []
        cut = False
        for row, line in enumerate(numbers):
            if self.finish_reasons[row] is not None:
                gains.append(Gain([], [], 0))
                continue
            ids = line[path_at - line[1] : path_at]
            accepted = line[path_at : path_at + line[2]]
            if ids[-1] < 0:
                raise FloatingPointError(
                    f"row {row}, new token {len(self.new_tokens[row]) + len(ids)}: the verifier's logits behind "
                    f"tree node {accepted[-1] if accepted else 0} hold no finite maximum (NaN or infinity). "
                    "Check the weights and the dtype: float16 overflows where bfloat16 does not."
                )
            kept, reason = self.stopping.cut(self.new_tokens[row], ids)
            self.new_tokens[row] += ids[:kept]
            if reason is None and line[0] >= self.limit[row]:
                reason = "context" if self._cut_by_context[row] else "length"
            if reason is not None:
                self.finish_reasons[row] = reason
                self.host.length[row] -= len(ids) - kept
                for lengths in self.host.cached.values():
                    lengths[row] = min(lengths[row], self.host.length[row])
                cut = True
            gains.append(Gain(ids[:kept], accepted, line[3]))
        if cut:
            self._send()
        return gains

    def _send(self) -> None:
        """Tells the device what the host cut."""
        device = self.ids.device
        self.length = torch.tensor(self.host.length, device=device)
        self.active = torch.tensor([reason is None for reason in self.finish_reasons], device=device)
        self.cached = {name: torch.tensor(lengths, device=device) for name, lengths in self.host.cached.items()}
