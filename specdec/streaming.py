"""Text as it comes: whole characters only, although a token may end inside one."""

from __future__ import annotations

from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase

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
