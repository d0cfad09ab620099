"""What the caches must hold, from a fresh pass over the committed ids, and a walk through the rounds that compares."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from specdec.decoder import Decoder
from specdec.drafters.eagle3 import Eagle3Drafter
from specdec.drafters.lm import LMDrafter
from specdec.models.lm import CausalLM
from specdec.rows import Rows
from specdec.sampling import Sampler

_seen: list[tuple[Tensor, Tensor]] = []


def _record(module, query, key, value, attention_mask, scaling=None, **ignored):
    _seen.append((key, value))
    return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling)


AttentionInterface.register("oracle_record", _record)


@torch.inference_mode()
def fresh_pass(model, ids: Sequence[int]) -> tuple[list[tuple[Tensor, Tensor]], list[Tensor]]:
    """Keys and values [T, kv_heads, d] of every layer; the hidden states that enter each layer and the final norm."""
    size = len(ids)
    age = torch.arange(size)[:, None] - torch.arange(size)
    mask = age >= 0
    window = getattr(model.config, "sliding_window", None)
    if window is not None:
        mask = mask & (age < window)
    hidden: list[Tensor] = []
    modules = [*model.base_model.layers, model.base_model.norm]
    hooks = [
        module.register_forward_pre_hook(
            lambda _, args, kwargs: hidden.append((args[0] if args else kwargs["hidden_states"])[0]), with_kwargs=True
        )
        for module in modules
    ]
    before, model.config._attn_implementation = model.config._attn_implementation, "oracle_record"
    try:
        _seen.clear()
        model(torch.tensor([list(ids)]), attention_mask=mask[None, None], use_cache=False)
        return [(key[0].transpose(0, 1), value[0].transpose(0, 1)) for key, value in _seen], hidden
    finally:
        model.config._attn_implementation = before
        for hook in hooks:
            hook.remove()


def held(cache, layer: int, row: int, entries: int) -> tuple[Tensor, Tensor]:
    """Keys and values [entries, kv_heads, d] that a cache of ours holds."""
    keys, values = cache.read(layer, entries)
    return keys[row].transpose(0, 1), values[row].transpose(0, 1)


def lm_error(lm: CausalLM, model, row: int, ids: Sequence[int]) -> float:
    """The largest difference between what a language model's cache holds of `ids` and a fresh pass."""
    if not ids:
        return 0.0
    keys_values, _ = fresh_pass(model, ids)
    pairs = [(held(lm.cache, layer, row, len(ids)), fresh) for layer, fresh in enumerate(keys_values)]
    return max(_difference(a, b) for ours, fresh in pairs for a, b in zip(ours, fresh, strict=True))


def head_error(drafter: Eagle3Drafter, model, row: int, ids: Sequence[int]) -> float:
    """The same for an EAGLE-3 draft: entry t is made of the target's true feature t and the id behind it."""
    pairs = len(ids) - 1
    if pairs < 1:
        return 0.0
    _, hidden = fresh_pass(model, ids)
    head = drafter.head
    with torch.inference_mode():
        features = torch.cat([hidden[tap][:pairs] for tap in drafter.taps], dim=-1)
        cos, sin = head.rope(torch.arange(pairs)[None])
        embeds = head.embed_tokens(torch.tensor([list(ids[1:])]))
        _, keys, values = head.project(embeds, head.fuse(features)[None], cos, sin)
    ours = held(drafter.cache, 0, row, pairs)
    return max(_difference(a, b[0]) for a, b in zip(ours, (keys, values), strict=True))


def _difference(ours: Tensor, fresh: Tensor) -> float:
    """The largest one, in units of the largest entry: these are tens on a random model, where fp32 has 6 digits."""
    return float((ours - fresh).abs().max() / fresh.abs().max())


def cache_errors(decoder: Decoder, prompts: Sequence[Sequence[int]], new: int, seed: int = 0, **sampling) -> list[str]:
    """Decodes, and after every round compares every cache with a fresh pass; what was found, a line each.

    The target holds everything but the newest id. A draft may lag behind (it catches up when it drafts next); what it
    holds must be right, and after a round it holds everything that was committed when the round began.
    """
    model = decoder.target.backbone.model
    rows = Rows(prompts, new, [seed] * len(prompts), context=decoder.target.context)
    drafter, found = decoder.drafter, []
    before = [len(p) for p in prompts]
    for number, latest in enumerate(decoder.rounds(rows, Sampler(**sampling))):
        for row, seen in enumerate(latest):
            if not seen.tokens or rows.finish_reasons[row] is not None:
                continue
            ids = list(prompts[row]) + rows.new_tokens[row]
            where = f"round {number}, row {row}, {len(seen.path)} of {seen.tree['depths'][-1]} levels accepted"
            counted = {name: int(lengths[row]) for name, lengths in rows.cached.items()}
            expected = {"target": len(ids) - 1}
            error = {"target": lm_error(decoder.target, model, row, ids[: counted["target"]])}
            if number and isinstance(drafter, Eagle3Drafter):
                expected["draft"] = before[row] - 1  # pairs
                error["draft"] = head_error(drafter, model, row, ids[: counted["draft"] + 1])
            elif number and isinstance(drafter, LMDrafter):
                draft_model = drafter.model.backbone.model
                expected["draft"] = max(before[row], counted["draft"])
                error["draft"] = lm_error(drafter.model, draft_model, row, ids[: counted["draft"]])
            for name in expected:
                if counted[name] != expected[name]:
                    found.append(f"{where}: {name} counts {counted[name]} entries, expected {expected[name]}")
                if not error[name] < 1e-5:
                    found.append(f"{where}: {name} entries are off by {error[name]:.1e}")
            before[row] = len(ids)
    return found
