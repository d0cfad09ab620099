"""The unrolled training forward against the drafting recursion that it stands for, position by position."""

import math

import pytest
import torch
from torch.nn import functional as F

from specdec.models.eagle3 import Eagle3Config, Eagle3Head
from specdec.training.features import FeatureBatch
from specdec.training.ttt import all_chains, some_chains, ttt_loss, unroll

VOCAB, DRAFT, WIDTH, STEPS = 23, 11, 8, 4


@pytest.fixture
def head() -> Eagle3Head:
    torch.manual_seed(0)
    head = Eagle3Head(
        Eagle3Config(
            hidden_size=WIDTH,
            target_hidden_size=WIDTH,
            num_heads=4,
            num_kv_heads=2,
            head_dim=6,
            intermediate_size=16,
            vocab_size=VOCAB,
            draft_vocab_size=DRAFT,
        )
    )
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    ids = torch.randperm(VOCAB)[:DRAFT].sort().values
    head.d2t.copy_(ids - torch.arange(DRAFT))
    head.t2d.zero_()[ids] = True
    return head


@pytest.fixture
def batch() -> FeatureBatch:
    torch.manual_seed(1)
    length = torch.tensor([12, 9, 5])
    ids = torch.randint(VOCAB, (3, 12))
    for row, stop in enumerate(length):
        ids[row, stop:] = 0
    return FeatureBatch(
        ids=ids,
        features=torch.randn(3, 12, 3 * WIDTH),
        final=torch.randn(3, 12, WIDTH),
        best=torch.randint(VOCAB, (3, 12)),
        prompt_length=torch.tensor([4, 2, 4]),  # the last row has an answer of one id: nothing to learn from
        length=length,
    )


def naive_chain(
    head: Eagle3Head, ids: torch.Tensor, features: torch.Tensor, start: int, steps: int
) -> list[torch.Tensor]:
    """A drafter on one row: true pairs up to `start`, then its own hidden states; the out of every step."""
    cache_k, cache_v, outs = [], [], []
    for position in range(start + steps):
        if position + 1 >= len(ids):
            break
        own = position > start
        hidden = outs[-1] if own else head.fuse(features[position])[None, None]
        embeds = head.embed_tokens(ids[position + 1])[None, None]
        q, k, v = head.project(embeds, hidden, *head.rope(torch.tensor([[position]])))
        cache_k.append(k[0, 0])
        cache_v.append(v[0, 0])
        if position < start:
            continue
        heads = []
        for number in range(head.config.num_heads):
            kv = number // (head.config.num_heads // head.config.num_kv_heads)
            scores = torch.stack([q[0, 0, number] @ key[kv] for key in cache_k]) / math.sqrt(head.config.head_dim)
            heads.append(sum(w * value[kv] for w, value in zip(scores.softmax(0), cache_v, strict=True)))
        outs.append(head.finish(hidden, torch.cat(heads)[None, None]))
    return [out[0, 0] for out in outs]


def test_every_step_is_the_drafting_recursion(head, batch):
    chains = all_chains(batch)
    assert [(int(r), int(t)) for r, t in zip(chains.row, chains.start, strict=True)] == [
        *((0, t) for t in range(3, 10)),
        *((1, t) for t in range(1, 7)),
    ]
    unrolled = [out for _, out in unroll(head, batch, chains, chains, STEPS)]
    for number in range(len(chains.row)):
        row, start = int(chains.row[number]), int(chains.start[number])
        stop = int(batch.length[row])
        naive = naive_chain(head, batch.ids[row, :stop], batch.features[row], start, STEPS)
        for step in range(min(STEPS, int(chains.left[number]))):
            torch.testing.assert_close(unrolled[step][number], naive[step], atol=1e-5, rtol=1e-5)


def test_a_part_of_the_chains_computes_the_same(head, batch):
    first = all_chains(batch)
    later = some_chains(first, 0.5, torch.Generator().manual_seed(3))
    assert 0 < len(later.row) < len(first.row)
    whole = [out for _, out in unroll(head, batch, first, first, STEPS)]
    part = [out for _, out in unroll(head, batch, first, later, STEPS)]
    for step in range(1, STEPS):
        counts = step < later.left
        torch.testing.assert_close(part[step][counts], whole[step][later.index][counts], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("trained_lm_head", [False, True])
def test_loss_and_gradients_equal_the_definition(head, batch, trained_lm_head):
    head.lm_head.weight.requires_grad_(trained_lm_head)
    head.embed_tokens.weight.requires_grad_(False)
    ids = head.t2d.nonzero()[:, 0]
    teacher_weight = torch.randn(VOCAB, WIDTH)[ids]
    chains = all_chains(batch)
    loss = ttt_loss(head, batch, teacher_weight, chains, chains, STEPS)
    loss.backward()
    got = {name: p.grad.clone() for name, p in head.named_parameters() if p.requires_grad}
    head.zero_grad()

    expected = torch.zeros(())
    steps: list[list[torch.Tensor]] = [[] for _ in range(STEPS)]
    for row, start in zip(chains.row.tolist(), chains.start.tolist(), strict=True):
        stop = int(batch.length[row])
        for step, out in enumerate(naive_chain(head, batch.ids[row, :stop], batch.features[row], start, STEPS)):
            taught_at = start + 1 + step
            if taught_at + 1 < stop and int(batch.best[row, taught_at]) in ids.tolist():
                teacher = (teacher_weight @ batch.final[row, taught_at]).softmax(-1)
                steps[step].append(F.cross_entropy(head.logits(out), teacher))
    for step, losses in enumerate(steps):
        expected = expected + 0.8**step * torch.stack(losses).mean()
    torch.testing.assert_close(loss, expected, atol=1e-5, rtol=1e-5)
    expected.backward()
    for name, parameter in head.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(got[name], parameter.grad, atol=1e-5, rtol=1e-4, msg=name)
