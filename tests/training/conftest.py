"""A tiny target, a tokenizer that needs no files, and text that the target really generated."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

VOCAB, STOP = 61, 2


class LetterTokenizer:
    """One id a character; the template puts id 1 before and after the user turn."""

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [1, *(3 + ord(letter) % (VOCAB - 3) for letter in messages[0]["content"]), 1]}


def tiny_target(seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=8,
            num_attention_heads=4,
            num_key_value_heads=2,
            initializer_range=0.3,
            tie_word_embeddings=True,
        )
    )
    model.generation_config = GenerationConfig(eos_token_id=STOP, pad_token_id=STOP)
    return model.eval().requires_grad_(False)


@pytest.fixture(scope="session")
def target() -> LlamaForCausalLM:
    return tiny_target()


@pytest.fixture(scope="session")
def tokenizer() -> LetterTokenizer:
    return LetterTokenizer()


@pytest.fixture(scope="session")
def text(target: LlamaForCausalLM, tokenizer: LetterTokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """32 prompts of three kinds with the target's answers, half of the batches greedy."""
    import json

    from specdec.training.data import DataOptions, generate_data

    folder = tmp_path_factory.mktemp("text")
    prompts = [
        {"kind": "abc"[i % 3], "prompt": "prompt"[: 2 + i % 4] + chr(97 + i % 26) * (1 + i // 26)} for i in range(32)
    ]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(item) + "\n" for item in prompts))
    options = DataOptions(max_new_tokens=24, batch_size=8)
    return generate_data(target, tokenizer, folder / "prompts.jsonl", folder / "answers.jsonl", options)


@pytest.fixture
def small_run() -> SimpleNamespace:
    return SimpleNamespace(
        draft_vocab_size=40, ttt_steps=3, first_rows=12, more_rows=6, heldout=4, batch_size=4, warmup_steps=2,
        decay_steps=4, max_steps=12, eval_steps=4, save_steps=4,
    )  # fmt: skip
