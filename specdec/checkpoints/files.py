"""Folders of weights: a `config.json` beside safetensors or pickled tensors, in one file or in shards.

Pickles are read with `weights_only=True` alone, so a file cannot run code. A damaged file, a missing tensor and one
that nobody asked for are each refused by name: a draft with a random or a forgotten part is only ever seen as one that
is never right.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

CONFIG, WEIGHTS, OLD_WEIGHTS = "config.json", "model.safetensors", "pytorch_model.bin"

# What reading a damaged weights file raises: safetensors; torch.load of a broken archive, of bytes that are none.
DAMAGE = (SafetensorError, RuntimeError, pickle.UnpicklingError, EOFError, LookupError, ValueError, TypeError)

_T = TypeVar("_T")


def read_config(folder: Path, what: str) -> dict[str, Any]:
    """The folder's config.json; FileNotFoundError names what was looked for: `what`, such as "an EAGLE-3 head"."""
    path = folder / CONFIG
    if not path.is_file():
        missing = f"no file {CONFIG} in {folder}" if folder.is_dir() else f"no folder {folder}"
        raise FileNotFoundError(f"{missing}; {what} is a folder with {CONFIG} and {WEIGHTS}")
    return parse_config(path)


def parse_config(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        ValueError: it is something else; the message names the file.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # of the encoding, or of JSON
        raise ValueError(f"{path} is not JSON in UTF-8: {error}; download or copy it again") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds {found!r:.80}; expected a JSON object")
    return found


def weight_names(folder: Path, *others: str) -> list[str]:
    """Names of a folder's tensors, as the index of its shards has them; none where it has no weights."""
    if (index := _index(folder, *others)) is not None:
        return list(_weight_map(index))
    return [name for file in weight_files(folder, *others) for name in _undamaged(_names, file)]


def read_weights(folder: Path, *others: str, keep: Callable[[str], bool] = lambda name: True) -> dict[str, Tensor]:
    """The tensors of a folder whose names `keep` accepts, shards together.

    Args:
        others: further file names that the format uses, such as "medusa_lm_head.pt".
    Raises:
        FileNotFoundError: no weights there; ValueError: a damaged file.
    """
    files = weight_files(folder, *others)
    if not files:
        found = ", ".join(sorted(path.name for path in folder.iterdir()))
        wanted = " nor ".join([*others, WEIGHTS, OLD_WEIGHTS])
        raise FileNotFoundError(f"neither {wanted} in {folder}, which holds: {found or 'nothing'}")
    state: dict[str, Tensor] = {}
    for file in files:
        state |= _undamaged(lambda path: _tensors(path, keep), file)
    return state


def weight_files(folder: Path, *others: str) -> list[Path]:
    """The files that hold a folder's tensors: `others` before model.safetensors before pytorch_model.bin; or shards."""
    if (single := _single(folder, *others)) is not None:
        return [single]
    if (index := _index(folder, *others)) is None:
        return []
    files = [folder / name for name in sorted(set(_weight_map(index).values()))]
    if missing := [file.name for file in files if not file.is_file()]:
        raise FileNotFoundError(f"{index} names {', '.join(missing)}, which are not there; download the folder again")
    return files


def _single(folder: Path, *others: str) -> Path | None:
    """The one file that holds everything; None where there is none, or shards do."""
    names = [*others, WEIGHTS, OLD_WEIGHTS]
    names[: len(others)] = [form for name in others for form in (str(Path(name).with_suffix(".safetensors")), name)]
    return next((folder / name for name in names if (folder / name).is_file()), None)


def _index(folder: Path, *others: str) -> Path | None:
    """The table of a folder's shards; None where its weights are one file, or nowhere."""
    if _single(folder, *others) is not None:
        return None
    found = [folder / f"{name}.index.json" for name in (WEIGHTS, OLD_WEIGHTS)]
    return next((index for index in found if index.is_file()), None)


def _weight_map(index: Path) -> dict[str, str]:
    """Tensor name -> name of its file."""
    table = parse_config(index).get("weight_map")
    if not isinstance(table, dict) or not all(isinstance(name, str) for name in table.values()):
        raise ValueError(f"{index} has no weight_map from tensors to files; download it again")
    return table


def _names(path: Path) -> list[str]:
    if path.suffix == ".safetensors":
        with safe_open(path, "pt") as file:
            return list(file.keys())
    return list(_load_pickle(path))


def _tensors(path: Path, keep: Callable[[str], bool]) -> dict[str, Tensor]:
    if path.suffix == ".safetensors":
        with safe_open(path, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys() if keep(name)}  # noqa: SIM118
    return {name: tensor for name, tensor in _load_pickle(path).items() if keep(name)}


def _load_pickle(path: Path) -> dict[str, Tensor]:
    with path.open("rb") as file:
        archive = file.read(2) == b"PK"  # torch's old format cannot be mapped
    return dict(torch.load(path, map_location="cpu", weights_only=True, mmap=archive))


def _undamaged(read: Callable[[Path], _T], path: Path) -> _T:
    try:
        return read(path)
    except DAMAGE as error:
        told = " ".join(str(error).split())[:200] or type(error).__name__
        raise ValueError(f"{path} is damaged or no weights file ({told}); download or copy it again") from error


def write_weights(folder: Path, state: Mapping[str, Tensor], dtype: torch.dtype, name: str = WEIGHTS) -> None:
    """Writes tensors as safetensors, the floating-point ones as `dtype`; the folder is made where it is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    kept = {key: (t.to(dtype) if t.is_floating_point() else t).contiguous() for key, t in state.items()}
    save_file(kept, folder / name, metadata={"format": "pt"})
    (folder / name).chmod(0o644)  # safetensors writes for the owner alone; an installed draft is for every user


def refuse_names(state: Collection[str], expected: Collection[str], optional: Collection[str], what: str) -> None:
    """ValueError where tensors are missing or unknown; `what` begins the message: "the EAGLE-3 head in FOLDER"."""
    complaints = []
    if missing := sorted(set(expected) - set(state)):
        complaints.append(f"lacks {some(missing)}")
    if unknown := sorted(set(state) - set(expected) - set(optional)):
        complaints.append(f"has {some(unknown)}, unknown to the format")
    if complaints:
        raise ValueError(f"{what} {' and '.join(complaints)}; it would draft nonsense, so it is refused")


def refuse_shapes(state: Mapping[str, Tensor], expected: Mapping[str, Tensor], what: str) -> None:
    """ValueError where a tensor has another shape than the one of the same name in `expected`."""
    wrong = [
        f"{name} is {tuple(state[name].shape)}, expected {tuple(tensor.shape)}"
        for name, tensor in expected.items()
        if name in state and state[name].shape != tensor.shape
    ]
    if wrong:
        raise ValueError(f"{what} does not fit together: {some(wrong)}")


def check_counts(raw: Mapping[str, Any], names: Collection[str], folder: Path) -> None:
    """ValueError where one of these fields of config.json is there and no positive integer."""
    for name in names:
        value = raw.get(name)
        if value is not None and (type(value) is not int or value < 1):
            raise ValueError(f"{name} in {folder / CONFIG} is {value!r}; expected a positive integer")


def some(names: list[str], most: int = 12) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
