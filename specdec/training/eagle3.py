"""Training an EAGLE-3 head on the target's recorded features, with Hugging Face's trainer.

The head is trained on its own hidden states (``ttt``) and starts as close to the target as it can (``new_head``).
Recording costs more than training, so a run starts with few rows and adds more pass by pass (``training_order``); the
learning rate is constant until the closing decay, which begins when the time or the steps run out, or on request.

Laptop run: ``specdec train eagle3 --target smollm2 --data answers.jsonl --out runs/head --minutes 90``; to end it early
with a finished head, ``touch runs/head/decay``. It may be interrupted at any time and resumes from its last checkpoint.
"""

import hashlib
import json
import os
import random
import shutil
import time
from collections import Counter, deque
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

from specdec.checkpoints.eagle3 import write_config
from specdec.cost import cpu_name
from specdec.models.eagle3 import Eagle3Config, Eagle3Head, default_taps
from specdec.training.data import read_rows, split_heldout, stop_ids
from specdec.training.features import FeatureBatch, FeatureStore, Row
from specdec.training.ttt import Chains, acceptance, all_chains, some_chains, ttt_loss

BEFORE_DECAY = "before-decay"


@dataclass(frozen=True)
class Eagle3Options:
    """Options of ``train_eagle3``."""

    draft_vocab_size: int = 8192
    """How many ids the head can predict: the most frequent ones of the answers."""
    ttt_steps: int = 5
    """Unrolled steps of the training-time test."""
    chain_fraction: float = 0.5
    """Part of the positions that go beyond step 0, drawn anew for every batch."""
    first_rows: int = 800
    """Rows of the first pass; recording a row's features costs more than training on it, so a run starts with few."""
    more_rows: int = 400
    """Rows that every later pass adds to those of the pass before, until all are in use."""
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
    eval_steps: int = 200
    """Steps between evaluations."""
    save_steps: int = 100
    """Steps between checkpoints."""
    max_disk_gb: float = 8.0
    """Refuse to record more features than this."""
    seed: int = 0
    """Seed of the split, the initial weights, the order and the chains."""

    def __post_init__(self) -> None:
        small = [name for name in _COUNTS if getattr(self, name) < 1]
        wrong = [f"{name} is {getattr(self, name)}, expected at least 1" for name in small]
        if not 0.0 <= self.chain_fraction <= 1.0:
            wrong.append(f"chain_fraction is {self.chain_fraction}, expected 0 to 1")
        if self.learning_rate <= 0:
            wrong.append(f"learning_rate is {self.learning_rate}, expected a positive number")
        if wrong:
            raise ValueError("; ".join(wrong))


_COUNTS = (
    *("draft_vocab_size", "ttt_steps", "first_rows", "heldout", "batch_size", "warmup_steps", "decay_steps"),
    *("max_steps", "eval_steps", "save_steps"),
)


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
    last, head_dim = (
        target.model.layers[-1],
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
    )
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
    layer.mlp.load_state_dict(last.mlp.state_dict())
    layer.hidden_norm.weight.copy_(last.input_layernorm.weight)
    layer.post_attention_layernorm.weight.copy_(last.post_attention_layernorm.weight)
    head.norm.weight.copy_(target.model.norm.weight)
    nn.init.normal_(head.fc.weight, std=0.002)
    head.fc.weight[:, -width:] += torch.eye(width)


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


class TrainedHead(nn.Module):
    """The head as the trainer sees it: its forward is the loss, its state is the head's, under the checkpoint's names.

    (The trainer writes to ``model.config``, so the head with its frozen configuration cannot be handed over itself.)
    """

    def __init__(self, head: Eagle3Head):
        super().__init__()
        self.head = head

    def forward(self, batch: FeatureBatch, teacher_weight: Tensor, first: Chains, later: Chains, steps: int) -> Tensor:
        return ttt_loss(self.head, batch, teacher_weight, first, later, steps)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.head.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.head.load_state_dict(*args, **kwargs)


class Eagle3Trainer(Trainer):
    """Hugging Face's trainer with the TTT loss, acceptance as its evaluation, and a decay that can be asked for."""

    def __init__(
        self, head: Eagle3Head, store: FeatureStore, heldout: Sequence[int], options: Eagle3Options, **kwargs: Any
    ):
        super().__init__(model=TrainedHead(head), data_collator=_collate, **kwargs)
        self.head, self.store, self.heldout, self.options = head, store, heldout, options
        self.schedule = WarmupStableDecay(options.warmup_steps, options.decay_steps)
        target = store.target
        draft_ids = head.t2d.nonzero()[:, 0]
        self.teacher_weight = target.get_output_embeddings().weight.detach()[draft_ids].float()
        self.decay = _Decay(self.schedule, Path(self.args.output_dir) / "decay", options)
        self.tokens_seen = 0

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        if self.lr_scheduler is None:
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer or self.optimizer, self.schedule)
        return self.lr_scheduler

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        batch = self.store.batch(inputs["row"].tolist())
        first = all_chains(batch)
        draw = torch.Generator().manual_seed(
            self.options.seed * 1_000_003 + self.state.global_step
        )  # survives a resume
        later = some_chains(first, self.options.chain_fraction, draw)
        self.tokens_seen += len(first.row)
        loss = model(batch, self.teacher_weight, first, later, self.options.ttt_steps)
        return (loss, {}) if return_outputs else loss

    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        """Measure acceptance on the held-out rows and hand it to the callbacks (the curve file among them)."""
        size = self.options.batch_size
        parts = (self.heldout[start : start + size] for start in range(0, len(self.heldout), size))
        result = acceptance(self.head, (self.store.batch(part) for part in parts), self.options.ttt_steps)
        metrics = {f"eval_{name}": value for name, value in result.items()}
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics


def _collate(items: Sequence[dict[str, int]]) -> dict[str, Tensor]:
    return {"row": torch.tensor([item["row"] for item in items])}


class _Curve(TrainerCallback):
    """Appends one JSON object an evaluation to curve.jsonl, with the time and tokens that led there."""

    def __init__(self, path: Path, trainer: Eagle3Trainer):
        self.path, self.trainer = path, trainer
        self.before: dict[str, Any] = {"minutes": 0.0, "core_seconds": 0.0, "answer_tokens": 0}
        self.wall, self.cpu = time.time(), time.process_time()

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step and self.path.exists():  # resumed: what was measured after that step does not count
            lines = [json.loads(line) for line in self.path.read_text(encoding="utf-8").splitlines()]
            self.before = max(
                (line for line in lines if line["step"] <= state.global_step), key=lambda line: line["step"]
            )

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **_: Any) -> None:
        losses = [entry["loss"] for entry in state.log_history[-10:] if "loss" in entry]
        line = {
            "step": state.global_step,
            "minutes": round(self.before["minutes"] + (time.time() - self.wall) / 60, 2),
            "core_seconds": round(self.before["core_seconds"] + time.process_time() - self.cpu, 1),
            "answer_tokens": self.before["answer_tokens"] + self.trainer.tokens_seen,
            "rows_recorded": self.trainer.store.recorded(),
            "loss": round(sum(losses) / len(losses), 4) if losses else None,
            "decaying": self.trainer.schedule.decay_from is not None,
            **{name.removeprefix("eval_"): value for name, value in metrics.items()},
        }
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


class _Decay(TrainerCallback):
    """Starts the decay when the file appears or the time runs out, and stops the run when the decay is over."""

    def __init__(self, schedule: WarmupStableDecay, request: Path, options: Eagle3Options):
        self.schedule, self.request, self.options = schedule, request, options
        self.started = time.time()
        self.ends: deque[float] = deque(maxlen=50)
        """When the latest steps ended: recording makes the first epoch slower than the others."""
        self.anew = False
        """The run goes on from before a decay: it is to be trained further, not to end as that one did."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.anew:
            self.schedule.decay_from = None

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.ends.append(time.time())
        if self.schedule.decay_from is None and self._due(state.global_step):
            self.schedule.decay_from = state.global_step
            control.should_save = True
        if self.schedule.over(state.global_step):
            control.should_training_stop = control.should_save = control.should_evaluate = True

    def _due(self, step: int) -> bool:
        if self.request.exists() or self.options.max_steps - step <= self.options.decay_steps:
            return True
        if self.options.minutes is None or len(self.ends) < 10:
            return False
        seconds_a_step = (self.ends[-1] - self.ends[0]) / (len(self.ends) - 1)
        remaining = self.options.minutes * 60 - (time.time() - self.started)
        return remaining <= self.options.decay_steps * seconds_a_step


class _Checkpoints(TrainerCallback):
    """Makes every checkpoint a head folder that loads, and keeps the one from which the decay began."""

    def __init__(self, head: Eagle3Head, schedule: WarmupStableDecay):
        self.head, self.schedule = head, schedule

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        write_config(self.head.config, folder, tied=True)
        if self.schedule.decay_from == state.global_step:
            shutil.copytree(folder, Path(args.output_dir) / BEFORE_DECAY, dirs_exist_ok=True)


def train_eagle3(
    target: Any,
    tokenizer: Any,
    data: Path,
    out: Path,
    options: Eagle3Options | None = None,
    *,
    features: Path | None = None,
    resume: bool | Path = True,
) -> Path:
    """Train a head for `target` on its own answers.

    Args:
        target: a Llama-like causal LM of transformers (it has ``.model.layers``), fp32, on the CPU.
        tokenizer: its tokenizer, with a chat template.
        data: JSON lines as ``generate_data`` writes them.
        out: gets checkpoint-*/, before-decay/, curve.jsonl (acceptance over training), options.json and run.json.
        features: where the target's features are kept; `out`/features by default.
        resume: go on from the last checkpoint in `out` (if there is one), from the checkpoint in this folder (such as
            `out`/before-decay, to train a finished run further), or start anew.

    Returns:
        The folder of the last checkpoint, which is a head that ``load_eagle3`` reads.

    Raises:
        ValueError: text that cannot be read or is too little, features above `max_disk_gb`, or a feature folder of
            another target or text.
    """
    options = options or Eagle3Options()
    set_seed(options.seed)
    target.requires_grad_(False).eval()
    rows = read_rows(data, tokenizer)
    training, heldout = split_heldout(rows, options.heldout, options.seed)
    order = training_order(rows, training, options)
    store = _store(features or out / "features", rows, {*order, *heldout}, target, options)
    draft_ids = draft_vocabulary(rows, options.draft_vocab_size, stop_ids(target))
    out.mkdir(parents=True, exist_ok=True)
    (out / "options.json").write_text(json.dumps(asdict(options), indent=1), encoding="utf-8")
    facts = describe_run(rows, data, draft_ids, store.taps)
    (out / "run.json").write_text(json.dumps(facts, indent=1), encoding="utf-8")
    head = new_head(target, draft_ids, len(store.taps))
    return _fit(_trainer(head, store, order, heldout, out, options), out, resume)


def _fit(trainer: Eagle3Trainer, out: Path, resume: bool | Path) -> Path:
    last = get_last_checkpoint(str(out)) if resume is True else str(resume) if resume else None
    if last is None:
        (out / "curve.jsonl").unlink(missing_ok=True)
        trainer.evaluate()
    trainer.decay.anew = last is not None and Path(last).name == BEFORE_DECAY
    trainer.train(resume_from_checkpoint=last)
    found = get_last_checkpoint(str(out))
    assert found is not None, "the trainer saves at the end of every run"
    return Path(found)


def _store(
    folder: Path, rows: Sequence[Row], used: Collection[int], target: Any, options: Eagle3Options
) -> FeatureStore:
    taps = default_taps(target.config.num_hidden_layers)
    need = FeatureStore.disk_bytes([rows[index] for index in used], target.config.hidden_size, len(taps)) / 1e9
    if need > options.max_disk_gb:
        raise ValueError(
            f"the features of {len(used)} rows need {need:.1f} GB, above max_disk_gb = {options.max_disk_gb}; "
            "raise it or use less text"
        )
    return FeatureStore(folder, rows, target, taps)


def describe_run(rows: Sequence[Row], data: Path, draft_ids: Tensor, taps: Sequence[int]) -> dict[str, Any]:
    """What a head's card says about its text and its making: counts, checksum, coverage, versions, processor."""
    kept = set(draft_ids.tolist())
    answers = [int(token) for row in rows for token in row.ids[row.prompt_length :]]
    return {
        "data": data.name,
        "data_sha256": hashlib.sha256(data.read_bytes()).hexdigest(),
        "rows": len(rows),
        "answer_tokens": len(answers),
        "coverage": round(sum(token in kept for token in answers) / len(answers), 4),
        "taps": list(taps),
        "software": f"torch {torch.__version__}, transformers {transformers.__version__}",
        "machine": f"{os.cpu_count()}-core {cpu_name()}",
    }


def training_order(rows: Sequence[Row], training: Sequence[int], options: Eagle3Options) -> list[int]:
    """Row indices in the order of training, `batch_size` at a time, for `max_steps` steps.

    Pass after pass over a growing part of the rows, greedy answers first (their argmaxes need not be computed). Within
    a pass the rows are shuffled, then sorted by length in pools of 16 batches so that little is padding, and the
    batches shuffled again.
    """
    shuffle = random.Random(options.seed)
    ranked = sorted(training, key=lambda index: not rows[index].greedy)  # stable, so still in random order
    size, order = options.batch_size, []
    use = options.first_rows
    while len(order) < options.max_steps * size:
        part = ranked[:use]
        shuffle.shuffle(part)
        batches = []
        for start in range(0, len(part), 16 * size):
            pool = sorted(part[start : start + 16 * size], key=lambda index: len(rows[index].ids))
            batches += [pool[first : first + size] for first in range(0, len(pool) - size + 1, size)]
        if not batches:
            raise ValueError(f"{len(part)} training rows do not fill one batch of {size}; add text or lower batch_size")
        shuffle.shuffle(batches)
        order += [index for batch in batches for index in batch]
        use += options.more_rows
    return order[: options.max_steps * size]


def _trainer(
    head: Eagle3Head,
    store: FeatureStore,
    order: Sequence[int],
    heldout: Sequence[int],
    out: Path,
    options: Eagle3Options,
) -> Eagle3Trainer:
    dataset: Any = [{"row": row} for row in order]  # any sequence will do as a map-style dataset
    arguments = TrainingArguments(
        output_dir=str(out),
        use_cpu=True,
        per_device_train_batch_size=options.batch_size,
        train_sampling_strategy="sequential",
        learning_rate=options.learning_rate,
        adam_beta2=0.98,
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
    trainer = Eagle3Trainer(head, store, heldout, options, args=arguments, train_dataset=dataset, eval_dataset=dataset)
    trainer.add_callback(_Curve(out / "curve.jsonl", trainer))
    trainer.add_callback(trainer.decay)
    trainer.add_callback(_Checkpoints(head, trainer.schedule))
    return trainer
