"""Training an EAGLE-3 head: training-time test on the target's recorded features.

The head drafts from its own hidden states, so it is trained on them (EAGLE-3, section 3.2). With x the ids, f the
features and H the final hidden states of a row, the chain that starts at position t unrolls

    step 0:  hidden g_t = fc(f_t),      token x_{t+1},    RoPE position t,      sees the true keys 0..t
    step j:  hidden = out of step j-1,  token x_{t+1+j},  RoPE position t+j,    sees those and its own keys of steps 1..j

and step j is taught the target's distribution of x_{t+2+j}, softmax(lm_head H_{t+1+j}) over the draft vocabulary, by
cross-entropy with weight 0.8^j. Positions where the target's best id lies outside the draft vocabulary teach nothing. A chain
needs no other chain, so a random part of the positions can go beyond step 0 at a part of the price.

Laptop run: ``specdec train eagle3 --target smollm2 --data answers.jsonl --out runs/head --minutes 90``; the file
``runs/head/decay`` (``touch`` it) starts the closing decay of the learning rate at any time.
"""

import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed

from specdec.models.eagle3 import Eagle3Config, Eagle3Head
from specdec.training.data import read_rows, split_heldout
from specdec.training.features import FeatureBatch, FeatureStore, Row, default_taps

STEP_DISCOUNT = 0.8


@dataclass(frozen=True)
class Eagle3Options:
    """Options of ``train_eagle3``."""

    draft_vocab_size: int = 8192
    """How many ids the head can predict: the most frequent ones of the answers."""
    ttt_steps: int = 5
    """Unrolled steps of the training-time test."""
    chain_fraction: float = 0.5
    """Part of the positions that go beyond step 0, drawn anew for every batch."""
    rows: int | None = None
    """Use only so many training rows, drawn at random (all when absent)."""
    heldout: int = 64
    """Greedy rows kept for evaluation, spread over the kinds of text."""
    batch_size: int = 8
    """Rows a step."""
    learning_rate: float = 1e-3
    """Peak of AdamW's learning rate."""
    warmup_steps: int = 50
    """Steps until the peak."""
    decay_steps: int = 300
    """Steps from the peak to nearly nothing at the end."""
    max_steps: int = 100_000
    """Stop after so many steps, the decay among them."""
    minutes: float | None = None
    """Start the decay so that the run ends after about so many minutes of wall time."""
    eval_steps: int = 100
    """Steps between evaluations."""
    save_steps: int = 100
    """Steps between checkpoints."""
    max_disk_gb: float = 8.0
    """Refuse to record more features than this."""
    seed: int = 0
    """Seed of the split, the initial weights, the order and the chains."""


# ---------------------------------------------------------------------------------------------- the unrolled forward


class Chains(NamedTuple):
    """Chains in flat order [C], grouped by row; S is the largest number of chains in one row."""

    row: Tensor
    """int64 [C], batch row"""
    start: Tensor
    """int64 [C], position t where the chain starts"""
    slot: Tensor
    """int64 [C], number of the chain within its row, below S"""
    left: Tensor
    """int64 [C], how many steps still have a next id in the row: step j counts where j < left"""
    index: Tensor
    """int64 [C], number of the chain among all chains of the batch"""


def all_chains(batch: FeatureBatch) -> Chains:
    """One chain for every position whose step 0 predicts an answer id but the first (which the target gives itself)."""
    first, last = batch.prompt_length - 1, batch.length - 3
    positions = torch.arange(batch.ids.shape[1])
    row, start = ((positions >= first[:, None]) & (positions <= last[:, None])).nonzero(as_tuple=True)
    return Chains(row, start, start - first[row], last[row] - start + 1, torch.arange(len(row)))


def some_chains(chains: Chains, fraction: float, generator: torch.Generator) -> Chains:
    """A random part of the chains, the same fraction of every row in expectation."""
    keep = torch.rand(len(chains.row), generator=generator) < fraction
    row, start, _, left, index = (part[keep] for part in chains)
    counts = torch.bincount(row, minlength=1)
    slot = torch.arange(len(row)) - (counts.cumsum(0) - counts)[row]
    return Chains(row, start, slot, left, index)


def unroll(head: Eagle3Head, batch: FeatureBatch, first: Chains, later: Chains, steps: int) -> Iterator[tuple[Chains, Tensor]]:
    """Yield (chains, out [C, h]) of every step: `first` for step 0, `later`, a part of them, for the others."""
    batch_rows, length = batch.ids.shape
    embeds = head.embed_tokens(batch.ids).detach()
    positions = torch.arange(length - 1).expand(batch_rows, -1)
    fused = head.fuse(batch.features[:, :-1])
    q, keys, values = head.project(embeds[:, 1:], fused, *head.rope(positions))
    attended = F.scaled_dot_product_attention(
        q.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2), is_causal=True, enable_gqa=True
    )
    attended = attended.transpose(1, 2).flatten(2)
    out = head.finish(fused[first.row, first.start][None], attended[first.row, first.start][None])[0]
    yield first, out

    if steps == 1 or not len(later.row):
        return
    out = out[later.index]
    width = int(later.slot.max()) + 1
    visible = torch.zeros(batch_rows, width, length - 1, dtype=torch.bool)
    visible[later.row, later.slot] = torch.arange(length - 1) <= later.start[:, None]
    bias = torch.zeros(visible.shape).masked_fill_(~visible, float("-inf"))[:, None, None]  # [B, 1, 1, S, T]
    bias[:, :, :, :, 0] = 0.0  # the rows of unused slots need one finite entry; position 0 is visible to all others
    own: list[tuple[Tensor, Tensor]] = []
    for step in range(1, steps):
        ahead = (later.start + 1 + step).clamp(max=length - 1)  # beyond the row's end nothing is taught
        q, k, v = head.project(
            embeds[later.row, ahead][None], out[None], *head.rope((later.start + step)[None])
        )
        own.append((k[0], v[0]))
        attended = _chain_attention(q[0], keys, values, own, bias, later)
        out = head.finish(out[None], attended[None])[0]
        yield later, out


def _chain_attention(
    q: Tensor, keys: Tensor, values: Tensor, own: Sequence[tuple[Tensor, Tensor]], bias: Tensor, chains: Chains
) -> Tensor:
    """Attention of q [C, Hq, d] over its row's true keys [B, T, Hkv, d] and the chain's own (k, v) [C, Hkv, d]: [C, Hq*d]."""
    batch_rows, length, kv_heads, head_dim = keys.shape
    groups = q.shape[1] // kv_heads
    width = bias.shape[3]
    scaled = q.unflatten(1, (kv_heads, groups)) * head_dim**-0.5  # [C, Hkv, G, d]
    grid = scaled.new_zeros(batch_rows, width, kv_heads, groups, head_dim)
    grid = grid.index_put((chains.row, chains.slot), scaled).permute(0, 2, 3, 1, 4)  # [B, Hkv, G, S, d]
    true = (grid.flatten(2, 3) @ keys.permute(0, 2, 3, 1)).unflatten(2, (groups, width)) + bias  # [B, Hkv, G, S, T]
    true = true.permute(0, 3, 1, 2, 4)[chains.row, chains.slot]  # [C, Hkv, G, T]
    mine = torch.stack([(scaled * k[:, :, None]).sum(-1) for k, _ in own], dim=-1)  # [C, Hkv, G, j]
    weights = torch.cat((true, mine), dim=-1).float().softmax(-1).to(q.dtype)
    spread = weights.new_zeros(batch_rows, width, kv_heads, groups, length)
    spread = spread.index_put((chains.row, chains.slot), weights[..., :length]).permute(0, 2, 3, 1, 4)
    mixed = (spread.flatten(2, 3) @ values.permute(0, 2, 1, 3)).unflatten(2, (groups, width))  # [B, Hkv, G, S, d]
    mixed = mixed.permute(0, 3, 1, 2, 4)[chains.row, chains.slot]
    for step, (_, v) in enumerate(own):
        mixed = mixed + weights[..., length + step, None] * v[:, :, None]
    return mixed.flatten(1)


# ------------------------------------------------------------------------------------------------------------ the loss


class _SoftCrossEntropy(torch.autograd.Function):
    """sum_i CE(p_i, softmax(W h_i)) without the [M, Vd] logits in memory: the gradient is made on the way, chunk by chunk."""

    CHUNK = 256

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, teacher: Tensor, index: Tensor) -> Tensor:
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight) if weight.requires_grad else None
        total = hidden.new_zeros(())
        for start in range(0, len(hidden), _SoftCrossEntropy.CHUNK):
            chunk = slice(start, start + _SoftCrossEntropy.CHUNK)
            logits, p = hidden[chunk] @ weight.T, teacher[index[chunk]]
            normaliser = logits.logsumexp(-1, keepdim=True)
            total += normaliser.sum() - torch.dot(p.flatten(), logits.flatten())
            grad = logits.sub_(normaliser).exp_().sub_(p)
            torch.mm(grad, weight, out=grad_hidden[chunk])
            if grad_weight is not None:
                grad_weight.addmm_(grad.T, hidden[chunk])
        ctx.save_for_backward(grad_hidden, grad_weight)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        return grads[0] * grad_hidden, None if grad_weight is None else grads[0] * grad_weight, None, None


def ttt_loss(
    head: Eagle3Head, batch: FeatureBatch, teacher_weight: Tensor, first: Chains, later: Chains, steps: int
) -> Tensor:
    """The discounted sum over steps of the mean cross-entropy, a scalar.

    Args:
        teacher_weight: [Vd, h_t], the target's output rows of the draft vocabulary.
        first, later: chains of step 0 and of the other steps (``all_chains``, ``some_chains``).
    """
    with torch.no_grad():
        teacher = (batch.final[first.row, first.start + 1] @ teacher_weight.T).float().softmax(-1)  # [C, Vd]
        taught = head.t2d[batch.best[first.row, first.start + 1]]
    total = teacher.new_zeros(())
    for step, (chains, out) in enumerate(unroll(head, batch, first, later, steps)):
        # The chains of one row are consecutive, so the position that chain c reaches in step j is where chain c+j starts.
        reached = chains.index + step
        usable = (step < chains.left).nonzero()[:, 0]
        usable = usable[taught[reached[usable]]]
        if len(usable):
            loss = _SoftCrossEntropy.apply(head.norm(out[usable]), head.lm_head.weight, teacher, reached[usable])
            total = total + STEP_DISCOUNT**step * loss / len(usable)
    return total


# --------------------------------------------------------------------------------------------------------- acceptance


@torch.no_grad()
def acceptance(head: Eagle3Head, batches: Iterator[FeatureBatch], steps: int, chain: int = 4) -> dict[str, Any]:
    """Greedy acceptance along stored greedy answers.

    Returns:
        top1: part of all positions where the first draft is the target's argmax; by_step: for every step the same among
        the chains whose earlier steps were all right; tau: ids per round, bonus included, when greedy chains of
        `chain` drafts walk the answers; rounds: how many rounds that took.
    """
    right, tried = np.zeros(steps), np.zeros(steps)
    emitted = rounds = 0
    for batch in batches:
        chains = all_chains(batch)
        alive = torch.ones(len(chains.row), dtype=torch.bool)
        accepted = torch.zeros(len(chains.row), dtype=torch.int64)
        for step, (_, out) in enumerate(unroll(head, batch, chains, chains, steps)):
            reached = (chains.start + 1 + step).clamp(max=batch.ids.shape[1] - 1)
            guess = torch.cat([head.target_ids(head.logits(part).argmax(-1)) for part in out.split(512)])
            alive &= step < chains.left
            tried[step] += int(alive.sum())
            alive &= guess == batch.best[chains.row, reached]
            right[step] += int(alive.sum())
            if step < chain:
                accepted += alive
        for row in range(len(batch.ids)):
            here, position = accepted[chains.row == row].tolist(), 0
            while position < len(here):
                rounds += 1
                emitted += here[position] + 1
                position += here[position] + 1
    by_step = right / np.maximum(tried, 1)
    return {
        "top1": round(float(by_step[0]), 4),
        "by_step": [round(float(rate), 4) for rate in by_step],
        "tau": round(emitted / max(rounds, 1), 4),
        "rounds": rounds,
    }


# -------------------------------------------------------------------------------------------------------- a new head


def draft_vocabulary(rows: Sequence[Row], size: int, always: Sequence[int]) -> Tensor:
    """The `size` most frequent ids of the answers, ascending, int64; those in `always` among them."""
    counts = Counter(int(token) for row in rows for token in row.ids[row.prompt_length :])
    ranked = sorted(counts, key=lambda token: (-counts[token], token))
    if len(ranked) < size:  # a small corpus: fill up with the lowest ids that it never used
        used = set(ranked)
        ranked += [token for token in range(size + len(used)) if token not in used]
    kept = list(dict.fromkeys([*always, *ranked]))[:size]
    return torch.tensor(sorted(kept))


def new_head(target: Any, draft_ids: Tensor, num_features: int) -> Eagle3Head:
    """A head for `target` that starts as close to it as it can.

    The layer starts as the target's last one, reading the hidden half of its input; the fusion starts as "take the
    highest tap"; the output rows are the target's own, frozen.
    """
    config = target.config
    last, head_dim = target.model.layers[-1], getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = config.to_dict().get("rope_parameters") or {"rope_type": "default", "rope_theta": config.rope_theta}
    embed_tokens = target.get_input_embeddings()
    head = Eagle3Head(
        Eagle3Config(
            hidden_size=config.hidden_size,
            target_hidden_size=config.hidden_size,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=head_dim,
            intermediate_size=config.intermediate_size,
            vocab_size=config.vocab_size,
            draft_vocab_size=len(draft_ids),
            num_features=num_features,
            rms_norm_eps=config.rms_norm_eps,
            max_position_embeddings=config.max_position_embeddings,
            rope={"rope_parameters": rope},
        ),
        embed_tokens,
    )
    head.d2t.copy_(draft_ids - torch.arange(len(draft_ids)))
    head.t2d.zero_()[draft_ids] = True
    _start_from(head, last, target)
    head.lm_head.weight.data.copy_(target.get_output_embeddings().weight[draft_ids])
    head.lm_head.weight.requires_grad_(False)
    return head


@torch.no_grad()
def _start_from(head: Eagle3Head, last: Any, target: Any) -> None:
    layer, width = head.midlayer, head.config.hidden_size
    for name in ("q_proj", "k_proj", "v_proj"):
        weight = getattr(layer.self_attn, name).weight
        nn.init.normal_(weight[:, :width], std=0.02)
        weight[:, width:].copy_(getattr(last.self_attn, name).weight)
    layer.self_attn.o_proj.load_state_dict(last.self_attn.o_proj.state_dict())
    layer.mlp.load_state_dict({name: value for name, value in last.mlp.state_dict().items()})
    layer.hidden_norm.weight.copy_(last.input_layernorm.weight)
    layer.post_attention_layernorm.weight.copy_(last.post_attention_layernorm.weight)
    head.norm.weight.copy_(target.model.norm.weight)
    nn.init.normal_(head.fc.weight, std=0.002)
    head.fc.weight[:, -width:] += torch.eye(width)


# --------------------------------------------------------------------------------------------------------- the trainer


class WarmupStableDecay:
    """Learning-rate factor of a step: linear warm-up, constant, and a linear decay that starts when it is told to.

    The scheduler saves this object's attributes with a checkpoint, so a resumed run knows where its decay began.
    """

    def __init__(self, warmup_steps: int, decay_steps: int, floor: float = 0.02):
        self.warmup_steps, self.decay_steps, self.floor = warmup_steps, decay_steps, floor
        self.decay_from: int | None = None

    def __call__(self, step: int) -> float:
        if self.decay_from is not None and step > self.decay_from:
            return max(self.floor, 1.0 - (1.0 - self.floor) * (step - self.decay_from) / self.decay_steps)
        return min(1.0, (step + 1) / self.warmup_steps)

    def over(self, step: int) -> bool:
        """Whether the decay has ended."""
        return self.decay_from is not None and step >= self.decay_from + self.decay_steps


class Eagle3Trainer(Trainer):
    """Hugging Face's trainer with the TTT loss, acceptance as its evaluation, and a decay that can be asked for."""

    def __init__(self, head: Eagle3Head, store: FeatureStore, heldout: Sequence[int], options: Eagle3Options, **kwargs: Any):
        super().__init__(model=head, data_collator=_collate, **kwargs)
        self.store, self.heldout, self.options = store, heldout, options
        self.schedule = WarmupStableDecay(options.warmup_steps, options.decay_steps)
        target = store.target
        draft_ids = head.t2d.nonzero()[:, 0]
        self.teacher_weight = target.get_output_embeddings().weight.detach()[draft_ids].float()
        self.chain_generator = torch.Generator().manual_seed(options.seed)
        self.tokens_seen = 0

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        if self.lr_scheduler is None:
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer or self.optimizer, self.schedule)
        return self.lr_scheduler

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        batch = self.store.batch(inputs["row"].tolist())
        first = all_chains(batch)
        later = some_chains(first, self.options.chain_fraction, self.chain_generator)
        self.tokens_seen += len(first.row)
        loss = ttt_loss(model, batch, self.teacher_weight, first, later, self.options.ttt_steps)
        return (loss, {}) if return_outputs else loss

    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        """Measure acceptance on the held-out rows and hand it to the callbacks (the curve file among them)."""
        size = self.options.batch_size
        parts = (self.heldout[start : start + size] for start in range(0, len(self.heldout), size))
        result = acceptance(self.model, (self.store.batch(part) for part in parts), self.options.ttt_steps)
        metrics = {f"eval_{name}": value for name, value in result.items()}
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics


def _collate(items: Sequence[dict[str, int]]) -> dict[str, Tensor]:
    return {"row": torch.tensor([item["row"] for item in items])}


class _Curve(TrainerCallback):
    """Appends one JSON object an evaluation to curve.jsonl, with the time and tokens that led there."""

    def __init__(self, path: Path):
        self.path = path
        lines = path.read_text().splitlines() if path.exists() else []
        self.before = json.loads(lines[-1]) if lines else {"minutes": 0.0, "core_seconds": 0.0, "answer_tokens": 0}
        self.wall, self.cpu = time.time(), time.process_time()
        self.trainer: Eagle3Trainer | None = None

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **_: Any) -> None:
        assert self.trainer is not None
        losses = [entry["loss"] for entry in state.log_history[-10:] if "loss" in entry]
        line = {
            "step": state.global_step,
            "epoch": round(state.epoch or 0.0, 3),
            "minutes": round(self.before["minutes"] + (time.time() - self.wall) / 60, 2),
            "core_seconds": round(self.before["core_seconds"] + time.process_time() - self.cpu, 1),
            "answer_tokens": self.before["answer_tokens"] + self.trainer.tokens_seen,
            "rows_recorded": self.trainer.store.recorded(),
            "loss": round(sum(losses) / len(losses), 4) if losses else None,
            "decaying": self.trainer.schedule.decay_from is not None,
            **{name.removeprefix("eval_"): value for name, value in metrics.items()},
        }
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")


class _Decay(TrainerCallback):
    """Starts the decay when the file appears or the time runs out, and stops the run when the decay is over."""

    def __init__(self, schedule: WarmupStableDecay, request: Path, options: Eagle3Options):
        self.schedule, self.request, self.options = schedule, request, options
        self.started = time.time()
        self.first_step: int | None = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.first_step is None:
            self.first_step, self.started_steps = state.global_step, time.time()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.schedule.decay_from is None and self._due(state.global_step):
            self.schedule.decay_from = state.global_step
        if self.schedule.over(state.global_step):
            control.should_training_stop = control.should_save = control.should_evaluate = True

    def _due(self, step: int) -> bool:
        left = self.options.max_steps - step
        if self.request.exists() or left <= self.options.decay_steps:
            return True
        if self.options.minutes is None or self.first_step is None:
            return False
        seconds_a_step = (time.time() - self.started_steps) / max(step - self.first_step, 1)
        remaining = self.options.minutes * 60 - (time.time() - self.started)
        return remaining <= self.options.decay_steps * seconds_a_step


class _HeadConfig(TrainerCallback):
    """Writes config.json beside every checkpoint's weights, so that each is a head folder that loads."""

    def __init__(self, head: Eagle3Head):
        self.head = head

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        from specdec.checkpoints.eagle3 import write_config

        write_config(self.head.config, Path(args.output_dir) / f"checkpoint-{state.global_step}", tied=True)


def train_eagle3(
    target: Any,
    tokenizer: Any,
    data: Path,
    out: Path,
    options: Eagle3Options | None = None,
    *,
    features: Path | None = None,
    resume: bool = True,
) -> Path:
    """Train a head for `target` on its own answers; resumes from the last checkpoint in `out`.

    Args:
        target: a Llama-like causal LM of transformers, on the CPU, in fp32.
        data: JSON lines as ``generate_data`` writes them.
        out: gets checkpoint-*/, curve.jsonl and options.json.
        features: where target features are kept; `out`/features by default.

    Returns:
        The folder of the last checkpoint, which is a head that ``load_eagle3`` reads.
    """
    options = options or Eagle3Options()
    set_seed(options.seed)
    out.mkdir(parents=True, exist_ok=True)
    (out / "options.json").write_text(json.dumps(asdict(options), indent=1))
    target.requires_grad_(False).eval()
    rows = read_rows(data, tokenizer)
    training, heldout = split_heldout(rows, options.heldout, options.seed)
    training = training[: options.rows]
    taps = default_taps(target.config.num_hidden_layers)
    need = FeatureStore.disk_bytes([rows[i] for i in training + heldout], target.config.hidden_size, len(taps))
    if need > options.max_disk_gb * 1e9:
        raise ValueError(f"features need {need / 1e9:.1f} GB, above max_disk_gb = {options.max_disk_gb}; use fewer rows")
    store = FeatureStore(features or out / "features", rows, target, taps)
    head = new_head(target, draft_vocabulary(rows, options.draft_vocab_size, _stop_ids(target)), len(taps))
    trainer = _trainer(head, store, training, heldout, out, options)
    last = _last_checkpoint(out) if resume else None
    if last is None:
        trainer.evaluate()
    trainer.train(resume_from_checkpoint=last)
    found = _last_checkpoint(out)
    assert found is not None
    return Path(found)


def _stop_ids(target: Any) -> list[int]:
    ids = target.generation_config.eos_token_id
    return [] if ids is None else [ids] if isinstance(ids, int) else list(ids)


def _last_checkpoint(out: Path) -> str | None:
    from transformers.trainer_utils import get_last_checkpoint

    return get_last_checkpoint(str(out))


def _trainer(
    head: Eagle3Head, store: FeatureStore, training: Sequence[int], heldout: Sequence[int], out: Path, options: Eagle3Options
) -> Eagle3Trainer:
    from datasets import Dataset

    dataset = Dataset.from_dict({"row": list(training), "length": [len(store.rows[index].ids) for index in training]})
    arguments = TrainingArguments(
        output_dir=str(out),
        use_cpu=True,
        per_device_train_batch_size=options.batch_size,
        train_sampling_strategy="group_by_length",
        learning_rate=options.learning_rate,
        adam_beta2=0.95,
        weight_decay=0.0,
        max_steps=options.max_steps,
        logging_steps=10,
        logging_first_step=True,
        eval_strategy="steps",
        eval_steps=options.eval_steps,
        save_steps=options.save_steps,
        save_total_limit=2,
        remove_unused_columns=False,
        report_to="none",
        seed=options.seed,
        dataloader_pin_memory=False,
    )
    curve = _Curve(out / "curve.jsonl")
    trainer = Eagle3Trainer(
        head, store, heldout, options, args=arguments, train_dataset=dataset, eval_dataset=dataset, callbacks=[curve]
    )
    curve.trainer = trainer
    trainer.add_callback(_Decay(trainer.schedule, out / "decay", options))
    trainer.add_callback(_HeadConfig(head))
    return trainer
