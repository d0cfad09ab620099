"""TINY as folders on disk, with a tokenizer of one id a character: what a command or an example is given."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from tokenizers.decoders import Fuse
from transformers import PreTrainedTokenizerFast

from oracle.models import TAPS, tiny, tiny_draft, tiny_head
from specdec.checkpoints.eagle3 import save_eagle3

CHARACTERS = [*map(chr, range(32, 127)), "\n", "\t"]  # 97, TINY's vocabulary
CHAT = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}assistant: "


class Folders(NamedTuple):
    target: Path
    draft: Path
    head: Path


def character_tokenizer(chat: bool = True) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordLevel({character: i for i, character in enumerate(CHARACTERS)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    tokenizer.decoder = Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="?",
        clean_up_tokenization_spaces=False,
        chat_template=CHAT if chat else None,
    )


def save_tiny(folder: Path) -> Folders:
    """A target, a draft model that is often right, both with the tokenizer, and a head of random weights."""
    made = Folders(folder / "target", folder / "draft", folder / "head")
    tiny().save_pretrained(made.target)
    tiny_draft().save_pretrained(made.draft)
    for model in (made.target, made.draft):
        character_tokenizer().save_pretrained(model)
    save_eagle3(tiny_head(), made.head, extra={"taps": TAPS})
    return made
