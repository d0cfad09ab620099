"""Rows of unequal length and difficulty share every forward pass, and none of them notices."""

from __future__ import annotations

import pytest
from cases import batch_text, rerank_text
from oracle.models import decoder, head_draft, lm_draft, prompt, text, tiny
from oracle.scripted import oracle

from specdec.growth.chain import Chain
from specdec.growth.eagle2 import Eagle2
from specdec.growth.talon import Talon

pytestmark = [pytest.mark.exactness, pytest.mark.usefixtures("one_thread")]
NEW = 24
PROMPTS = [prompt(4, 1), prompt(13, 2)]


class Calls:
    """Counts the forward passes of modules, and how many rows went through each."""

    def __init__(self, *modules):
        self.rows: list[list[int]] = [[] for _ in modules]
        self._hooks = [
            module.register_forward_pre_hook(
                lambda _, args, kwargs, into=into: into.append(self._size(args, kwargs)), with_kwargs=True
            )
            for module, into in zip(modules, self.rows, strict=True)
        ]

    @staticmethod
    def _size(args, kwargs) -> int:
        return len(args[0] if args else kwargs["input_ids"])

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        for hook in self._hooks:
            hook.remove()


@pytest.mark.parametrize("growth", [None, Chain(4), Eagle2(16, 4, 3), Talon(32), Talon(12, 1.0)], ids=repr)
@pytest.mark.parametrize("kind", ["head", "lm"])
def test_two_rows_share_every_forward(growth, kind: str) -> None:
    """D14: one draft forward a layer and one verification serve both rows, and each row gets its own single text.

    The first row is easy (its draft knows the text), the second hard, so they accept differently and end apart.
    """
    expected = [text("llama", ids, NEW) for ids in PROMPTS]
    draft = head_draft(texts=[PROMPTS[0] + expected[0], []]) if kind == "head" else lm_draft()
    made = decoder(pair=(draft, growth) if growth else (None, None))
    network = draft.head.midlayer.self_attn.q_proj if kind == "head" else draft.model.backbone.model.base_model
    with Calls(tiny().base_model, network) as calls:
        outputs = made.generate(PROMPTS, max_new_tokens=NEW)
    assert [output.tokens for output in outputs] == expected
    rounds = max(outputs, key=lambda output: len(output.rounds)).rounds
    verifications, drafts = calls.rows
    assert verifications == [2] * len(rounds), "one joint verification a round"
    assert drafts == [2] * sum(r.draft_forwards for r in rounds), "one joint draft forward a layer"
    if growth is not None and kind == "head":
        assert len(outputs[0].rounds) < len(outputs[1].rounds), "the rows were meant to differ in difficulty"
    singles = [made.generate(ids, max_new_tokens=NEW) for ids in PROMPTS] if kind == "lm" else []
    for single, output in zip(singles, outputs, strict=False):
        assert [r.path for r in single.rounds] == [r.path for r in output.rounds]


def test_rows_that_accept_nothing_some_and_all() -> None:
    """D14: the cache advanced by the longest accepted row, so shorter rows kept rejected entries."""
    assert batch_text() == []


def test_rerank_of_rows_with_trees_of_unequal_size() -> None:
    """Padding had path probability 1 and won the rerank over real nodes: token 0 could be accepted at a wrong position.

    It takes a batch in which a row comes to its end and another does not, so single rows never showed it.
    """
    assert rerank_text() == []


def test_rows_end_at_their_own_end_of_text() -> None:
    """D14, D07: a row that has ended stays as it is while its batch mates go on."""
    prompts = [prompt(n, n) for n in (3, 7, 12)]
    full = [text("llama", ids, NEW) for ids in prompts]
    eos = full[1][4]
    expected = [tokens[: tokens.index(eos) + 1] if eos in tokens else tokens for tokens in full]
    assert len({len(tokens) for tokens in expected}) > 1
    known = [ids + tokens for ids, tokens in zip(prompts, full, strict=True)]
    for right in (0, 3, [3, 0, 1]):
        made = decoder(pair=oracle(known, 97, depth=4, width=2, right=right))
        outputs = made.generate(prompts, max_new_tokens=NEW, eos_token_ids=[eos])
        assert [output.tokens for output in outputs] == expected
        assert [output.finish_reason for output in outputs] == ["eos" if eos in t else "length" for t in expected]


def test_equal_prompts_give_equal_rows() -> None:
    outputs = decoder(pair=(lm_draft(), Talon(16))).generate([PROMPTS[0]] * 3, max_new_tokens=NEW)
    assert [output.tokens for output in outputs] == [text("llama", PROMPTS[0], NEW)] * 3
