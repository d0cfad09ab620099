"""Text as it comes: no half characters, and nothing lost or doubled."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.streaming import TextStream


class Bytes:
    """A tokenizer of one byte an id, as byte-level vocabularies fall back to."""

    def decode(self, ids, skip_special_tokens=True):
        return bytes(ids).decode("utf-8", errors="replace")


def stream(chunks: list[list[int]]) -> list[str]:
    text = TextStream(Bytes())
    return [text.push(chunk, last=i == len(chunks) - 1) for i, chunk in enumerate(chunks)]


@given(st.text(max_size=12), st.lists(st.integers(1, 5), min_size=1, max_size=30))
def test_pieces_make_the_text(text: str, sizes: list[int]) -> None:
    """A round may end inside a character of up to four bytes; it comes whole, with the round that ends it."""
    ids, chunks = list(text.encode("utf-8", errors="replace")), []
    for size in sizes:
        chunks.append(ids[:size])
        ids = ids[size:]
    chunks.append(ids)
    pieces = stream(chunks)
    expected = text.encode("utf-8", errors="replace").decode()
    assert "".join(pieces) == expected
    if "\N{REPLACEMENT CHARACTER}" not in expected:
        assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


@pytest.mark.parametrize(
    ("chunks", "pieces"),
    [
        ([[0xE2], [0x82], [0xAC, 0x21], []], ["", "", "\N{EURO SIGN}!", ""]),
        ([[0x41, 0xE2, 0x82]], ["A\N{REPLACEMENT CHARACTER}"]),  # the text ends inside a character
        ([[0x41, 0xFF], [0x42], []], ["A", "\N{REPLACEMENT CHARACTER}B", ""]),  # a byte that no character has
    ],
)
def test_halves(chunks, pieces) -> None:
    assert stream(chunks) == pieces


def test_without_a_tokenizer() -> None:
    assert TextStream(None).push([1, 2], last=True) == ""
