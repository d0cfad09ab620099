"""Text as it comes: rounds into outputs and pieces; whole characters only, although a token may end inside one."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase

from specdec.rows import Rows
from specdec.stats import Output, Round


@dataclass(frozen=True)
class Piece:
    """What one round added.

    Attributes:
        text: new characters; concatenated over all pieces they give `output.text`.
        tokens: new ids; all but the last were drafted, the last is the verifier's own.
        round: the round itself; output: the result so far, complete with the last piece.
    """

    text: str
    tokens: list[int]
    round: Round = field(repr=False)
    output: Output = field(repr=False)


class TextStream:
    """Decodes ids incrementally; without a tokenizer every text is empty."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None):
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._sent = 0

    def push(self, ids: list[int], last: bool) -> str:
        """The characters that `ids` complete; everything that is left if they are the last."""
        if self._tokenizer is None:
            return ""
        self._ids += ids
        text = self._tokenizer.decode(self._ids, skip_special_tokens=True)
        end = len(text) if last else len(text.rstrip("\N{REPLACEMENT CHARACTER}"))
        piece, self._sent = text[self._sent : end], max(self._sent, end)
        return piece


def filled(
    rounds: Iterator[list[Round]], rows: Rows, outputs: list[Output], tokenizer: PreTrainedTokenizerBase | None
) -> Iterator[list[Round]]:
    """The same rounds; on their way each row's go into its output, and the text with the last."""
    begin = time.perf_counter()
    for latest in rounds:
        for row, output in enumerate(outputs):
            if output.finish_reason is None:
                output.rounds.append(latest[row])
                output.tokens += latest[row].tokens
                output.finish_reason = rows.finish_reasons[row]
        if rows.finished:
            for output in outputs:
                output.text = tokenizer.decode(output.tokens, skip_special_tokens=True) if tokenizer else ""
                output.seconds = time.perf_counter() - begin
        yield latest


def pieces(rounds: Iterator[list[Round]], tokenizer: PreTrainedTokenizerBase | None, output: Output) -> Iterator[Piece]:
    """The rounds of a single row as text."""
    text = TextStream(tokenizer)
    for (latest,) in rounds:
        yield Piece(text.push(latest.tokens, last=output.finish_reason is not None), latest.tokens, latest, output)
