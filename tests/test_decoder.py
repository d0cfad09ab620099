"""The loop as a user meets it: where texts end, what is refused, what streams, what is read and what is kept."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from oracle.models import FAMILIES, clone, decoder, head_draft, lm_draft, prompt, text, tiny, tiny_draft, tiny_head
from oracle.scripted import Oracle, SampledSelf, Script, Spoiled, oracle, self_draft, wrong
from oracle.tokenizer import characters

import specdec
from specdec.decoder import Decoder
from specdec.drafters.lm import LMDrafter
from specdec.evaluation.exactness import greedy_reference, random_target
from specdec.growth.chain import Chain
from specdec.growth.eagle2 import Eagle2
from specdec.growth.talon import Talon
from specdec.models.lm import CausalLM
from specdec.request import Request
from specdec.verifiers.target import TargetVerifier

pytestmark = pytest.mark.usefixtures("one_thread")
NAN, INF = float("nan"), float("inf")
IDS = prompt(6)
GROWTHS = [Chain(4), Eagle2(16, 4, 3), Talon(16), Talon(8, 1.0)]


def known(new: int = 40) -> list[list[int]]:
    return [IDS + text("llama", IDS, new)]


def everybody():
    """A decoder of every kind: plain, scripted right and wrong, and with networks as drafts."""
    return [
        decoder(),
        decoder(pair=oracle(known(), 97, 5, 2)),
        decoder(pair=wrong(known(), 97)),
        decoder(pair=self_draft(tiny())),
        *(decoder(pair=(head_draft(texts=known()), growth)) for growth in GROWTHS),
        decoder(pair=(lm_draft(), Talon(16))),
    ]


# --- D07, D08, D09, D15: where a text ends ---------------------------------------------------------------------------


def with_eos(config, generation):
    """The tiny model with end-of-text ids in its two configs."""
    model = clone(tiny())
    model.config.eos_token_id, model.generation_config.eos_token_id = config, generation
    model.generation_config.pad_token_id = 0
    return model


@pytest.mark.exactness
@pytest.mark.parametrize("place", [0, 1, 2, 3, 4, 5])
def test_end_of_text_anywhere_in_a_block(place: int) -> None:
    """D07: only the last token of the committed block was looked at, so text ran on behind the end.

    With paths of up to four tokens the end comes first, inside, last and as the bonus token, as `place` goes up.
    """
    full = text("llama", IDS, 20)
    eos = full[place]
    assert full.index(eos) == place, "choose a prompt whose text does not hold it earlier"
    model = with_eos(None, eos)
    expected = greedy_reference(model, IDS, 20)
    assert expected == full[: place + 1]
    for made in everybody():
        output = made.generate(IDS, max_new_tokens=20, eos_token_ids=[eos])
        assert (output.tokens, output.finish_reason) == (expected, "eos")
        assert [token for r in output.rounds for token in r.tokens] == expected, "nor anything behind it in a stream"


@pytest.mark.exactness
@pytest.mark.parametrize("where", ["config", "generation", "both", "list", "neither"])
def test_end_of_text_ids_are_those_of_transformers(where: str) -> None:
    """D07: one of several ids was known, or one place where they are written. The generation config has the say."""
    full = text("llama", IDS, 20)
    early, late = full[2], full[5]
    model = with_eos(
        *{
            "config": (early, None),
            "generation": (None, late),
            "both": (early, late),
            "list": (None, [late, early]),
            "neither": (None, None),
        }[where]
    )
    expected = greedy_reference(model, IDS, 20)
    made = Decoder(model, *oracle(known(), 97, 5, 2))
    assert made.generate(IDS, max_new_tokens=20).tokens == expected
    assert made.generate(IDS, max_new_tokens=20, eos_token_ids=[]).tokens == full, "a call may say otherwise"


def test_the_caches_end_with_the_text() -> None:
    """D07: nothing behind the end in either cache's length."""
    from specdec.rows import Rows, Stopping
    from specdec.sampling import Sampler

    full = text("llama", IDS, 20)
    made = decoder(pair=self_draft(tiny(), 5))
    rows = Rows([IDS], 20, [0], Stopping(frozenset({full[3]})))
    assert len(list(made.rounds(rows, Sampler()))) > 1
    assert rows.host.length == [len(IDS) + 4]
    assert all(lengths[0] <= len(IDS) + 4 for lengths in rows.host.cached.values())
    assert {name: lengths.tolist() for name, lengths in rows.cached.items()} == rows.host.cached


@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize(("first", "last"), [(2, 3), (0, 1), (4, 7), (6, 6)])
def test_stop_strings(first: int, last: int, width: int) -> None:
    """D08: found only at the end of a block; or the text was cut and the ids were not. Also spread over two rounds."""
    tokenizer = characters()
    full = text("llama", IDS, 24)
    stop = tokenizer.decode(full[first : last + 1])
    made = decoder(pair=oracle(known(), 97, 5, width), tokenizer=tokenizer)
    output = made.generate(IDS, max_new_tokens=24, stop=stop)
    assert (output.tokens, output.finish_reason) == (full[: last + 1], "stop")
    assert output.text == tokenizer.decode(output.tokens, skip_special_tokens=True)
    assert output.text.endswith(stop)
    pieces = list(made.stream(IDS, max_new_tokens=24, stop=[stop, "never"]))
    assert "".join(piece.text for piece in pieces) == output.text


@pytest.mark.parametrize("new", [1, 2, 3, 7])
def test_the_budget(new: int) -> None:
    """D09: blocks were appended whole, or a draft worked although one token was left."""
    for made in everybody():
        output = made.generate(IDS, max_new_tokens=new)
        assert (output.tokens, output.finish_reason) == (text("llama", IDS, 40)[:new], "length")
        assert sum(r.draft_forwards for r in output.rounds) == 0 or new > 2
    drafter, growth = oracle(known(), 97, 5, 2)
    decoder(pair=(drafter, growth)).generate(IDS, max_new_tokens=new)
    assert (drafter.calls == 0) == (new <= 2), "one token comes of the prefill, the last needs no draft"


def test_a_budget_of_nothing() -> None:
    """D09: refused, and the same for every method: no forward pass."""
    for made in everybody():
        with pytest.raises(ValueError, match="max_new_tokens is 0; expected an integer >= 1"):
            made.generate(IDS, max_new_tokens=0)
        with pytest.raises(ValueError, match="max_new_tokens is 0"):
            list(made.stream(IDS, max_new_tokens=0))
        assert made.target.calls == 0


class Positions:
    """Catches the largest position that any forward of a model is given."""

    def __init__(self, model):
        self.largest = -1
        rotary = model.base_model.rotary_emb
        self._hook = rotary.register_forward_pre_hook(self._see, with_kwargs=True)

    def _see(self, _, args, kwargs) -> None:
        positions = args[1] if len(args) > 1 else kwargs["position_ids"]
        self.largest = max(self.largest, int(positions.max()))


@pytest.mark.exactness
@pytest.mark.parametrize("length", [20, 29, 31, 32])
def test_the_end_of_the_context(length: int) -> None:
    """D15: the lookahead ran past the cache or the rope table in the last rounds: a crash, or silent garbage."""
    model = random_target("llama", 0, max_position_embeddings=32)
    seen = Positions(model)
    ids = prompt(length)
    expected = text("llama", ids, 12)[: 33 - length]  # a token may follow the last position
    for pair in ((None, None), oracle([ids + text("llama", ids, 30)], 97, 6, 3), (lm_draft(), Talon(16))):
        output = decoder(model, pair).generate(ids, max_new_tokens=12)
        assert output.tokens == expected
        assert output.finish_reason == ("length" if length == 20 else "context")
        assert seen.largest < 32


def test_rows_that_reach_the_end_of_the_context_before_others() -> None:
    """D15: a row that has ended is carried along; its root must not lie behind the last position."""
    model = random_target("llama", 0, max_position_embeddings=32)
    seen = Positions(model)
    prompts = [prompt(30), prompt(8, 1), prompt(32, 2)]
    texts = [ids + text("llama", ids, 24) for ids in prompts]
    for pair in ((None, None), oracle(texts, 97, 6, 3, right=[5, 1, 5]), (lm_draft(), Eagle2(16, 4, 3))):
        outputs = decoder(model, pair).generate(prompts, max_new_tokens=24)
        assert [output.tokens for output in outputs] == [texts[0][30:33], texts[1][8:32], texts[2][32:33]]
        assert seen.largest < 32


def test_a_prompt_beyond_the_context() -> None:
    model = random_target("llama", 0, max_position_embeddings=32)
    for pair in ((None, None), (lm_draft(), Talon(16))):
        made = decoder(model, pair)
        with pytest.raises(ValueError, match="33 tokens, but the target's context is 32; shorten it"):
            made.generate(prompt(33))
        assert made.target.calls == 0


# --- D37: prompts ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("new", [1, 20])
def test_a_prompt_of_one_token(new: int) -> None:
    """D37: the draft of an EAGLE head has no pair to read before the first token."""
    ids = [IDS[0]]
    full = text("llama", ids, 30)
    pairs = [
        (None, None),
        oracle([ids + full], 97, 4, 2),
        (head_draft(texts=[ids + full]), Talon(16)),
        (lm_draft(), Chain(3)),
    ]
    for pair in pairs:
        assert decoder(pair=pair).generate(ids, max_new_tokens=new).tokens == full[:new]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "empty list"),
        ("", "the prompt is empty"),
        ([[1, 2], []], "prompt 1 is empty"),
        (3.5, "the prompt is a float"),
        ([1, "a"], "a prompt is"),
        ([0, 97], "holds the id 97, but the target's vocabulary has 97"),
        ([-1], "holds the id -1"),
    ],
)
def test_prompts_that_are_refused(given, message: str) -> None:
    """D37: the same in all methods, before any forward pass."""
    for made in (decoder(tokenizer=characters()), decoder(pair=(lm_draft(), Talon(16)), tokenizer=characters())):
        with pytest.raises(ValueError, match=message):
            made.generate(given)
        assert made.target.calls == 0


def test_begin_of_text_comes_once() -> None:
    """D37: doubled by a chat template that holds it, or dropped by a path of its own for speculation."""
    made = decoder(tokenizer=characters(bos=True, chat=True))
    assert made.generate("ab", max_new_tokens=1).prompt_tokens == [0, 67, 68]
    assert characters(bos=True)("ab")["input_ids"] == [0, 67, 68]
    chat = made.generate([{"role": "user", "content": "hi"}], max_new_tokens=1)
    assert chat.prompt_tokens == [0, *characters()("u:hi|a:")["input_ids"]]
    assert decoder(tokenizer=characters()).generate("ab", max_new_tokens=1).prompt_tokens == [67, 68]


def test_forms_of_a_prompt() -> None:
    made = decoder(tokenizer=characters())
    expected = text("llama", [67, 68], 8)
    for form in ("ab", [67, 68], torch.tensor([67, 68]), (67, 68)):
        assert made.generate(form, max_new_tokens=8).tokens == expected
    for form in (["ab", "ab"], [[67, 68], "ab"], torch.tensor([[67, 68], [67, 68]])):
        assert [output.tokens for output in made.generate(form, max_new_tokens=8)] == [expected] * 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": -1}, "max_new_tokens is -1"),
        ({"max_new_tokens": 2.5}, "max_new_tokens is 2.5"),
        ({"seed": [1, 2]}, "2 seeds for 1 prompts"),
        ({"seed": 2**70}, "expected an integer of 64 bits"),
        ({"seed": "a"}, "the seed is 'a'"),
        ({"seed": 1.5}, "the seed is 1.5"),
        ({"stop": ["", "a"]}, "expected non-empty strings"),
        ({"stop": "a"}, "stop strings need a tokenizer"),
        ({"stop": 5}, "stop is 5; expected a string or a list of strings"),
        ({"stop": [5]}, "expected non-empty strings"),
        ({"eos_token_ids": "a"}, "eos_token_ids is 'a'; expected an id or a list of ids"),
        ({"eos_token_ids": [1.5]}, "eos_token_ids is .1.5."),
        ({"temperature": None}, "temperature is None"),
    ],
)
def test_options_that_are_refused(options, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decoder().generate(IDS, **options)


def test_integers_of_any_library() -> None:
    full = text("llama", IDS, 8)
    made = decoder(tokenizer=characters())
    ids, seed = [np.int64(i) for i in IDS], np.int32(3)
    assert made.generate(ids, max_new_tokens=np.int64(8), seed=seed, stop=None).tokens == full
    assert [out.tokens for out in made.generate([ids, ids], max_new_tokens=8, seed=np.array([1, 2]))] == [full, full]
    assert [out.tokens for out in made.generate([torch.tensor([i]) for i in (5, 6)], max_new_tokens=1)] == [
        text("llama", [i], 1) for i in (5, 6)
    ], "rows of one id"
    for eos in (full[2], np.int64(full[2]), torch.tensor([full[2]])):
        expected = full[: full.index(full[2]) + 1]
        assert made.generate(IDS, max_new_tokens=8, eos_token_ids=eos).tokens == expected
        assert decoder(eos_token_ids=eos).generate(IDS, max_new_tokens=8).tokens == expected


def test_half_a_character() -> None:
    with pytest.raises(ValueError, match=r"lone surrogate '\\ud800' at character 1"):
        decoder(tokenizer=characters()).generate("a\ud800")


@pytest.mark.parametrize("name", ["generate", "stream"])
def test_options_are_shown(name: str) -> None:
    """In the signature, and where one is misspelt."""
    with pytest.raises(TypeError, match=f"{name} has no option 'max_tokens'; it has max_new_tokens, temperature, "):
        getattr(decoder(), name)(IDS, max_tokens=3)


def test_the_docstring_names_every_option_with_its_default() -> None:
    assert Decoder.generate.__doc__
    for option in fields(Request):
        assert f"{option.name}={option.default}" in Decoder.generate.__doc__


def test_text_without_a_tokenizer() -> None:
    with pytest.raises(ValueError, match="no tokenizer"):
        decoder().generate("hello")
    with pytest.raises(ValueError, match="no chat template"):
        decoder(tokenizer=characters()).generate([{"role": "user", "content": "hi"}])


# --- D23, D24, D26, D33: drafts and targets that misbehave ------------------------------------------------------------


@pytest.mark.exactness
@pytest.mark.parametrize("growth", GROWTHS, ids=repr)
@pytest.mark.parametrize("wrong_value", [NAN, INF, -INF])
def test_bad_draft_logits_only_lower_acceptance(growth, wrong_value: float) -> None:
    """D26, D24: NaN passed a confidence gate, or was the largest of a top-k; now it proposes nothing."""

    def spoil(logits, tree):
        calls[0] += 1
        if calls[0] % 3 == 0:
            logits[:] = wrong_value
        elif calls[0] % 3 == 1:
            logits[..., 5] = wrong_value
        return logits

    calls = [0]
    sometimes = decoder(pair=(Spoiled(head_draft().head, (0, 1, 2), spoil), growth))
    always = decoder(pair=(Spoiled(head_draft().head, (0, 1, 2), lambda logits, tree: logits * NAN), growth))
    with pytest.warns(RuntimeWarning, match="the draft proposed no token"):
        assert sometimes.generate(IDS, max_new_tokens=24).tokens == text("llama", IDS, 24)
    with pytest.warns(RuntimeWarning, match="the draft proposed no token"):
        output = always.generate(IDS, max_new_tokens=12)
    assert output.tokens == text("llama", IDS, 12)
    assert output.summary()["tau"] == 1


@pytest.mark.exactness
@pytest.mark.parametrize("bad_round", [1, 4])
def test_infinite_features_make_a_draft_useless_and_nothing_else(bad_round: int) -> None:
    """D33: fp16 overflows in the features. The draft's cache is lost with them, the text is not; it is said once."""

    class Overflowing(type(head_draft())):
        def observe(self, rows, span, tree, verdict):
            rounds.append(INF if len(rounds) + 1 == bad_round else 1.0)
            super().observe(rows, span._replace(features=span.features * rounds[-1]), tree, verdict)

    rounds: list[float] = []
    drafter = Overflowing(head_draft().head, (0, 1, 2), knows=lambda position: True)
    drafter.texts = known()
    with pytest.warns(RuntimeWarning, match="the draft proposed no token"):
        output = decoder(pair=(drafter, Talon(16))).generate(IDS, max_new_tokens=24)
    assert output.tokens == text("llama", IDS, 24)
    assert len(rounds) > 5


def bad_row(model, step: int, row: int):
    """Puts a NaN into one row of the target's logits, in the forward pass `step` (from 0)."""
    calls = [0]

    def hook(_, args, logits):
        calls[0] += 1
        if calls[0] == step + 1:
            logits[0, row, 5] = NAN
        return logits

    return model.get_output_embeddings().register_forward_hook(hook)


def chain_script(tokens: list[int]):
    script = Script([(tokens, list(range(-1, len(tokens) - 1)))], 97)
    return script, script


def test_a_nan_in_the_target_names_step_and_node() -> None:
    """D26: mapped to id 0, or to an id beyond the vocabulary, a numeric fault hides in plausible text."""
    model = clone(tiny())
    made = decoder(model)
    with bad_row(model, 3, 0), pytest.raises(FloatingPointError, match=r"row 0, new token 4: .* node 0 "):
        made.generate(IDS, max_new_tokens=10)
    made = decoder(model, chain_script(text("llama", IDS, 40)[1:4]))
    with bad_row(model, 1, 3), pytest.raises(FloatingPointError, match=r"row 0, new token 5: .* node 3 "):
        made.generate(IDS, max_new_tokens=10)
    with bad_row(model, 1, 2), pytest.raises(FloatingPointError, match=r"row 0, new token 4: .* node 2 "):
        made.generate(IDS, max_new_tokens=10, temperature=1.0, top_k=1)


def test_a_nan_that_is_not_on_the_path_is_no_error() -> None:
    """The draft may lead the target where its logits are bad; only what is emitted counts."""
    model = clone(tiny())
    made = decoder(model, chain_script([(text("llama", IDS, 2)[1] + 1) % 97, 3, 4]))
    with bad_row(model, 1, 2):
        assert made.generate(IDS, max_new_tokens=10).tokens == text("llama", IDS, 10)


@pytest.mark.parametrize("pair", ["ar", "lm", "head"])
def test_a_nan_does_not_outlive_its_generation(pair: str) -> None:
    """The buffers are kept; a masked entry that holds NaN still spoils a weighted sum (0 x NaN).

    A short row of a batch is computed over the entries of the longest one, so it meets what was there before.
    """
    model = clone(tiny())
    pairs = {"ar": (None, None), "lm": (lm_draft(), Talon(16)), "head": (head_draft(), Talon(16))}
    made = decoder(model, pairs[pair])
    prompts = [prompt(20, 1), prompt(3, 2)]
    hook = model.get_input_embeddings().register_forward_hook(lambda _, args, output: output * NAN)
    with hook, pytest.raises(FloatingPointError):
        made.generate([prompt(20), prompt(20)], max_new_tokens=10)
    outputs = made.generate(prompts, max_new_tokens=10)
    assert [output.tokens for output in outputs] == [text("llama", ids, 10) for ids in prompts]


# --- D38: the target drafts for itself -------------------------------------------------------------------------------


@pytest.mark.exactness
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_self_draft_is_accepted_whole(family: str, temperature: float) -> None:
    """D38: any rejection is a bug of cache or positions. At T = 1 the draft draws with the target's own noise."""
    drafter, growth = self_draft(tiny(family), 4)
    if temperature:
        drafter = SampledSelf(drafter.model)
    output = decoder(tiny(family), (drafter, growth)).generate(IDS, max_new_tokens=64, temperature=temperature, seed=2)
    assert output.tokens == text(family, IDS, 64, temperature=temperature, seed=2)
    accepted = [len(r.path) for r in output.rounds]
    assert accepted == [0] + [4] * 12 + [2]


# --- D36: memory -----------------------------------------------------------------------------------------------------


def live_tensors() -> int:
    gc.collect()
    # by type: isinstance would ask lazy modules for their class, which makes some of them warn
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


def leak(generations: int, most: int, look: int) -> list[int]:
    """Live tensors after every `look` turns; lengths vary, some texts end inside a block, some prompts are batches."""
    full = text("llama", IDS, 40)
    made = [
        decoder(pair=(head_draft(texts=known()), Talon(16))),
        decoder(pair=(lm_draft(), Eagle2(12, 3, 2))),
        decoder(pair=oracle(known(), 97, 4, 2)),
    ]
    counts = []
    for turn in range(generations):
        options = {"max_new_tokens": 4 + turn % most, "eos_token_ids": [full[9]] if turn % 2 else []}
        for each in made:
            output = each.generate(IDS if turn % 3 else [IDS, IDS[:3]], **options)
            shown = output if turn % 3 else output[0]
            assert shown.rounds[-1].tree["tokens"]
            del output, shown
        if turn % look == look - 1:
            counts.append(live_tensors())
    return counts


def test_memory_is_flat() -> None:
    """D36: outputs, rounds or caches that somebody kept."""
    warm, later = leak(12, 9, look=6)
    assert later <= warm


@pytest.mark.slow
def test_memory_is_flat_over_200_generations() -> None:
    counts = leak(200, 60, look=10)
    assert max(counts) <= counts[0]


def test_nothing_outlives_the_decoder() -> None:
    """D36: registries, hooks and closures held engines alive; only the caller's model remains."""
    tiny(), text("llama", IDS, 40), head_draft().head
    before = live_tensors()
    made = decoder(pair=(head_draft(texts=known()), Talon(16)))
    output = made.generate(IDS, max_new_tokens=20)
    assert output.rounds[3].tree["tokens"]
    del made, output
    assert live_tensors() <= before


# --- what a round reports, streams and reads -------------------------------------------------------------------------


def test_a_stream_is_the_text() -> None:
    tokenizer = characters()
    for made in everybody():
        made.tokenizer = tokenizer
        output = made.generate(IDS, max_new_tokens=24)
        pieces = list(made.stream(IDS, max_new_tokens=24))
        assert "".join(piece.text for piece in pieces) == output.text
        assert [token for piece in pieces for token in piece.tokens] == output.tokens == pieces[-1].output.tokens
        assert pieces[-1].output.finish_reason == "length"
        assert pieces[-1].output.text == output.text


def test_a_stream_takes_one_prompt() -> None:
    for prompts in ([IDS, IDS], [IDS]):
        with pytest.raises(ValueError, match=rf"a list of prompts was given \({len(prompts)} in it\); give the prompt"):
            decoder().stream(prompts)


def test_a_stream_is_checked_before_it_starts() -> None:
    made = decoder(tokenizer=characters())
    for given, options in (("", {}), (IDS, {"max_new_tokens": 0}), (IDS, {"temperature": "hot"})):
        with pytest.raises(ValueError, match="is"):
            made.stream(given, **options)


def test_a_second_stream_does_not_spoil_the_first() -> None:
    """They would share one cache; text from another's entries looks like text. The first one refuses to go on."""
    for made in (decoder(), decoder(pair=(head_draft(texts=known()), Talon(16))), decoder(pair=(lm_draft(), Chain(3)))):
        first, second = made.stream(IDS, max_new_tokens=12), made.stream(IDS[:3], max_new_tokens=12)
        next(first)
        assert [token for piece in second for token in piece.tokens] == text("llama", IDS[:3], 12)
        with pytest.raises(RuntimeError, match="another generation was started"):
            next(first)
        first, _ = made.stream(IDS, max_new_tokens=12), next(made.stream(IDS[:3], max_new_tokens=12))
        assert [token for piece in first for token in piece.tokens] == text("llama", IDS, 12), "one left off is no harm"


def test_a_second_generation_on_a_shared_head_does_not_spoil_the_first() -> None:
    """Two targets, one draft cache."""
    drafter = head_draft(texts=known())
    first, second = (Decoder(CausalLM(tiny()), drafter, Talon(16)).stream(IDS, max_new_tokens=12) for _ in range(2))
    next(first)
    assert [token for piece in second for token in piece.tokens] == text("llama", IDS, 12)
    with pytest.raises(RuntimeError, match="another generation was started on this EAGLE-3 drafter"):
        next(first)


@pytest.mark.exactness
def test_autocast_is_the_consumers_own() -> None:
    """Under autocast the logits were rounded, and the text was another one."""
    model = clone(tiny())
    made, seen = decoder(model, (head_draft(texts=known()), Talon(16))), set()
    model.get_output_embeddings().register_forward_hook(lambda _, args, logits: seen.add(logits.dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        tokens = []
        for piece in made.stream(IDS, max_new_tokens=24):
            tokens += piece.tokens
            assert torch.is_autocast_enabled("cpu")
    assert tokens == text("llama", IDS, 24)
    assert seen == {torch.float32}


def test_a_summary_of_very_little() -> None:
    for new in (1, 2):
        summary = decoder(pair=(lm_draft(), Talon(16))).generate(IDS, max_new_tokens=new).summary()
        assert (summary["tokens"], summary["draft_forwards"]) == (new, 0)
        assert summary["tau"] == (1 if new == 2 else None)


def test_a_round_shows_tree_path_and_time() -> None:
    """What a user sees: the path leads through the tree to the emitted ids, and the split adds up."""
    output = decoder(pair=(head_draft(texts=known()), Talon(16))).generate(IDS, max_new_tokens=24)
    written = list(IDS)
    for number, round_ in enumerate(output.rounds):
        tree = round_.tree
        assert tree["tokens"][0] == written[-1]
        assert tree["parents"][0] == -1
        assert round_.nodes == len(tree["tokens"]) == len(tree["scores"])
        assert [tree["tokens"][node] for node in round_.path] == round_.tokens[: len(round_.path)]
        for parent, node in zip([0, *round_.path], round_.path, strict=False):
            assert tree["parents"][node] == parent
        assert len(round_.tokens) == len(round_.path) + 1
        assert round_.verify_forwards == 1
        assert (round_.draft_forwards > 0) == (number > 0 and len(written) < len(IDS) + 23)
        assert set(round_.split) == {"draft", "build", "verify", "commit", "host"}
        assert all(seconds >= 0 for seconds in round_.split.values())
        written += round_.tokens
    summary = output.summary()
    assert summary["tau"] == pytest.approx(23 / (len(output.rounds) - 1))
    assert summary["delta"] == pytest.approx(sum(r.draft_forwards for r in output.rounds) / (len(output.rounds) - 1))
    assert summary["r_t"] == pytest.approx(1 / summary["tau"])
    assert summary["tokens"] == 24


class Reads:
    """Counts who, inside the package, asks a tensor for its value while decoding."""

    NAMES = ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__")

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.by = Counter()
        home = str(Path(specdec.__file__).parent)
        for name in self.NAMES:
            monkeypatch.setattr(torch.Tensor, name, self._counting(getattr(torch.Tensor, name), home))

    def _counting(self, original, home: str):
        def read(tensor, *args, **kwargs):
            code = sys._getframe(1).f_code
            if code.co_filename.startswith(home):
                self.by[code.co_name] += 1
            return original(tensor, *args, **kwargs)

        return read


@pytest.mark.parametrize("growth", [None, *GROWTHS], ids=repr)
def test_reads_of_a_round(growth, monkeypatch: pytest.MonkeyPatch) -> None:
    """One in `fetch`, and in eager mode one a draft layer to narrow it; a hidden read costs a wait for the device."""
    made = decoder(pair=(lm_draft(), growth) if growth else (None, None))
    reads = Reads(monkeypatch)
    outputs = made.generate([IDS, IDS[:3]], max_new_tokens=16)
    rounds = max((output.rounds for output in outputs), key=len)
    layers = sum(r.draft_forwards for r in rounds)
    assert reads.by == {"fetch": len(rounds)} | ({"narrow": layers} if growth else {})


# --- what plugs in, and what does not --------------------------------------------------------------------------------


def test_a_drafter_and_a_growth_come_together() -> None:
    with pytest.raises(ValueError, match="a drafter was given without a growth"):
        Decoder(tiny(), drafter=lm_draft())
    with pytest.raises(ValueError, match="a growth was given without a drafter"):
        Decoder(tiny(), growth=Chain(2))


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"target": "smollm2"}, r"target is 'smollm2'; .* use specdec.load\('smollm2'\)"),
        ({"target": None}, "target is None; expected a CausalLM or a transformers causal LM"),
        ({"growth": "talon"}, "growth is 'talon' .str., which lacks capacity, finish, grow"),
        ({"growth": Talon}, "growth is the class Talon; expected an instance"),
        ({"drafter": 3, "growth": Chain(2)}, "drafter is 3 .int., which lacks expand, .* expected a specdec.Drafter"),
        ({"drafter": tiny(), "growth": Chain(2)}, "drafter is LlamaForCausalLM"),
        ({"verifier": object()}, "verifier is .* which lacks commit, lossless, start, verify"),
    ],
)
def test_parts_that_are_none(parts, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Decoder(**({"target": tiny()} | parts))


def test_a_head_for_another_target() -> None:
    config = replace(tiny_head().config, target_hidden_size=24)
    drafter = head_draft()
    drafter.head = SimpleNamespace(config=config)
    with pytest.raises(ValueError, match="made for a target of hidden size 24 and 97 tokens, but this target has"):
        Decoder(tiny(), drafter, Chain(2))


@pytest.mark.exactness
def test_a_draft_model_without_a_name_of_its_own() -> None:
    """Its default name is the target's: one overwrote the other's length, and the text was wrong."""
    drafter = LMDrafter(CausalLM(tiny_draft()))
    made = Decoder(CausalLM(tiny()), drafter, Chain(4))
    assert made.generate(IDS, max_new_tokens=24).tokens == text("llama", IDS, 24)
    with pytest.raises(ValueError, match="the drafter's model is the target itself"):
        Decoder(drafter.model, drafter, Chain(4))
    with pytest.raises(ValueError, match="two models of one generation are called 'draft'"):
        Decoder(CausalLM(tiny(), "draft"), drafter, Chain(4)).generate(IDS)


def test_a_generation_config_that_wants_more_is_not_ignored() -> None:
    model = clone(tiny())
    model.generation_config.update(do_sample=True, temperature=0.7, top_k=5, top_p=0.9, repetition_penalty=1.0)
    Decoder(model, exact=True)
    model.generation_config.update(repetition_penalty=1.3, suppress_tokens=[5])
    message = r"generation config sets repetition_penalty=1.3, suppress_tokens=\[5\], which is not applied"
    with pytest.warns(RuntimeWarning, match=f"{message}: texts differ from transformers.generate"):
        Decoder(model)
    with pytest.raises(ValueError, match=f"{message}; exact=True refuses that"):
        Decoder(model, exact=True)


def test_a_growth_that_says_too_little() -> None:
    class Overfull(Chain):
        capacity = 3

        def grow(self, tree, nodes, logits, noise):
            layer = super().grow(tree, nodes, logits, noise)
            return replace(layer, expand_count=layer.count)

    with pytest.raises(ValueError, match=r"a tree of 4 nodes, .* its capacity is 3"):
        decoder(pair=(head_draft(texts=known()), Overfull(4))).generate(IDS)


def test_a_growth_that_takes_nothing() -> None:
    class Shy(Chain):
        def grow(self, tree, nodes, logits, noise):
            layer = super().grow(tree, nodes, logits, noise)
            return replace(layer, count=layer.count * 0, expand_count=layer.expand_count * 0)

    with pytest.warns(RuntimeWarning, match="or the growth policy chose none of its candidates"):
        output = decoder(pair=(head_draft(texts=known()), Shy(4))).generate(IDS, max_new_tokens=8)
    assert output.tokens == text("llama", IDS, 8)


def test_exact_refuses_a_verifier_that_is_not() -> None:
    class Lossy(TargetVerifier):
        lossless = False

    target = CausalLM(tiny())
    with pytest.raises(ValueError, match="exact=True refuses Lossy"):
        Decoder(target, verifier=Lossy(target), exact=True)
    assert Decoder(target, verifier=Lossy(target)).generate(IDS, max_new_tokens=2).exact is False
    assert Decoder(target, exact=True).generate(IDS, max_new_tokens=2).exact is True


def test_one_target_serves_several_decoders() -> None:
    """Taps belong to a generation, not to the model: a decoder without a head leaves none behind, and needs none."""
    target = CausalLM(tiny())
    plain = Decoder(target)
    eagle = Decoder(target, head_draft(texts=known()), Talon(16))
    for made in (eagle, plain, eagle, plain):
        assert made.generate(IDS, max_new_tokens=12).tokens == text("llama", IDS, 12)
    assert target.taps == ()


def test_the_doubles_are_what_the_protocols_ask_for() -> None:
    drafter, growth = oracle(known(), 97, 4, 2)
    assert isinstance(drafter, specdec.Drafter)
    assert isinstance(growth, specdec.Growth)
    assert isinstance(Script([([1], [-1])], 97), specdec.Growth)
    assert isinstance(TargetVerifier(CausalLM(tiny())), specdec.Verifier)
    assert isinstance(Oracle(known(), 97, 2, 1), specdec.Drafter)
