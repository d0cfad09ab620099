"""Training a draft network on a target's recorded features, with Hugging Face's trainer: all that the networks share.

Recording costs more than training, so a run starts with few rows and adds more pass by pass (`training_order`); the
learning rate is constant until the closing decay, which begins when the time or the steps run out, or on request: to
end a run early with a finished network, ``touch OUT/decay``. A run may be interrupted at any time and resumes from its
last checkpoint. What is trained, and for what, is an `Objective`.
"""

import hashlib
import json
import os
import random
import shutil
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Protocol

import torch
import transformers
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

from specdec.cost import cpu_name
from specdec.models.eagle3 import default_taps
from specdec.training.data import read_rows, split_heldout
from specdec.training.features import FeatureBatch, FeatureStore, Row

BEFORE_DECAY = "before-decay"


@dataclass(frozen=True)
class RunOptions:
    """Options of every training run."""

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
    """Seed of the split, the initial weights, the order of the rows and whatever an objective draws."""

    def __post_init__(self) -> None:
        counts = [f.name for f in fields(self) if f.type in (int, "int") and f.name not in ("seed", "more_rows")]
        wrong = [f"{name} is {getattr(self, name)}, expected at least 1" for name in counts if getattr(self, name) < 1]
        if self.learning_rate <= 0:
            wrong.append(f"learning_rate is {self.learning_rate}, expected a positive number")
        wrong += self.complaints()
        if wrong:
            raise ValueError("; ".join(wrong))

    def complaints(self) -> list[str]:
        """What is wrong with the options that a subclass adds."""
        return []


class Objective(Protocol):
    """A draft network and what it is trained for.

    Attributes:
        network: its `state_dict` is what a checkpoint holds.
    """

    network: nn.Module

    def loss(self, batch: FeatureBatch, step: int) -> tuple[Tensor, int]:
        """The loss, a scalar, and how many positions taught; what it draws depends on `step`, to survive a resume."""

    def evaluate(self, batches: Iterator[FeatureBatch]) -> dict[str, Any]:
        """Figures of the network along held-out greedy answers, for the curve."""

    def write_config(self, folder: Path) -> None:
        """Adds to a checkpoint what makes it a draft that loads."""

    def facts(self, rows: Sequence[Row]) -> dict[str, Any]:
        """What the card of the network says about its text, besides what every run tells."""


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


class TrainedNetwork(nn.Module):
    """The network as the trainer sees it: its forward is the loss, its state is the network's, under the same names.

    (The trainer writes to ``model.config``, so a network with a frozen configuration cannot be handed over itself.)
    """

    def __init__(self, objective: Objective):
        super().__init__()
        self.network, self._objective = objective.network, objective

    def forward(self, batch: FeatureBatch, step: int) -> tuple[Tensor, int]:
        return self._objective.loss(batch, step)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.network.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.network.load_state_dict(*args, **kwargs)


class DraftTrainer(Trainer):
    """Hugging Face's trainer with an objective as its loss and evaluation, and a decay that can be asked for."""

    def __init__(
        self, objective: Objective, store: FeatureStore, heldout: Sequence[int], options: RunOptions, **kwargs: Any
    ):
        super().__init__(model=TrainedNetwork(objective), data_collator=_collate, **kwargs)
        self.objective, self.store, self.heldout, self.options = objective, store, heldout, options
        self.schedule = WarmupStableDecay(options.warmup_steps, options.decay_steps)
        self.decay = _Decay(self.schedule, Path(self.args.output_dir) / "decay", options)
        self.tokens_seen = 0

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        if self.lr_scheduler is None:
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer or self.optimizer, self.schedule)
        return self.lr_scheduler

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        loss, taught = model(self.store.batch(inputs["row"].tolist()), self.state.global_step)
        self.tokens_seen += taught
        return (loss, {}) if return_outputs else loss

    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        """Evaluate on the held-out rows and hand the figures to the callbacks (the curve file among them)."""
        size = self.options.batch_size
        parts = (self.heldout[start : start + size] for start in range(0, len(self.heldout), size))
        result = self.objective.evaluate(self.store.batch(part) for part in parts)
        metrics = {f"eval_{name}": value for name, value in result.items()}
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics


def _collate(items: Sequence[dict[str, int]]) -> dict[str, Tensor]:
    return {"row": torch.tensor([item["row"] for item in items])}


class _Curve(TrainerCallback):
    """Appends one JSON object an evaluation to curve.jsonl, with the time and tokens that led there."""

    def __init__(self, path: Path, trainer: DraftTrainer):
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

    def __init__(self, schedule: WarmupStableDecay, request: Path, options: RunOptions):
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
    """Makes every checkpoint a folder that loads as a draft, and keeps the one from which the decay began."""

    def __init__(self, objective: Objective, schedule: WarmupStableDecay):
        self.objective, self.schedule = objective, schedule

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        self.objective.write_config(folder)
        if self.schedule.decay_from == state.global_step:
            shutil.copytree(folder, Path(args.output_dir) / BEFORE_DECAY, dirs_exist_ok=True)


def train(
    make: Callable[[Sequence[Row]], Objective],
    target: Any,
    tokenizer: Any,
    data: Path,
    out: Path,
    options: RunOptions,
    *,
    features: Path | None = None,
    resume: bool | Path = True,
) -> Path:
    """Train a network for `target` on its own answers.

    Args:
        make: the objective, from the rows of the text.
        target: a Llama-like causal LM of transformers (it has ``.model.layers``), fp32, on the CPU.
        tokenizer: its tokenizer, with a chat template.
        data: JSON lines as ``generate_data`` writes them.
        out: gets checkpoint-*/, before-decay/, curve.jsonl (figures over training), options.json and run.json.
        features: where the target's features are kept; `out`/features by default.
        resume: go on from the last checkpoint in `out` (if there is one), from the checkpoint in this folder (such as
            `out`/before-decay, to train a finished run further), or start anew.

    Returns:
        The folder of the last checkpoint, which loads as a draft.

    Raises:
        ValueError: text that cannot be read or is too little, features above `max_disk_gb`, or a feature folder of
            another target or text.
    """
    set_seed(options.seed)
    target.requires_grad_(False).eval()
    rows = read_rows(data, tokenizer)
    training, heldout = split_heldout(rows, options.heldout, options.seed)
    order = training_order(rows, training, options)
    store = _store(features or out / "features", rows, {*order, *heldout}, target, options)
    out.mkdir(parents=True, exist_ok=True)
    (out / "options.json").write_text(json.dumps(asdict(options), indent=1), encoding="utf-8")
    objective = make(rows)
    facts = describe_run(rows, data) | {"taps": list(store.taps)} | objective.facts(rows)
    (out / "run.json").write_text(json.dumps(facts, indent=1), encoding="utf-8")
    return _fit(_trainer(objective, store, order, heldout, out, options), out, resume)


def _fit(trainer: DraftTrainer, out: Path, resume: bool | Path) -> Path:
    last = get_last_checkpoint(str(out)) if resume is True else str(resume) if resume else None
    if last is None:
        (out / "curve.jsonl").unlink(missing_ok=True)
        trainer.evaluate()
    trainer.decay.anew = last is not None and Path(last).name == BEFORE_DECAY
    trainer.train(resume_from_checkpoint=last)
    found = get_last_checkpoint(str(out))
    assert found is not None, "the trainer saves at the end of every run"
    return Path(found)


def _store(folder: Path, rows: Sequence[Row], used: Collection[int], target: Any, options: RunOptions) -> FeatureStore:
    taps = default_taps(target.config.num_hidden_layers)
    need = FeatureStore.disk_bytes([rows[index] for index in used], target.config.hidden_size, len(taps)) / 1e9
    if need > options.max_disk_gb:
        raise ValueError(
            f"the features of {len(used)} rows need {need:.1f} GB, above max_disk_gb = {options.max_disk_gb}; "
            "raise it or use less text"
        )
    return FeatureStore(folder, rows, target, taps)


def describe_run(rows: Sequence[Row], data: Path) -> dict[str, Any]:
    """What a network's card says about its text and its making: counts, checksum, versions, processor."""
    return {
        "data": data.name,
        "data_sha256": hashlib.sha256(data.read_bytes()).hexdigest(),
        "rows": len(rows),
        "answer_tokens": sum(len(row.ids) - row.prompt_length for row in rows),
        "software": f"torch {torch.__version__}, transformers {transformers.__version__}",
        "machine": f"{os.cpu_count()}-core {cpu_name()}",
    }


def training_order(rows: Sequence[Row], training: Sequence[int], options: RunOptions) -> list[int]:
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
    objective: Objective,
    store: FeatureStore,
    order: Sequence[int],
    heldout: Sequence[int],
    out: Path,
    options: RunOptions,
) -> DraftTrainer:
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
    parts: Any = {"args": arguments, "train_dataset": dataset, "eval_dataset": dataset}
    trainer = DraftTrainer(objective, store, heldout, options, **parts)
    trainer.add_callback(_Curve(out / "curve.jsonl", trainer))
    trainer.add_callback(trainer.decay)
    trainer.add_callback(_Checkpoints(objective, trainer.schedule))
    return trainer
