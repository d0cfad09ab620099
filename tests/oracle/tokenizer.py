"""A tokenizer of one character an id: 94 printable ASCII characters behind <s>, </s> and <unk>, 97 ids in all."""

from __future__ import annotations

import functools

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

CHAT = (
    "<s>{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}|{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


@functools.cache
def characters(bos: bool = False, chat: bool = False) -> PreTrainedTokenizerFast:
    """With `bos` it puts <s> in front of every text; with `chat` it has a template that brings <s> itself."""
    vocab = {"<s>": 0, "</s>": 1, "<unk>": 2} | {chr(33 + i): 3 + i for i in range(94)}
    inner = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    inner.decoder = decoders.Fuse()
    if bos:
        inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        chat_template=CHAT if chat else None,
    )
