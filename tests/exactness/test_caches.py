"""After every round, every cache equals that of a fresh pass over the committed ids."""

from __future__ import annotations

import pytest
from oracle.caches import cache_errors
from oracle.models import FAMILIES, decoder, head_draft, lm_draft, prompt, text, tiny
from oracle.scripted import oracle, wrong

from specdec.growth.chain import Chain
from specdec.growth.eagle2 import Eagle2
from specdec.growth.talon import Talon

pytestmark = [pytest.mark.exactness, pytest.mark.usefixtures("one_thread")]
NEW = 20


def known(family: str, prompts: list[list[int]]) -> list[list[int]]:
    return [ids + text(family, ids, NEW) for ids in prompts]


@pytest.mark.parametrize("family", FAMILIES)
def test_accepted_nodes_lie_scattered(family: str) -> None:
    """D10: caches that assumed a dense prefix, or kept one integer to rewind to, went wrong with the first sibling."""
    prompts = [prompt(6), prompt(9, 1)]
    pair = oracle(known(family, prompts), 97, 3, 3)
    assert cache_errors(decoder(tiny(family), pair), prompts, NEW) == []
    assert cache_errors(decoder(tiny(family), wrong(known(family, prompts[:1]), 97)), prompts[:1], NEW) == []


def test_a_sibling_never_lowers_what_is_accepted() -> None:
    """D10: the telling sign of a wrong row for the next round was that adding a sibling accepted less."""
    ids = prompt(6)

    def accepted(width: int) -> list[int]:
        pair = oracle(known("llama", [ids]), 97, depth=4, width=width)
        return [len(r.path) for r in decoder(pair=pair).generate(ids, max_new_tokens=NEW).rounds]

    assert accepted(1) == accepted(2) == accepted(4)


GROWTHS = [Chain(4), Eagle2(16, 4, 3), Talon(16), Talon(12, 1.0)]


@pytest.mark.parametrize("growth", GROWTHS, ids=repr)
@pytest.mark.parametrize("knows", [lambda p: True, lambda p: False, lambda p: p % 3 != 0], ids=["all", "none", "some"])
def test_the_eagle_draft_is_rebuilt_from_true_features(growth, knows) -> None:
    """D11: entries that were guessed while drafting stayed in the cache; the text is right, acceptance sags by a tenth.

    Also where whole paths are accepted, and where nothing is.
    """
    prompts = [prompt(6), prompt(1, 1), prompt(9, 2)]
    drafter = head_draft(texts=known("llama", prompts), knows=knows)
    made = decoder(pair=(drafter, growth))
    assert cache_errors(made, prompts[:1], NEW) == []
    assert cache_errors(made, prompts, NEW) == []


@pytest.mark.parametrize("growth", GROWTHS, ids=repr)
def test_the_lm_draft_keeps_what_it_forwarded(growth) -> None:
    """D11: of the accepted nodes it keeps those that it forwarded; the rest is pending, nothing is lost or doubled."""
    prompts = [prompt(6), prompt(1, 1), prompt(9, 2)]
    assert cache_errors(decoder(pair=(lm_draft(), growth)), prompts, NEW) == []
    assert cache_errors(decoder(pair=(lm_draft(), growth)), prompts[:1], NEW, temperature=1.0) == []
