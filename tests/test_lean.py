"""Lean: what a loaded decoder keeps in memory, measured in a process of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import gc, specdec, torch
from transformers import AutoTokenizer, LlamaForCausalLM

def resident():
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

specdec.load, specdec.Decoder, specdec.METHODS
tokenizer = AutoTokenizer.from_pretrained(specdec.PRESETS["smollm2"].target())  # not part of the models
tokenizer("warm it up")
before = resident()
decoder = specdec.load("smollm2", method="talon", tokenizer=tokenizer, budget=8, top_k=2)
loaded = resident() - before
head = decoder.drafter.head
config = decoder.target.config
layer = 2 * config.hidden_size**2 + 2 * config.hidden_size * config.num_key_value_heads * config.head_dim
layer += 3 * config.hidden_size * config.intermediate_size
weights = 4 * (config.num_hidden_layers * layer + config.vocab_size * config.hidden_size)
weights += 4 * (5_100_000 + head.config.draft_vocab_size * head.config.hidden_size)
caches = sum(c.data.untyped_storage().nbytes() for c in (decoder.target.cache, decoder.drafter.cache))
decoder.generate("one two three", max_new_tokens=64)
first = resident()
for length in range(20):
    decoder.generate("word " * (length % 5 + 1), max_new_tokens=16)
print(loaded / (weights + caches), (resident() - first) / 2**20)
"""


@pytest.mark.slow
def test_a_loaded_decoder_is_little_more_than_its_weights() -> None:
    """The originals of packed layers and the checkpoint's memory map are let go; generating adds nothing that stays."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=280)
    ratio, growth = map(float, done.stdout.split())
    assert ratio <= 1.3
    assert growth <= 8.0, "MiB after 20 generations"
