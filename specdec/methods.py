"""The registry: a method is a growth policy over a kind of draft, and a verifier. Nothing else tells methods apart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, get_type_hints

from specdec.cost import Plan
from specdec.growth.chain import Chain
from specdec.growth.eagle2 import Eagle2
from specdec.growth.talon import Talon
from specdec.protocols import Growth


@dataclass(frozen=True)
class Method:
    """One row of the registry.

    Attributes:
        description: one line for people.
        lossless: the text is distributed as the target's own (at T=0: is the target's own).
        drafts: kinds of draft that it takes, the usual one first; `()` for none.
        growth: the policy, a dataclass whose fields are the method's options; None for plain decoding.
        planned: the options that follow from a `Plan` where verification is not free.
    """

    name: str
    description: str
    lossless: bool
    drafts: tuple[str, ...] = ()
    growth: Callable[..., Growth] | None = None
    planned: Callable[[Plan], dict[str, Any]] = lambda plan: {}

    @property
    def options(self) -> dict[str, Any]:
        """Option -> default."""
        return {f.name: f.default for f in fields(self.growth)} if self.growth else {}  # type: ignore[arg-type]

    @property
    def needs(self) -> str:
        """What a user has to bring besides the target."""
        return " or ".join(_DRAFTS[kind] for kind in self.drafts) or "nothing"


_DRAFTS = {"eagle3": "an EAGLE-3 head", "lm": "a smaller model"}

METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method("ar", "plain decoding, one token a step", lossless=True),
        Method(
            "sd",
            "a chain of drafted tokens",
            lossless=True,
            drafts=("lm", "eagle3"),
            growth=Chain,
            planned=lambda plan: {"length": plan.chain},
        ),
        Method(
            "eagle3",
            "EAGLE's dynamic tree: top-K a node, the best N of all levels are verified",
            lossless=True,
            drafts=("eagle3", "lm"),
            growth=Eagle2,
            planned=lambda plan: {"budget": plan.budget, "top_k": plan.top_k, "depth": plan.depth - 1},
        ),
        Method(
            "talon",
            "TALON's tree: one node budget, top-K at the root, a confidence gate below",
            lossless=True,
            drafts=("eagle3", "lm"),
            growth=Talon,
            # the floors end a tree where it stops paying, so the budget only caps the sure contexts
            planned=lambda plan: {
                "budget": 4 * plan.budget,
                "top_k": plan.top_k + 2,
                "min_probability": round(plan.min_probability, 3),
                "min_mass": round(plan.min_mass, 3),
            },
        ),
    )
}


def method(name: str) -> Method:
    """The registry's row `name`.

    Raises:
        ValueError: there is none.
    """
    if name not in METHODS:
        raise ValueError(f"unknown method {name!r}; there are {', '.join(METHODS)}")
    return METHODS[name]


def make_growth(chosen: Method, options: dict[str, Any], plan: Plan | None) -> Growth | None:
    """The method's growth policy: explicit options first, then those planned for this machine, then the paper's.

    Raises:
        ValueError: an option that the method does not have, a value of the wrong type or out of range.
    """
    unknown = sorted(set(options) - set(chosen.options))
    if unknown:
        known = ", ".join(chosen.options) or "none"
        raise ValueError(f"method {chosen.name!r} has no option {', '.join(map(repr, unknown))}; its options: {known}")
    if chosen.growth is None:
        return None
    _check_types(chosen, options)
    planned = chosen.planned(plan) if plan else {}
    return chosen.growth(**{**planned, **options})


def _check_types(chosen: Method, options: dict[str, Any]) -> None:
    """An int is a number too where a float is wanted; a bool never is."""
    wanted = get_type_hints(chosen.growth)
    for name, value in options.items():
        kind = wanted[name]
        fits = isinstance(value, int | float if kind is float else kind)
        if not fits or (isinstance(value, bool) and kind is not bool):
            raise ValueError(f"{chosen.name}: {name} is {value!r}; expected {getattr(kind, '__name__', kind)}")
