"""What will run here, and why."""

from __future__ import annotations

import inspect
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.constants import HF_HUB_CACHE
from specdec_kernels import _native
from transformers.models.llama.modeling_llama import LlamaModel

from specdec import cost
from specdec.checkpoints.smollm2 import cache_root
from specdec.evaluation.setting import machine
from specdec.loading import PRESETS, load_draft, load_target
from specdec.methods import METHODS, make_growth
from specdec.models import llama
from specdec.models.huggingface import HuggingFaceModel
from specdec.models.lm import CausalLM
from specdec.models.packed import packing_available
from specdec.protocols import Drafter

# What constraints.txt pins, which a wheel does not carry; a test compares the two.
TESTED = {"torch": "2.13.0", "transformers": "5.24.0", "triton": "3.9.0"}


def diagnose(
    target: str, draft: str | None = None, device: str | None = None, dtype: str | None = None, remeasure: bool = False
) -> dict[str, Any]:
    """Facts by section, `warnings` (it may work) and `problems` (it will not)."""
    found: dict[str, Any] = {
        "versions": _versions(),
        "machine": _machine(None),
        "target": {},
        "draft": {},
        "ops": _ops(),
        "cost": {},
        "methods": {},
        "caches": {"models and cost curves": str(cache_root()), "Hub downloads": HF_HUB_CACHE},
        "warnings": _warnings(),
        "problems": [],
    }
    lm = drafter = None
    try:
        preset = PRESETS.get(target)
        lm, tokenizer = load_target(preset.target() if preset else target, device, dtype)
        found["target"] = _about_target(lm, chat=tokenizer is not None and tokenizer.chat_template is not None)
        found["machine"] = _machine(lm.device)
        source = draft or (preset.draft(METHODS["talon"]) if preset else None)
        if source is not None:
            drafter = load_draft(source, lm, METHODS["talon"], tokenizer)
        found["draft"] = _about_draft(drafter, source)
    except (ValueError, OSError, ModuleNotFoundError) as error:
        found["problems"].append(str(error))
    if lm is not None:
        busy = found["machine"]["load_average"]
        if lm.device.type == "cpu" and busy and busy > 1 and (remeasure or not cost.curve_path(lm, drafter).exists()):
            found["warnings"].append(
                f"load average {busy}: the curve was measured on a busy machine; --remeasure later"
            )
        found["cost"], plan = _about_cost(lm, drafter, remeasure)
        found["methods"] = {
            name: repr(make_growth(method, {}, plan) or "plain steps")
            for name, method in METHODS.items()
            if drafter or not method.drafts
        }
    return found


def _machine(device: torch.device | None) -> dict[str, Any]:
    return {name: value for name, value in machine(device).items() if name not in ("torch", "transformers", "specdec")}


def _versions() -> dict[str, str | None]:
    names = (
        "specdec-kernels",
        "torch",
        "transformers",
        "triton",
        "huggingface_hub",
        "safetensors",
        "gguf",
        "accelerate",
    )
    return {name: _version(name) for name in names}


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _warnings() -> list[str]:
    """Versions beyond what was tested: no cap forbids them, so this is where one learns of it."""
    found = []
    for name, tested in TESTED.items():
        here = _version(name)
        if here is not None and _release(here) > _release(tested):
            found.append(f"{name} {here} is newer than {tested}, the newest that was tested; try `make test`")
    return found


def _release(text: str) -> tuple[int, ...]:
    """The first two numbers of a version: patch releases are taken for tested."""
    return tuple(int(part) for part in text.split("+")[0].split(".")[:2] if part.isdigit())


def _ops() -> dict[str, str]:
    dialect = "cache" if "cache" in inspect.signature(LlamaModel.forward).parameters else "past_key_values"
    native = f"C++, {_native.reason}" if _native.library else f"plain torch; the C++ ops are {_native.reason}"
    triton = "its kernels run on a CUDA device" if find_spec("triton") else "not installed: no fused ops on a GPU"
    return {
        "ops on the CPU": native,
        "triton": triton if torch.cuda.is_available() or not find_spec("triton") else f"{triton}; none here",
        "transformers dialect": f"its cache argument is {dialect!r}; either works, specdec brings a cache of its own",
    }


def _about_target(lm: CausalLM, chat: bool) -> dict[str, str]:
    config = lm.config
    cpu = lm.device.type == "cpu"
    if isinstance(lm.backbone, HuggingFaceModel):
        reason = llama.supports(lm.backbone.model) if cpu else "the lean forward is for CPUs"
        forward = f"transformers' modules: {reason}"
    else:
        forward = "lean (specdec.models.llama), same arithmetic without the machinery"
    if lm.dtype != torch.float32 or not cpu:
        linears = "stock: packing is for float32 on a CPU"
    elif not packing_available():
        linears = "stock: this torch has no packing ops, so a pass over 2 tokens costs almost twice one"
    elif isinstance(lm.backbone, HuggingFaceModel):
        linears = "stock: packing comes with the lean forward"
    else:
        linears = "prepacked (oneDNN), exact"
    exact = (
        "text is equal to plain decoding" if lm.dtype == torch.float32 else "near-ties may turn round; float32 is exact"
    )
    return {
        "model": f"{config.model_type}, {config.num_hidden_layers} layers of width {config.hidden_size}",
        "device": str(lm.device),
        "dtype": f"{str(lm.dtype).removeprefix('torch.')}: {exact}",
        "forward": forward,
        "linears": linears,
        "attention": "scaled_dot_product_attention under a tree mask, cache preallocated",
        "vocabulary, context": f"{lm.vocab_size}, {lm.context}",
        "prompts": "answered in its chat template" if chat else "continued as they are: no chat template",
    }


def _about_draft(drafter: Drafter | None, source: str | Path | None) -> dict[str, str]:
    if drafter is None:
        return {"draft": "none, so `ar` alone can run; give --draft"}
    rates = getattr(drafter, "rank_acceptance", None)
    known = "measured, in its config.json" if rates else "not measured: a guess (specdec.cost.RANK_ACCEPTANCE)"
    return {
        "draft": f"{type(drafter).__name__}, {source}",
        "features": f"inputs of the target's layers {drafter.taps}" if drafter.taps else "none",
        "acceptance by rank": known,
    }


def _about_cost(lm: CausalLM, drafter: Drafter | None, remeasure: bool) -> tuple[dict[str, Any], cost.Plan | None]:
    if lm.device.type != "cpu":
        return {}, None
    path = cost.curve_path(lm, drafter)
    if remeasure:
        with suppress(OSError):  # none there, or a folder that takes no file
            path.unlink()
    curve = cost.cached_curve(lm, drafter)
    told: dict[str, Any] = {
        "file": str(path),
        "verify_ms": {str(nodes): 1000 * seconds for nodes, seconds in curve.verify.items()},
        "draft_ms": 1000 * curve.draft,
        "plan": None,
    }
    if drafter is None:
        return {**told, "why": "without a draft there is nothing to plan"}, None
    plan = cost.plan(curve, getattr(drafter, "rank_acceptance", None))
    why = (
        f"a draft forward takes {told['draft_ms']:.1f} ms; the static tree that promises most tokens per second has "
        f"{plan.budget} nodes with the root, {plan.top_k} below it, {plan.depth} levels ({plan.speedup:.2f}× plain "
        f"decoding); the best chain has {plan.chain}. In talon's trees a node pays from a path probability of "
        f"{plan.min_probability:.2f} on, a further draft forward from {plan.min_mass:.2f} in all. "
        f"Measured once, kept in {path}; --remeasure on an idle machine"
    )
    return {**told, "plan": vars(plan), "why": why}, plan
