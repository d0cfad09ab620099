"""Training an EAGLE-3 head: a training-time test on its own hidden states (`ttt`), from a start close to the target.

Laptop run: ``specdec train eagle3 --target smollm2 --data answers.jsonl --out runs/head --minutes 90``; `trainer` tells
how a run goes, ends and resumes.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from specdec.checkpoints.eagle3 import write_config
from specdec.models.eagle3 import Eagle3Config, Eagle3Head, default_taps
from specdec.training.data import stop_ids
from specdec.training.features import FeatureBatch, Row
from specdec.training.trainer import RunOptions, train
from specdec.training.ttt import acceptance, all_chains, some_chains, ttt_loss


@dataclass(frozen=True)
class Eagle3Options(RunOptions):
    """Options of ``train_eagle3``."""

    draft_vocab_size: int = 8192
    """How many ids the head can predict: the most frequent ones of the answers."""
    ttt_steps: int = 5
    """Unrolled steps of the training-time test."""
    chain_fraction: float = 0.5
    """Part of the positions that go beyond step 0, drawn anew for every batch."""

    def complaints(self) -> list[str]:
        wrong = not 0.0 <= self.chain_fraction <= 1.0
        return [f"chain_fraction is {self.chain_fraction}, expected 0 to 1"] if wrong else []


class Eagle3Objective:
    """The training-time test of a head (EAGLE-3, section 3.2)."""

    def __init__(self, head: Eagle3Head, target: Any, options: Eagle3Options):
        self.network, self.options = head, options
        draft_ids = head.t2d.nonzero()[:, 0]
        self.teacher_weight = target.get_output_embeddings().weight.detach()[draft_ids].float()

    def loss(self, batch: FeatureBatch, step: int) -> tuple[Tensor, int]:
        first = all_chains(batch)
        draw = torch.Generator().manual_seed(self.options.seed * 1_000_003 + step)
        later = some_chains(first, self.options.chain_fraction, draw)
        loss = ttt_loss(self.network, batch, self.teacher_weight, first, later, self.options.ttt_steps)
        return loss, len(first.row)

    def evaluate(self, batches: Iterator[FeatureBatch]) -> dict[str, Any]:
        return acceptance(self.network, batches, self.options.ttt_steps)

    def write_config(self, folder: Path) -> None:
        write_config(self.network.config, folder, tied=True)

    def facts(self, rows: Sequence[Row]) -> dict[str, Any]:
        """How much of the text the draft vocabulary covers."""
        kept = set(self.network.target_ids(torch.arange(len(self.network.d2t))).tolist())
        answers = [int(token) for row in rows for token in row.ids[row.prompt_length :]]
        return {"coverage": round(sum(token in kept for token in answers) / len(answers), 4)}


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
    """Train a head for `target` on its own answers; arguments, result and errors are those of `trainer.train`."""
    chosen = options or Eagle3Options()

    def make(rows: Sequence[Row]) -> Eagle3Objective:
        draft_ids = draft_vocabulary(rows, chosen.draft_vocab_size, stop_ids(target))
        head = new_head(target, draft_ids, len(default_taps(target.config.num_hidden_layers)))
        return Eagle3Objective(head, target, chosen)

    return train(make, target, tokenizer, data, out, chosen, features=features, resume=resume)


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
