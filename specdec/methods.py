"""The registry: a method is a growth policy over a kind of draft, and a verifier. Nothing else tells methods apart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, get_type_hints

from specdec.cost import Plan
from specdec.drafts import needs
from specdec.growth.chain import Chain
from specdec.growth.eagle2 import Eagle2
from specdec.growth.talon import Talon
from specdec.models.lm import CausalLM
from specdec.protocols import Growth, Verifier
from specdec.verifiers.target import TargetVerifier

_MODELS = ("target", "proxy")  # fields of a verifier that are no options


@dataclass(frozen=True)
class Method:
    """One row of the registry.

    Attributes:
        description: one line for people.
        lossless: the text is distributed as the target's own (at T=0: is the target's own).
        drafts: kinds of draft that it takes, the usual one first; `()` for none.
        growth: the policy, a dataclass whose fields are options of the method; None for plain decoding.
        verifier: who decides, a dataclass whose fields are options too, but for the models that it asks.
        planned: the options that follow from a `Plan` where verification is not free.
    """

    name: str
    description: str
    lossless: bool
    drafts: tuple[str, ...] = ()
    growth: Callable[..., Growth] | None = None
    verifier: Callable[..., Verifier] = TargetVerifier
    planned: Callable[[Plan], dict[str, Any]] = lambda plan: {}

    @property
    def options(self) -> dict[str, Any]:
        """Option -> default."""
        return {f.name: f.default for part in self._parts for f in fields(part) if f.name not in _MODELS}

    @property
    def option_types(self) -> dict[str, Any]:
        """Option -> type."""
        hints = {name: hint for part in self._parts for name, hint in get_type_hints(part).items()}
        return {name: hints[name] for name in self.options}

    @property
    def needs(self) -> str:
        """What a user has to bring besides the target."""
        return needs(self.drafts) or "nothing"

    @property
    def _parts(self) -> list[Any]:
        return [part for part in (self.growth, self.verifier) if part is not None]

    def check(self, options: dict[str, Any]) -> None:
        """ValueError for an option that the method does not have, or a value of the wrong type or out of range."""
        if unknown := sorted(set(options) - set(self.options)):
            known = ", ".join(self.options) or "none"
            raise ValueError(
                f"method {self.name!r} has no option {', '.join(map(repr, unknown))}; its options: {known}"
            )
        for name, value in options.items():
            kind = self.option_types[name]
            fits = isinstance(value, int | float if kind is float else kind)  # an int is a number too, a bool never
            if not fits or (isinstance(value, bool) and kind is not bool):
                raise ValueError(f"{self.name}: {name} is {value!r}; expected {getattr(kind, '__name__', kind)}")
        if self.growth is not None:
            self.growth(**self._of(self.growth, options))
        self.verifier(**dict.fromkeys(self._models), **self._of(self.verifier, options))

    @property
    def _models(self) -> list[str]:
        return [f.name for f in fields(self.verifier) if f.name in _MODELS]  # type: ignore[arg-type]

    @staticmethod
    def _of(part: Any, options: dict[str, Any]) -> dict[str, Any]:
        return {f.name: options[f.name] for f in fields(part) if f.name in options}


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
        ValueError: see `Method.check`.
    """
    chosen.check(options)
    if chosen.growth is None:
        return None
    planned = chosen.planned(plan) if plan else {}
    return chosen.growth(**{**planned, **chosen._of(chosen.growth, options)})


def make_verifier(chosen: Method, options: dict[str, Any], target: CausalLM, proxy: CausalLM | None = None) -> Verifier:
    """The method's verifier with its options, over the models that it asks."""
    models = {name: model for name, model in (("target", target), ("proxy", proxy)) if name in chosen._models}
    return chosen.verifier(**models, **chosen._of(chosen.verifier, options))
