"""The decoder on the ops: in the interpreter's process every op that it calls is the Triton kernel."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle.scripted import situations, tree_of

from specdec.decoder import Decoder
from specdec.drafters.lm import LMDrafter
from specdec.evaluation.exactness import greedy_reference, random_draft, random_target
from specdec.growth.talon import Talon
from specdec.models.attention import Step
from specdec.models.cache import KVCache
from specdec.models.lm import CausalLM

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("family", ["llama", "mistral"])  # the second has a sliding window
def test_text_is_plain_decodings(device: str, family: str) -> None:
    model = random_target(family)
    prompts = [[3, 5, 8, 1], [7]]
    expected = [greedy_reference(model, ids, 8) for ids in prompts]
    drafter = LMDrafter(CausalLM(random_draft(model, 1).to(device), "draft"))
    outputs = Decoder(model.to(device), drafter, Talon(8)).generate(prompts, max_new_tokens=8)
    assert [out.tokens for out in outputs] == expected
    assert any(round_.path for out in outputs for round_ in out.rounds)


@settings(max_examples=10)
@given(case=situations(), window=st.sampled_from([None, 1, 3]), heads=st.sampled_from([(4, 2), (7, 1)]))
def test_the_fused_path_sees_what_the_mask_shows(device: str, case, window, heads) -> None:
    cached, pending, parents = case
    rows, dim = len(cached), 16
    generator = torch.Generator().manual_seed(sum(cached) + sum(map(len, parents)))
    cache = KVCache(1, heads[1], dim, torch.float32, torch.device(device))
    cache.start(rows, 24)
    cache.data.copy_(torch.randn(cache.data.shape, generator=generator))
    tree = tree_of(parents)
    lengths = torch.tensor(cached) + torch.tensor(pending)
    placement = tree.whole() if tree.size > 1 else None
    if placement is not None:
        placement = placement._replace(
            **{name: value.to(device) for name, value in placement._asdict().items() if isinstance(value, torch.Tensor)}
        )
    step = Step(
        cache, torch.tensor(cached).to(device), lengths.to(device) - 1, max(pending), int(lengths.max()) - 1, placement
    )
    width = step.positions.shape[1]
    query, key, value = (
        torch.randn(rows, width, n, dim, generator=generator).to(device) for n in (heads[0], heads[1], heads[1])
    )
    results = {}
    for fused in (False, True):
        step._fused = fused
        results[fused] = step.attend(0, query, key, value, 0.3, window)
    for row in range(rows):  # columns of ids that the row has cached, and nodes that it has not, are padding
        real = [*range(max(pending) - pending[row], max(pending) + len(parents[row]))]
        torch.testing.assert_close(results[True][row, real], results[False][row, real], rtol=1e-5, atol=1e-5)
