"""From logits to a token: Hugging Face's own processors are the reference for the warping, the oracle for the noise."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from oracle import plain
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from specdec.sampling import Noise, Sampler, Stream

pytestmark = pytest.mark.usefixtures("one_thread")
INF, NAN = float("inf"), float("nan")


def logits(rows: int = 6, vocab: int = 97, seed: int = 0, coarse: bool = False) -> torch.Tensor:
    drawn = 3 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))
    return drawn.round() if coarse else drawn


@pytest.mark.parametrize("coarse", [False, True], ids=["", "ties"])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.3, 1e-6])
@pytest.mark.parametrize("top_k", [0, 1, 5, 97, 200])
@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.8])
def test_processing_equals_hugging_face(temperature: float, top_k: int, top_p: float, coarse: bool) -> None:
    """The same order and the same tie rules: temperature, top-k, top-p."""
    scores = expected = logits(coarse=coarse)
    expected = TemperatureLogitsWarper(temperature)(None, expected)
    if top_k:
        expected = TopKLogitsWarper(top_k)(None, expected)
    if top_p < 1:
        expected = TopPLogitsWarper(top_p)(None, expected)
    sampler = Sampler(temperature, top_k, top_p)
    assert torch.equal(sampler.process(scores), expected)
    assert torch.equal(sampler.process(scores.view(2, 3, -1)), expected.view(2, 3, -1)), "any leading shape"
    assert torch.isfinite(expected).any(-1).all()


@pytest.mark.parametrize("top_p", [1.0, 0.8])
def test_processing_equals_the_oracle(top_p: float) -> None:
    for row in logits():
        ours = Sampler(0.7, 12, top_p).process(row).numpy()
        np.testing.assert_allclose(ours, plain.warp(row.numpy(), 0.7, 12, top_p), rtol=1e-6)


@pytest.mark.parametrize("sampler", [Sampler(), Sampler(1.0), Sampler(0.7, 20, 0.9)], ids=repr)
def test_draws_equal_the_oracle(sampler: Sampler) -> None:
    seeds, positions = [3, 9], [[5, 6, 6], [11, 12, 13]]
    scores = logits().view(2, 3, -1)
    drawn = sampler.draw(scores, Noise(torch.tensor(seeds)), torch.tensor(positions))
    for row in range(2):
        for node in range(3):
            expected = scores[row, node].numpy()
            if not sampler.greedy:
                expected = plain.warp(expected, sampler.temperature, sampler.top_k, sampler.top_p)
                expected = expected + plain.gumbel(seeds[row], 0, positions[row][node], 97)
            assert drawn[row, node] == int(np.argmax(expected))


@pytest.mark.parametrize("sampler", [Sampler(), Sampler(1.0), Sampler(0.7, 2, 0.9)], ids=repr)
def test_unusable_logits(sampler: Sampler) -> None:
    """D26: a NaN anywhere in a row, or no finite maximum, gives -1 and never an id; the other rows are not touched."""
    rows = torch.tensor([[NAN, 1.0, 2.0], [-INF, -INF, -INF], [0.0, INF, 1.0], [NAN] * 3, [0.0, 50.0, -INF]])
    drawn = sampler.draw(rows[None], Noise(torch.tensor([0])), torch.arange(5)[None])
    assert drawn.tolist() == [[-1, -1, -1, -1, 1]]


def test_streams_are_independent() -> None:
    noise, position = Noise(torch.tensor([5])), torch.tensor([[7]])
    drawn = [noise.gumbel(stream, position, 1000).flatten() for stream in Stream]
    correlation = torch.corrcoef(torch.stack(drawn)) - torch.eye(len(Stream))
    assert correlation.abs().max() < 0.15
    assert torch.equal(noise.gumbel(Stream.DRAFT, position, 1000).flatten(), drawn[Stream.DRAFT])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"temperature": NAN}, "temperature is nan"),
        ({"temperature": INF}, "temperature is inf"),
        ({"temperature": "hot"}, "temperature is 'hot'"),
        ({"temperature": None}, "temperature is None"),
        ({"top_k": True}, "top_k is True"),
        ({"top_p": "x"}, "top_p is 'x'"),
        ({"top_p": None}, "top_p is None"),
        ({"temperature": 1.0, "top_k": -1}, "top_k is -1"),
        ({"temperature": 1.0, "top_k": 2.5}, "top_k is 2.5"),
        ({"temperature": 1.0, "top_p": 0.0}, "top_p is 0.0"),
        ({"temperature": 1.0, "top_p": 1.5}, "top_p is 1.5"),
    ],
)
def test_a_value_out_of_range_is_refused(options, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sampler(**options)
