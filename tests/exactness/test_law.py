"""The law of the sampled text is the target's own: chi-square tests, each beside a faulty rule that must fail it.

Every seed is fixed, so the tests are deterministic. A right implementation whose seeds had been drawn at random would
fail a bound of 1e-3 once in a thousand choices of seeds.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from oracle.models import decoder, lm_draft, prompt, tiny
from oracle.plain import last_logits, softmax, warp
from specdec_kernels import sample_tokens, verify_walk

from specdec.growth.chain import Chain
from specdec.growth.eagle2 import Eagle2
from specdec.growth.talon import Talon
from specdec.models.lm import CausalLM
from specdec.sampling import Sampler, Stream
from specdec.verifiers.target import TargetVerifier

pytestmark = [pytest.mark.exactness, pytest.mark.usefixtures("one_thread")]
SURE, NEVER = 1e-3, 1e-9
P = np.array([0.4, 0.3, 0.2, 0.1])
DRAWS = 20_000


def p_value(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """Pearson's test; outcomes that are expected fewer than five times are counted as one."""
    expected = probabilities * counts.sum()
    assert not counts[expected == 0].any(), "an impossible outcome"
    rare = expected < 5
    observed = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    if expected[-1] == 0:
        observed, expected = observed[:-1], expected[:-1]
    statistic = ((observed - expected) ** 2 / expected).sum()
    freedom = torch.tensor((len(expected) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, torch.tensor(statistic / 2)))


def emitted(candidates: list[int]) -> np.ndarray:
    """How often each token comes first, where the root's children are `candidates`: [4]."""
    tokens = torch.tensor([[0, *candidates]]).expand(DRAWS, -1)
    parents = torch.tensor([[-1] + [0] * len(candidates)]).expand(DRAWS, -1)
    logits = torch.tensor(P, dtype=torch.float32).log().expand(DRAWS, tokens.shape[1], -1)
    positions = (parents + 1).clamp(max=1) + torch.ones_like(parents) * 7  # the root's draw, then its children's
    chosen = sample_tokens(logits, torch.arange(DRAWS), Stream.TARGET, positions)
    count = torch.full((DRAWS,), tokens.shape[1])
    path, length, bonus = verify_walk(tokens, parents, count, chosen)
    first = torch.where(length > 0, tokens.gather(1, path[:, :1].clamp(min=0))[:, 0], bonus)
    return np.bincount(first.numpy(), minlength=4)


@pytest.mark.parametrize("candidates", [[1, 0], [0, 1], [3, 2, 1], [0, 1, 2, 3], [3], [0]], ids=str)
def test_one_node(candidates: list[int]) -> None:
    """D02: no renormalisation after a rejected sibling, or a final draw from the full p.

    D03: a draft that takes the argmax of q = [.1, .2, .3, .4], which is candidate [3], but is accepted with p / q.
    """
    counts = emitted(candidates)
    assert np.abs(counts / DRAWS - P).max() < 0.015
    assert p_value(counts, P) > SURE


@pytest.mark.parametrize(
    ("rule", "law"),
    [
        ("full p after rejection", [0.52, 0.39, 0.06, 0.03]),
        ("no renormalisation", [0.28, 0.30, 0.28, 0.14]),
        ("q that was not drawn from", [0.5625, 0.1875, 0.0, 0.25]),
    ],
)
def test_the_faulty_rules_fail(rule: str, law: list[float]) -> None:
    """The test has the power to see what users of other decoders met."""
    counts = np.random.default_rng(0).multinomial(DRAWS, law)
    assert p_value(counts, P) < NEVER


def test_empty_residual() -> None:
    """D02: p = q one-hot leaves nothing after a rejection: NaN, or an id out of nowhere. The one token is emitted."""
    logits = torch.full((50, 1, 4), float("-inf"))
    logits[..., 2] = 1.0013
    assert sample_tokens(logits, torch.arange(50), Stream.TARGET, torch.full((50, 1), 3)).eq(2).all()


class Redraws(TargetVerifier):
    """Faulty on purpose: after a rejection it draws the bonus again, from the whole distribution."""

    def verify(self, rows, tree, sampler):
        seen = []

        class Recording:
            def draw(self, logits, *rest, **options):
                seen.append(logits)
                return sampler.draw(logits, *rest, **options)

        verdict = super().verify(rows, tree, Recording())
        leaf = torch.cat((torch.zeros_like(verdict.length)[:, None], verdict.path), 1).gather(
            1, verdict.length[:, None]
        )
        logits = seen[0].gather(1, leaf[..., None].expand(-1, -1, seen[0].shape[-1]))
        again = sampler.draw(logits, rows.noise, (rows.length + verdict.length)[:, None], Stream.COIN)[:, 0]
        rejected = (tree.parents == leaf).any(-1)
        return verdict._replace(bonus=torch.where(rejected, again, verdict.bonus))


IDS = prompt(5)
SAMPLING = {"temperature": 1.3, "top_k": 6}


@pytest.fixture(scope="module")
def law() -> dict[tuple[int, int, int], float]:
    """The probability of every three tokens behind the prompt, from full forward passes."""
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        longer = {}
        for text, probability in found.items():
            for token, p in enumerate(softmax(warp(last_logits(tiny(), [*IDS, *text]), **SAMPLING))):
                if p > 0:
                    longer[(*text, token)] = probability * p
        found = longer
    assert abs(sum(found.values()) - 1) < 1e-6
    return found


def text_p_value(law, growth, verifier=None, rows: int = 100, batches: int = 24) -> float:
    """Of the tokens of many rows that differ in nothing but their seed; the second and third come out of trees."""
    made = decoder(pair=(lm_draft(), growth), verifier=verifier)
    counts = dict.fromkeys(law, 0)
    for batch in range(batches):
        seeds = list(range(batch * rows, (batch + 1) * rows))
        for output in made.generate([IDS] * rows, max_new_tokens=3, seed=seeds, **SAMPLING):
            counts[tuple(output.tokens)] += 1
    return p_value(np.array(list(counts.values())), np.array(list(law.values())))


@pytest.mark.parametrize("growth", [Chain(3), Eagle2(12, 4, 2), Talon(12)], ids=repr)
def test_the_text_has_the_targets_law(law, growth) -> None:
    assert text_p_value(law, growth) > SURE


def test_a_verifier_that_redraws_is_caught(law) -> None:
    """The negative control."""
    target = CausalLM(tiny())
    made = decoder(target, (lm_draft(), Talon(12)), verifier=Redraws(target))
    assert made.generate(IDS, max_new_tokens=3).tokens, "it runs"
    assert text_p_value(law, Talon(12), Redraws(target)) < NEVER


def test_the_law_has_many_outcomes(law) -> None:
    """Otherwise the test above would say little."""
    likely = sorted(law.values(), reverse=True)
    assert sum(p > 5 / 2400 for p in likely) > 30
    assert len(set(itertools.chain(*law))) > 20


def test_temperature_zero_is_the_argmax() -> None:
    logits = torch.tensor([[[1.0, 3.0, 3.0, 2.0]]])
    assert Sampler().draw(logits, None, torch.tensor([[1]])).tolist() == [[1]]
