"""Bugs that other decoders had, put into ours one at a time: the checks of this folder must see each of them.

A check that passes whatever the code does is worse than none. Each entry is a bug, where it is put, and the scene that
has to notice it; the scenes are those that pass, unpatched, elsewhere in this folder (and once more here).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from cases import batch_text, differences, rerank_text, tree_text
from oracle.caches import cache_errors
from oracle.models import decoder, head_draft, prompt, text
from oracle.scripted import oracle
from specdec_kernels import verify_walk

import specdec.verifiers.target as target_verifier
from specdec.drafters.eagle3 import Eagle3Drafter
from specdec.growth.talon import Talon
from specdec.models.attention import Step
from specdec.models.cache import KVCache
from specdec.models.lm import CausalLM
from specdec.rows import Rows, Stopping
from specdec.sampling import Noise, Sampler
from specdec.tree import DraftTree

pytestmark = [pytest.mark.exactness, pytest.mark.usefixtures("one_thread")]


# --- scenes ----------------------------------------------------------------------------------------------------------


def eos_text() -> list[str]:
    """D07: the end of text comes inside an accepted path."""
    ids = prompt(6)
    full = text("llama", ids, 24)
    eos = next(t for t in full[2:6] if t not in full[:2])
    expected = full[: full.index(eos) + 1]
    pair = oracle([ids + full], 97, depth=6, width=2)
    return differences([decoder(pair=pair, eos_token_ids=[eos]).generate(ids, max_new_tokens=24).tokens], [expected])


def budget_text() -> list[str]:
    """D09: blocks were appended whole."""
    ids = prompt(6)
    full = text("llama", ids, 24)
    pair = oracle([ids + full], 97, depth=6, width=2)
    got = [decoder(pair=pair).generate(ids, max_new_tokens=new).tokens for new in (1, 2, 3, 7)]
    return differences(got, [full[:new] for new in (1, 2, 3, 7)])


def target_cache() -> list[str]:
    prompts = [prompt(6), prompt(9, 1)]
    known = [ids + text("llama", ids, 16) for ids in prompts]
    return cache_errors(decoder(pair=oracle(known, 97, 3, 3)), prompts, 16)


def draft_cache() -> list[str]:
    prompts = [prompt(6)]
    known = [ids + text("llama", ids, 16) for ids in prompts]
    drafter = head_draft(texts=known, knows=lambda position: position % 4 != 0)
    return cache_errors(decoder(pair=(drafter, Talon(16))), prompts, 16)


greedy, warm = partial(tree_text, seeds=1), partial(tree_text, seeds=1, temperature=1.0)
mistral = partial(tree_text, "mistral", seeds=1)


# --- bugs ------------------------------------------------------------------------------------------------------------


def wrap(owner, name: str, around: Callable) -> Callable:
    """A patch: `around(original, *args)` in place of a method."""

    def apply(monkeypatch: pytest.MonkeyPatch) -> None:
        original = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, **kwargs: around(original, *args, **kwargs))

    return apply


def placed(**changes: Callable) -> Callable:
    """A patch of what the target sees of a tree: field -> function of the right placement."""
    return wrap(
        DraftTree,
        "whole",
        lambda whole, tree: (right := whole(tree))._replace(**{name: f(right) for name, f in changes.items()}),
    )


def walked(change: Callable) -> Callable:
    """A patch of the walk: `change(path, length, bonus, chosen) -> (path, length, bonus)`."""

    def walk(original, tokens, parents, count, chosen):
        return change(*verify_walk(tokens, parents, count, chosen), chosen)

    return wrap(target_verifier, "verify_walk", walk)


def committed(change: Callable) -> Callable:
    """A patch of what the target's cache keeps: `change(lm, rows, slots, length)`."""
    return wrap(CausalLM, "commit", lambda _, lm, rows, slots, length: change(lm, rows, slots, length))


def count_only(lm, rows, slots, length):
    rows.cached[lm.name] = rows.length + length


def drop_last(lm, rows, slots, length):
    if slots.shape[1]:
        lm.cache.commit(rows.length[:, None] - 1 + slots.clamp(min=0), rows.length, (length - 1).clamp(min=0))
    rows.cached[lm.name] = rows.length + length


def shifted_source(lm, rows, slots, length):
    if slots.shape[1]:
        lm.cache.commit(rows.length[:, None] + slots.clamp(min=0), rows.length, length)
    rows.cached[lm.name] = rows.length + length


def longest_row(lm, rows, slots, length):
    if slots.shape[1]:
        lm.cache.commit(rows.length[:, None] - 1 + slots.clamp(min=0), rows.length, length)
    rows.cached[lm.name] = rows.length + length.max()


def no_memory_of_the_root(lm, rows, slots, length):
    if slots.shape[1]:
        lm.cache.commit(rows.length[:, None] - 1 + slots.clamp(min=0), rows.length - 1, length)
    rows.cached[lm.name] = rows.length + length


def keep_guesses(observe, drafter, rows, span, tree, verdict):
    """D11: the entries made while drafting stay, at their accepted places."""
    observe(drafter, rows, span, tree, verdict)
    if tree.size > 1:
        slots = tree.slots.gather(1, verdict.path.clamp(min=0))
        slots = torch.where(verdict.path >= 0, slots, -1)
        count = (slots >= 0).sum(-1)
        drafter.cache.commit(rows.length[:, None] - 2 + slots.clamp(min=0), rows.length - 1, count)
        rows.cached["draft"] = rows.length - 1 + count


def features_one_off(observe, drafter, rows, span, tree, verdict):
    observe(drafter, rows, span._replace(start=span.start + 1), tree, verdict)


def rotated(layer, drafter, tokens, hidden, step):
    step.positions = step.positions + 1
    return layer(drafter, tokens, hidden, step)


def last_token_only(cut, stopping, before, emitted):
    """D07: only the block's last token was looked at."""
    return len(emitted), "eos" if emitted[-1] in stopping.eos else None


def one_eos(cut, stopping, before, emitted):
    return cut(replace(stopping, eos=frozenset()), before, emitted)


def window_over_entries(mask, step, window):
    """D13: a sliding window that counts cache entries, of which siblings take one each, instead of positions."""
    if step.tree is None or window is None:
        return mask(step, window)
    full = mask(step, None)
    entry = torch.arange(step.end)
    own = torch.cat(
        (
            step.positions[:, : step.pending],
            step.root[:, None] + torch.arange(1, step.positions.shape[1] - step.pending + 1),
        ),
        1,
    )
    return full & (own[:, None, :, None] - entry < window)


BUGS: dict[str, tuple[Callable, Callable]] = {
    "positions from the slot index": (
        placed(
            depths=lambda p: torch.arange(1, p.tokens.shape[1] + 1).expand_as(p.depths),
            slot_depths=lambda p: torch.arange(p.tokens.shape[1] + 1).expand_as(p.slot_depths),
        ),
        greedy,
    ),
    "no positions in the tree": (placed(depths=lambda p: torch.zeros_like(p.depths)), greedy),
    "positions one too far": (placed(depths=lambda p: p.depths + 1), greedy),
    "causal mask instead of the tree's": (
        placed(visible=lambda p: torch.ones_like(p.visible).tril(diagonal=1)),
        greedy,
    ),
    "siblings see each other": (
        placed(visible=lambda p: p.visible | (p.depths[..., None] == p.slot_depths[:, None])),
        greedy,
    ),
    "a node does not see its parent": (
        placed(visible=lambda p: p.visible & (torch.arange(p.visible.shape[2]) != p.parent_slots[..., None])),
        greedy,
    ),
    "cache not compacted": (committed(count_only), greedy),
    "last accepted entry dropped": (committed(drop_last), greedy),
    "accepted entries read one slot off": (committed(shifted_source), greedy),
    "accepted entries written over the root": (committed(no_memory_of_the_root), greedy),
    "cache not compacted, seen in the cache": (committed(count_only), target_cache),
    "last accepted entry dropped, seen in the cache": (committed(drop_last), target_cache),
    "next round from the root's row": (
        walked(lambda path, length, bonus, chosen: (path, length, chosen[:, 0])),
        greedy,
    ),
    "next round from the last node's row": (
        walked(lambda path, length, bonus, chosen: (path, length, chosen[:, -1])),
        greedy,
    ),
    "one node too many accepted": (
        walked(lambda path, length, bonus, chosen: (path.clamp(min=1), (length + 1).clamp(max=path.shape[1]), bonus)),
        greedy,
    ),
    "the first sibling instead of the right one": (
        walked(lambda path, length, bonus, chosen: (torch.where(path > 0, (path - 1).clamp(min=1), -1), length, bonus)),
        greedy,
    ),
    "the cache advances by the longest row": (committed(longest_row), batch_text),
    "the window counts entries": (wrap(Step, "_mask", window_over_entries), mistral),
    "no window": (wrap(Step, "_mask", lambda mask, step, window: mask(step, None)), mistral),
    "noise by node instead of position": (
        wrap(
            Noise,
            "draw",
            lambda draw, noise, logits, stream, positions: draw(
                noise, logits, stream, positions[:, :1] + torch.arange(positions.shape[1])
            ),
        ),
        warm,
    ),
    "noise one position off in the tree": (
        wrap(
            Noise,
            "draw",
            lambda draw, noise, logits, stream, positions: draw(
                noise, logits, stream, positions + (positions.shape[1] > 1)
            ),
        ),
        warm,
    ),
    "greedy verification at T = 1": (
        wrap(
            Sampler,
            "draw",
            lambda draw, sampler, logits, *rest, **options: draw(
                Sampler() if logits.shape[1] > 1 else sampler, logits, *rest, **options
            ),
        ),
        warm,
    ),
    "end of text only at the block's last token": (wrap(Stopping, "cut", last_token_only), eos_text),
    "end of text unknown": (wrap(Stopping, "cut", one_eos), eos_text),
    "blocks appended whole": (
        lambda monkeypatch: (
            monkeypatch.setattr(Rows, "max_room", property(lambda rows: 9)),
            wrap(
                Rows,
                "__init__",
                lambda init, rows, *args, **kwargs: (
                    init(rows, *args, **kwargs),
                    setattr(rows, "ids", torch.nn.functional.pad(rows.ids, (0, 16))),
                )[0],
            )(monkeypatch),
            wrap(KVCache, "start", lambda start, cache, rows, entries: start(cache, rows, entries + 64))(monkeypatch),
        ),
        budget_text,
    ),
    "guessed draft entries kept": (wrap(Eagle3Drafter, "observe", keep_guesses), draft_cache),
    "feature i with token i": (wrap(Eagle3Drafter, "observe", features_one_off), draft_cache),
    "the draft's rotation one position off": (wrap(Eagle3Drafter, "_layer", rotated), draft_cache),
}


SCENES = {
    "greedy": greedy,
    "warm": warm,
    "mistral": mistral,
    "batch": batch_text,
    "rerank": rerank_text,
    "end of text": eos_text,
    "budget": budget_text,
    "target's cache": target_cache,
    "draft's cache": draft_cache,
}


@pytest.mark.parametrize("scene", SCENES)
def test_without_a_bug_nothing_is_seen(scene: str) -> None:
    assert SCENES[scene]() == []


@pytest.mark.parametrize("bug", BUGS)
def test_bug_is_seen(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inject, scene = BUGS[bug]
    inject(monkeypatch)
    assert scene() != [], f"{bug}: no check of this folder noticed"
