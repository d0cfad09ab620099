"""Speculative decoding of Hugging Face language models: the same text as your model alone, in fewer passes."""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specdec.decoder import Decoder as Decoder
    from specdec.loading import PRESETS as PRESETS
    from specdec.loading import load as load
    from specdec.methods import METHODS as METHODS
    from specdec.methods import Method as Method
    from specdec.protocols import Drafter as Drafter
    from specdec.protocols import Growth as Growth
    from specdec.protocols import Span as Span
    from specdec.protocols import Verdict as Verdict
    from specdec.protocols import Verifier as Verifier
    from specdec.stats import Output as Output
    from specdec.stats import Round as Round
    from specdec.tree import DraftTree as DraftTree
    from specdec.tree import Layer as Layer

try:
    __version__ = version("specdec-kernels")
except PackageNotFoundError:  # a checkout that is not installed
    __version__ = "0+unknown"

# name -> module; imported when first asked for, so that `specdec --help` does not wait for transformers
_EXPORTS = {
    "Decoder": "decoder",
    "DraftTree": "tree",
    "Drafter": "protocols",
    "Growth": "protocols",
    "Layer": "tree",
    "METHODS": "methods",
    "Method": "methods",
    "Output": "stats",
    "PRESETS": "loading",
    "Round": "stats",
    "Span": "protocols",
    "Verdict": "protocols",
    "Verifier": "protocols",
    "load": "loading",
}
__all__ = sorted(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_EXPORTS[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
