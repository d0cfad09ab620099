"""EAGLE-3 heads on disk, in the flat format of SafeAILab's releases."""

import json
from pathlib import Path
from typing import Any

from specdec.models.eagle3 import Eagle3Config


def write_config(config: Eagle3Config, folder: Path, *, tied: bool, extra: dict[str, Any] | None = None) -> None:
    """Write config.json: a Llama-like configuration with draft_vocab_size; `extra` goes under the key ``specdec``."""
    fields: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        **config.rope,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "tie_word_embeddings": tied,
    }
    if extra:
        fields["specdec"] = extra
    (folder / "config.json").write_text(json.dumps(fields, indent=2) + "\n")
