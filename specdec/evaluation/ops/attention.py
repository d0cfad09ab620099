"""How long does attention over a prefix and a draft tree take?

Peers: torch's SDPA with a dense mask, once with a key head for every query head to share (as models call it) and once
with the query heads of a group as rows of one product; FlashInfer with its packed mask, and flash-attn for the prefix
with our kernel for the tree, where they are installed. On a CPU the op is torch's fused attention itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from specdec_kernels import ancestor_words, ancestors, reference, tree_attention
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from specdec.evaluation.ops.measure import OURS, Case

QUERIES = (1, 8, 16, 32, 61)
PREFIXES = (512, 2048, 8192, 32768)
HEADS = {"Llama-3-8B": (32, 8, 128), "Qwen3-32B": (64, 8, 128)}  # query heads, key heads, head size


def cases(
    queries: Sequence[int] = QUERIES,
    prefixes: Sequence[int] = PREFIXES,
    models: Sequence[str] = tuple(HEADS),
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
) -> Iterator[Case]:
    for model in models:
        for prefix in prefixes:
            for count in queries:
                yield case(model, count, prefix, dtype, device)


def case(
    model: str, count: int, prefix: int, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> Case:
    """One layer of `model`; a random tree of `count` nodes, all of which ask, behind `prefix` entries."""
    heads, kv_heads, dim = HEADS[model]
    generator = torch.Generator().manual_seed(count)
    noise = torch.Generator(device).manual_seed(prefix)
    query, keys, values = (
        torch.randn(shape, generator=noise, device=device, dtype=dtype)
        for shape in ((1, count, heads, dim), *[(1, prefix + count, kv_heads, dim)] * 2)
    )
    parents = torch.tensor([[-1, *(int(torch.randint(n, (), generator=generator)) for n in range(1, count))]])
    words = ancestor_words(ancestors(parents)).to(device)
    start = torch.tensor([prefix], device=device)
    mask = reference.visible_entries(start, words, count, prefix + count)[:, None]  # [1, 1, T, S + T]

    def ours(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return tree_attention(query, keys, values, start, words, count)[0]

    def shared(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        query, keys, values = (x.transpose(1, 2) for x in (query, keys, values))
        return sdpa(query, keys, values, attn_mask=mask, enable_gqa=True).transpose(1, 2)

    group = heads // kv_heads
    rows = mask.repeat_interleave(group, dim=2)

    def folded(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        packed = query.unflatten(2, (kv_heads, group)).permute(0, 2, 1, 3, 4).flatten(2, 3)
        out = sdpa(packed, keys.transpose(1, 2), values.transpose(1, 2), attn_mask=rows)
        return out.unflatten(2, (count, group)).permute(0, 2, 1, 3, 4).flatten(2, 3)

    contenders: dict[str, Callable[..., Tensor]] = {OURS: ours, "sdpa": shared, "sdpa_folded": folded}
    if query.is_cuda and dtype != torch.float32:
        if find_spec("flashinfer"):
            contenders["flashinfer"] = _flashinfer(mask)
        if find_spec("flash_attn"):
            contenders["flash_attn"] = lambda query, keys, values: tree_attention(
                query, keys, values, start, words, count, backend="flash"
            )[0]

    def check(results: Mapping[str, Any]) -> None:
        exact = shared(*(x.float() for x in (query, keys, values)))
        error = {name: (out.float() - exact).abs().max().item() for name, out in results.items()}
        slack = torch.finfo(dtype).eps * exact.abs().max().item()
        allowed = 2 * max(error["sdpa_folded"], error["sdpa"]) + slack
        for name in error.keys() - {"sdpa", "sdpa_folded"}:
            assert error[name] <= allowed, f"{name} is {error[name]:.1e} off, SDPA at most {allowed:.1e}"

    shape = {"model": model, "queries": count, "prefix": prefix, "dtype": str(dtype).removeprefix("torch.")}
    size = (2 * keys.numel() + 2 * query.numel()) * query.element_size()
    return Case(shape, (query, keys, values), contenders, check, size)


def _flashinfer(mask: Tensor) -> Callable[..., Tensor]:
    flashinfer = import_module("flashinfer")
    packed = flashinfer.packbits(mask.flatten(), bitorder="little")

    def run(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return flashinfer.single_prefill_with_kv_cache(query[0], keys[0], values[0], packed_custom_mask=packed)[None]

    return run
