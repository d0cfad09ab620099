"""`load`: from names and paths to a decoder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, StrictDataclassError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from specdec import cost
from specdec.checkpoints.files import CONFIG, DAMAGE, some
from specdec.checkpoints.smollm2 import smollm2_folder
from specdec.decoder import Decoder
from specdec.drafters.lm import LMDrafter
from specdec.drafts import KINDS, LM, kind_of
from specdec.methods import Method, make_growth, make_verifier, method
from specdec.models import llama
from specdec.models.lm import CausalLM
from specdec.protocols import Drafter


@dataclass(frozen=True)
class Preset:
    """A target with drafts that fit it, by one name.

    Attributes:
        drafts: folders by method, or by kind of draft (`drafts.KINDS`).
    """

    description: str
    target: Callable[[], Path]
    drafts: Mapping[str, Callable[[], Path]]

    def draft(self, chosen: Method) -> Path:
        """The draft that this method usually takes."""
        return next(self.drafts[name] for name in (chosen.name, *chosen.drafts) if name in self.drafts)()


PRESETS: dict[str, Preset] = {
    "smollm2": Preset(
        "SmolLM2-135M-Instruct with an EAGLE-3 head that ships with this package; runs on any CPU",
        smollm2_folder,
        {"eagle3": lambda: Path(str(files("specdec") / "data" / "smollm2-eagle3"))},
    )
}


def load(
    target: str | Path | PreTrainedModel,
    *,
    draft: str | Path | PreTrainedModel | Drafter | None = None,
    method: str = "talon",
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    exact: bool = False,
    **options: Any,
) -> Decoder:
    """A decoder for a target, a draft and a method.

    Args:
        target: a preset (`specdec.PRESETS`), a folder or Hub id, or a `transformers` model, which is borrowed.
        draft: an EAGLE-3 head or a smaller causal LM (folder or Hub id), a model, or a `Drafter`; presets bring one.
        method: a name of `specdec.METHODS`.
        device: where to put what is loaded; CUDA if there is one, else the CPU.
        dtype: of what is loaded; by default fp32 on a CPU, else the checkpoint's own.
        tokenizer: for a target that is a model object and should take and give text.
        exact: refuse a method that is not lossless.
        options: the method's own (`specdec.METHODS[name].options`). Where the target runs on a CPU, tree sizes that are
            not given follow from its measured cost curve (`specdec doctor` explains).
    Raises:
        ValueError: what was given, what was expected, what to do.
    """
    chosen = _method(method, exact)
    chosen.check(options)  # before anything is loaded
    source = draft_source(target, draft, chosen)
    if source is not None:
        _check_source(source, "draft", (PreTrainedModel, Drafter))
    lm, tokenizer = load_target(target, device, dtype, tokenizer)
    drafter = None if source is None else load_draft(source, lm, chosen, tokenizer)
    return assemble(chosen, options, lm, drafter, tokenizer, exact)


def _method(name: str, exact: bool) -> Method:
    chosen = method(name)
    if exact and not chosen.lossless:
        raise ValueError(f"exact=True refuses method {name!r}, which is not lossless; choose another, or exact=False")
    return chosen


def draft_source(target: Any, draft: Any, chosen: Method) -> Any:
    """What the method drafts with: what was given, else the preset's own; None for a method without a draft.

    Raises:
        ValueError: it needs one, and there is none.
    """
    if not chosen.drafts:
        return None
    if draft is None and isinstance(target, str) and target in PRESETS:
        return PRESETS[target].draft(chosen)
    if draft is None:
        raise ValueError(
            f"method {chosen.name!r} needs {chosen.needs}; give draft=<folder, Hub id or model>, or a target that is a "
            f"preset and brings one: {', '.join(PRESETS)}"
        )
    return draft


def assemble(
    chosen: Method,
    options: dict[str, Any],
    target: CausalLM,
    drafter: Drafter | None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    exact: bool = False,
) -> Decoder:
    """The decoder of a method over models that are loaded; tree sizes follow from the cost curve on a CPU."""
    curve, plan = cost.planned(target, drafter)
    growth, verifier = make_growth(chosen, options, plan), make_verifier(chosen, options, target)
    decoder = Decoder(target, drafter, growth, verifier, tokenizer, method=chosen.name, exact=exact)
    decoder.plain_step_seconds = curve.at(1) if curve else None
    return decoder


def load_target(
    target: str | Path | PreTrainedModel,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> tuple[CausalLM, PreTrainedTokenizerBase | None]:
    """The target and its tokenizer; a model that is loaded here for a CPU runs through the lean forward if it can."""
    if isinstance(target, str) and target in PRESETS:
        target = PRESETS[target].target()
    if isinstance(target, PreTrainedModel):
        if device is not None or dtype is not None:
            raise ValueError("device and dtype belong to models that are loaded; the target is a model object already")
        return CausalLM(target.eval()), tokenizer
    _check_source(target, "target", (PreTrainedModel,))
    folder = _folder(target, "target")
    if (kind := kind_of(folder)) != LM:
        raise ValueError(
            f"the target {str(target)!r} is {KINDS[kind].needs}, which only drafts; give it as the draft, and the "
            "language model that it was trained for as the target"
        )
    model = _load_lm(folder, device, dtype, "target")
    tokenizer = tokenizer or _load_tokenizer(folder, "pass tokenizer=...")
    return CausalLM(model, lean=model.device.type == "cpu" and llama.supports(model) is None), tokenizer


def load_draft(
    draft: str | Path | PreTrainedModel | Drafter,
    target: CausalLM,
    chosen: Method,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> Drafter:
    """A drafter on the target's device, in its dtype.

    A language model that is loaded here must share the target's tokenizer; one that is given as an object is trusted.
    """
    if isinstance(draft, PreTrainedModel):
        return _lm_drafter(CausalLM(draft.eval(), "draft"), target, chosen)
    _check_source(draft, "draft", (PreTrainedModel, Drafter))
    if not isinstance(draft, (str, Path)):
        return draft
    folder = _folder(draft, "draft")
    if not (folder / CONFIG).is_file():
        raise ValueError(f"{folder} has no {CONFIG}; expected {chosen.needs}")
    kind = kind_of(folder)
    if kind != LM:
        if kind not in chosen.drafts:
            raise ValueError(f"{draft} is {KINDS[kind].needs}, but method {chosen.name!r} needs {chosen.needs}")
        return KINDS[kind].open(folder, target)
    model = _load_lm(folder, target.device, target.dtype, "draft")
    if tokenizer is not None:
        _check_tokenizers(tokenizer, _load_tokenizer(folder, _ONLY_COMPARED))
    lean = model.device.type == "cpu" and llama.supports(model) is None
    return _lm_drafter(CausalLM(model, "draft", lean), target, chosen)


def _lm_drafter(model: CausalLM, target: CausalLM, chosen: Method) -> LMDrafter:
    if "lm" not in chosen.drafts:
        raise ValueError(f"the draft is a language model, but method {chosen.name!r} needs {chosen.needs}")
    if model.vocab_size != target.vocab_size:
        raise ValueError(
            f"the draft's vocabulary has {model.vocab_size} entries, the target's {target.vocab_size}; "
            "they have to share a tokenizer"
        )
    return LMDrafter(model)


def _check_tokenizers(target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase) -> None:
    ours, theirs = target.get_vocab(), draft.get_vocab()
    if ours == theirs:
        return
    token = min(
        (t for t in ours.keys() | theirs.keys() if ours.get(t) != theirs.get(t)), key=lambda t: ours.get(t, 1 << 40)
    )
    raise ValueError(
        f"target and draft have different tokenizers ({len(ours)} and {len(theirs)} tokens): {token!r} is id "
        f"{ours.get(token)} of the target and {theirs.get(token)} of the draft; choose a draft of the same family, or "
        "pass the draft as a model object to skip this check"
    )


def _load_lm(
    source: str | Path, device: str | torch.device | None, dtype: str | torch.dtype | None, role: str
) -> PreTrainedModel:
    folder = _folder(source, role)
    device = choose_device(device)
    if dtype is None:
        dtype = torch.float32 if device.type == "cpu" else "auto"
    else:
        dtype = _dtype(dtype)
    try:
        # sizes that differ are told with the other differences, by name
        model, info = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True
        )
    except (OSError, StrictDataclassError, *DAMAGE) as error:
        told = str(error) if isinstance(error, (OSError, ValueError)) else f"{type(error).__name__}: {error}"
        raise ValueError(
            f"the {role} {str(source)!r} could not be loaded as a causal language model: {told}; if its files are "
            "damaged or incomplete, download or copy them again"
        ) from error
    _check_tensors(info, source, role)
    return model.to(device).eval()


def _check_tensors(info: dict[str, Any], source: str | Path, role: str) -> None:
    """transformers leaves missing tensors random and only logs it; tied ones and those it ignores are not listed."""
    complaints = []
    if missing := sorted(info["missing_keys"]):
        complaints.append(f"lacks {some(missing)}")
    if sizes := sorted(info["mismatched_keys"]):
        shapes = [f"{name} ({tuple(found)}, expected {tuple(wanted)})" for name, found, wanted in sizes]
        complaints.append(f"has the wrong shape for {some(shapes)}")
    if unexpected := sorted(info["unexpected_keys"]):
        complaints.append(f"has {some(unexpected)}, unknown to its architecture")
    if complaints:
        raise ValueError(
            f"the {role} {str(source)!r} {' and '.join(complaints)}; it would write nonsense, so it is refused: "
            "compare its weights with its config.json, or download it again"
        )


def choose_device(given: str | torch.device | None) -> torch.device:
    """The device that is meant, CUDA if there is one where nothing is given; ValueError for one that cannot be used."""
    try:
        device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if given is None else given)
    except (RuntimeError, TypeError):
        raise ValueError(f"device is {given!r}; expected 'cpu', 'cuda' or 'cuda:<number>'") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device is {str(given)!r}, but this torch sees no CUDA device; use 'cpu'")
    if device.type == "meta":
        raise ValueError("device is 'meta', which computes nothing; use 'cpu' or 'cuda'")
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, ImportError) as error:  # NotImplementedError is a RuntimeError
        raise ValueError(f"device is {str(given)!r}, which this torch cannot use; use 'cpu' or 'cuda'") from error
    return device


def _dtype(name: str | torch.dtype) -> torch.dtype | str:
    if name == "auto":
        return name
    dtype = getattr(torch, name, None) if isinstance(name, str) else name
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"dtype is {name!r}; expected 'auto', 'float32', 'bfloat16' or 'float16'")
    return dtype


_ONLY_COMPARED = (
    "a draft's tokenizer is only compared with the target's: add its files, or pass the draft as a model object to "
    "skip this check"
)


def _load_tokenizer(folder: Path, remedy: str) -> PreTrainedTokenizerBase:
    try:
        return AutoTokenizer.from_pretrained(folder)
    except ImportError:
        raise
    except Exception as error:  # a damaged tokenizer.json is a bare Exception of the tokenizers package
        raise ValueError(f"no tokenizer in {str(folder)!r}: {error}; {remedy}") from error


def _check_source(given: object, role: str, kinds: tuple[type, ...]) -> None:
    if isinstance(given, (str, Path, *kinds)) and not isinstance(given, type):
        return
    expected = " or ".join(["a folder, a Hub id", *(kind.__name__ for kind in kinds)])
    raise ValueError(f"the {role} is {given!r:.80}, a {type(given).__name__}; expected {expected}")


def _folder(source: str | Path, role: str) -> Path:
    """A local folder as it is; anything else is asked of the Hub."""
    if not str(source).strip():
        raise ValueError(f"the {role} is {str(source)!r}; expected a folder or a Hub id (owner/name)")
    path = Path(source).expanduser()
    if path.is_dir():
        return path
    name = str(source)
    if path.exists() or path.is_absolute() or name.startswith(".") or name.count("/") != 1:
        presets = ", ".join(PRESETS)
        raise ValueError(
            f"the {role} {name!r} is neither a folder here nor a Hub id (owner/name) nor a preset ({presets})"
        )
    try:
        return Path(snapshot_download(name))
    except (OSError, ValueError, HfHubHTTPError) as error:
        raise ValueError(f"the {role} {name!r} is no folder here, and the Hub did not give it: {error}") from error
