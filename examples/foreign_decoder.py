"""A TALON decoder that is not specdec's: a plain transformers model, the ops of specdec_kernels, and this loop:
python examples/foreign_decoder.py TARGET DRAFT "a prompt"     (folders or Hub ids of causal LMs that share a tokenizer)
"""

import sys

import specdec_kernels as ops
import torch
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer


class CachedLM:
    """A causal LM and its cache, in which the first `length` entries hold committed tokens and a tree may follow."""

    def __init__(self, model, entries):
        model.set_attn_implementation("foreign")
        config, self.model, self.length = model.config, model, 0
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = 2 * config.num_hidden_layers, 1, entries, config.num_key_value_heads, head_dim
        self.cache = torch.zeros(shape, dtype=model.dtype, device=model.device)

    @torch.inference_mode()
    def __call__(self, ids, parents, new):
        """Logits [1, new, V] of the last `new` nodes of the tree behind the prefix; the others are in the cache."""
        reach = ops.ancestors(parents)  # the first node has no parent; all see it
        self.slots, self.words = ids.shape[1], ops.ancestor_words(reach[:, -new:])
        positions = self.length + reach[:, -new:].sum(-1) - 1
        seen = torch.ones(1, 1, 1, 1, dtype=torch.bool)  # a 4-D mask: transformers builds none of its own
        return self.model(ids[:, -new:], attention_mask=seen, position_ids=positions, use_cache=False, lm=self).logits


def attend(module, query, key, value, mask, scaling=None, lm=None, **_):
    (keys, values), end = lm.cache[2 * module.layer_idx :][:2], lm.length + lm.slots
    keys[:, end - key.shape[2] : end], values[:, end - key.shape[2] : end] = key.transpose(1, 2), value.transpose(1, 2)
    prefix = torch.tensor([lm.length], device=query.device)
    return ops.tree_attention(query.transpose(1, 2), keys, values, prefix, lm.words, lm.slots, scale=scaling)[0], None


AttentionInterface.register("foreign", attend)


def talon_tree(draft, pending, budget=24, mu=0.03, top_k=6):
    """Ids and parents [1, N]: pending ids as a chain, whose last is the root, and the draft tree below."""
    ids, scores, new = torch.tensor([pending]), torch.zeros(1, 1), len(pending)
    parents, full = torch.arange(new)[None] - 1, new + budget - 1
    while new:
        logits = draft(ids, parents, new)[:, -scores.shape[1] :]
        first, root, left = ids.shape[1] - logits.shape[1], len(pending) == ids.shape[1], full - ids.shape[1]
        room, gate = (min(left, top_k), 0.0) if root else (left, mu)
        at, token, scores, count = ops.confidence_gate(logits, scores, gate, torch.tensor([room]), width=max(room, 1))
        new = int(count)
        ids, parents = torch.cat((ids, token[:, :new]), 1), torch.cat((parents, first + at[:, :new]), 1)
        scores = scores[:, :new]
    return ids, parents


def generate(target, draft, prompt, new_tokens, **tree):
    """The ids that `target` alone would give greedily, and in how many passes."""
    text, pending, passes = list(prompt), list(prompt), 0
    while len(text) < len(prompt) + new_tokens:
        ids, parents = talon_tree(draft, pending, **tree)
        chosen = ops.greedy_tokens(target(ids, parents, ids.shape[1]))
        root, count = len(pending) - 1, torch.tensor([ids.shape[1] - len(pending) + 1])
        path, length, bonus = ops.verify_walk(ids[:, root:], parents[:, root:] - root, count, chosen[:, root:])
        for lm in (target, draft):  # both hold node n in entry length + n; what was not accepted is overwritten
            start = lm.length + len(pending)
            ops.kv_commit(lm.cache, lm.length + root + path, torch.tensor([start]), length)
            lm.length = start + int(length)
        pending, passes = bonus.tolist(), passes + 1
        text += ids[0, root + path[0, : int(length)]].tolist() + pending
    return text[len(prompt) : len(prompt) + new_tokens], passes


if __name__ == "__main__":
    names, prompt = sys.argv[1:3], sys.argv[3]
    target, draft = (CachedLM(AutoModelForCausalLM.from_pretrained(name).eval(), entries=1024) for name in names)
    tokenizer = AutoTokenizer.from_pretrained(names[0])
    ids, passes = generate(target, draft, tokenizer(prompt)["input_ids"], new_tokens=64)
    print(tokenizer.decode(ids), f"\n[{len(ids)} tokens in {passes} passes of the target]")
