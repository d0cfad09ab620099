"""Drafts on disk: what kind of draft a folder holds, and the drafter that it becomes for a target."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from specdec.checkpoints.eagle3 import holds_eagle3, load_eagle3
from specdec.checkpoints.files import parse_config, weight_names
from specdec.drafters.eagle3 import Eagle3Drafter
from specdec.models.eagle3 import default_taps
from specdec.models.lm import CausalLM
from specdec.models.packed import pack_linears
from specdec.protocols import Drafter


@dataclass(frozen=True)
class Kind:
    """One kind of draft network.

    Attributes:
        needs: for people, such as "an EAGLE-3 head".
        holds: whether a folder with this config.json and these tensor names has one.
        open: the drafter of the network in a folder, on the target's device and in its dtype.
        files: names of weights files that only this kind has.
    """

    needs: str
    holds: Callable[[Mapping[str, Any], Collection[str]], bool]
    open: Callable[[Path, CausalLM], Drafter]
    files: tuple[str, ...] = ()


def open_eagle3(folder: Path, target: CausalLM) -> Eagle3Drafter:
    """The drafter of an EAGLE-3 head."""
    config = parse_config(folder / "config.json")
    head = load_eagle3(
        folder,
        embed_tokens=target.embed_tokens,
        lm_head_weight=target.output_embedding() if config.get("tie_word_embeddings") else None,
        target_hidden_size=target.config.hidden_size,
        vocab_size=target.vocab_size,
        dtype=target.dtype,
    ).to(target.device)
    if target.device.type == "cpu" and target.dtype == torch.float32:
        pack_linears(head)
    taps = feature_taps(config, target.config.num_hidden_layers, head.config.num_features, folder)
    return Eagle3Drafter(head, taps, rank_acceptance(config, folder))


KINDS: dict[str, Kind] = {
    "eagle3": Kind("an EAGLE-3 head", holds_eagle3, open_eagle3),
}
LM = "lm"  # what is none of them is read as a language model


def kind_of(folder: Path) -> str:
    """The name in `KINDS` of what a folder holds, `LM` for anything else.

    Raises:
        ValueError: its config.json or its weights cannot be read.
    """
    config = parse_config(folder / "config.json") if (folder / "config.json").is_file() else {}
    names = weight_names(folder, *(file for kind in KINDS.values() for file in kind.files))
    return next((name for name, kind in KINDS.items() if kind.holds(config, names)), LM)


def needs(kinds: Collection[str]) -> str:
    """What a user has to bring, for people: "an EAGLE-3 head or a smaller model"."""
    return " or ".join("a smaller model" if kind == LM else KINDS[kind].needs for kind in kinds)


def feature_taps(config: Mapping[str, Any], layers: int, count: int, folder: str | Path = "") -> tuple[int, ...]:
    """The layers whose inputs a head reads: those its config names under specdec.taps, else EAGLE-3's rule.

    Raises:
        ValueError: ids that the target does not have, or not as many as the head's fc reads.
    """
    given = _own_list(config, "taps", folder)
    taps = default_taps(layers) if given is None else tuple(given)
    if not all(type(tap) is int for tap in taps):
        raise ValueError(f"specdec.taps in {Path(folder, 'config.json')} is {given!r}; expected a list of layer ids")
    if len(taps) != count or not all(0 <= tap <= layers for tap in taps):
        raise ValueError(
            f"the head reads {count} features, its taps are {taps}, and the target has {layers} layers; "
            f"expected {count} ids from 0 to {layers} as specdec.taps in {Path(folder, 'config.json')}"
        )
    return taps


def rank_acceptance(config: Mapping[str, Any], folder: Path) -> tuple[float, ...] | None:
    """The chance that a draft's b-th best child is accepted, where its config.json says it was measured."""
    rates = _own_list(config, "rank_acceptance", folder)
    if not rates:
        return None
    if not all(type(rate) in (int, float) and math.isfinite(rate) and 0 <= rate <= 1 for rate in rates):
        raise ValueError(
            f"specdec.rank_acceptance in {folder / 'config.json'} is {rates!r}; expected a list of chances from 0 to 1"
        )
    return tuple(rates)


def _own_list(config: Mapping[str, Any], name: str, folder: str | Path) -> list[Any] | None:
    """A list of what a head's config.json says under `specdec`; None if it says nothing."""
    path, own = Path(folder, "config.json"), config.get("specdec", {})
    if not isinstance(own, dict):
        raise ValueError(f"specdec in {path} is {own!r}; expected an object, or no such field")
    value = own.get(name)
    if value is not None and not isinstance(value, list):
        raise ValueError(f"specdec.{name} in {path} is {value!r}; expected a list, or no such field")
    return value
