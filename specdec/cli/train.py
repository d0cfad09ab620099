"""`specdec train`: the fields of the option classes as options, each with its sentence as help."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from specdec.cli.options import Target, quiet, status

app = typer.Typer(no_args_is_help=True, help="Make a draft for a target: its text first, then an EAGLE-3 head.")

_TYPES = {"int": int, "float": float, "bool": bool, "str": str}


def with_options(module: str, name: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Adds the fields of the dataclass `name` in `module` to a command, which gets their values as `**options`.

    They are read from the source: importing the module takes seconds, and help should not wait.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.kind != p.VAR_KEYWORD]
        wrapped = [p.replace(kind=p.KEYWORD_ONLY) for p in (*own, *_fields(module, name))]
        command.__signature__ = inspect.Signature(wrapped)  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in wrapped}
        return command

    return decorate


def _fields(module: str, name: str) -> list[inspect.Parameter]:
    source, body, bases = _class(module, name)
    inherited = [field for base in bases for field in _fields(_origin(source, base), base)]
    found = []
    for field, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and field.value is not None:
            doc = ast.literal_eval(after.value) if isinstance(after, ast.Expr) else ""
            default = ast.literal_eval(field.value)
            hint = _type(ast.unparse(field.annotation))
            found.append(
                inspect.Parameter(
                    field.target.id,
                    inspect.Parameter.KEYWORD_ONLY,
                    default=list(default) if isinstance(default, tuple) else default,
                    annotation=Annotated[hint, typer.Option(help=" ".join(doc.split()))],
                )
            )
    return [*found, *inherited]


def _class(module: str, name: str) -> tuple[ast.Module, list[ast.stmt], list[str]]:
    """The source of a module, the body of one of its classes, and the names of that class's bases."""
    spec = find_spec(module)
    assert spec is not None, module
    source = ast.parse(Path(str(spec.origin)).read_text(encoding="utf-8"))
    found = next(node for node in source.body if isinstance(node, ast.ClassDef) and node.name == name)
    return source, found.body, [base.id for base in found.bases if isinstance(base, ast.Name)]


def _origin(source: ast.Module, name: str) -> str:
    """The module that a source imports a name from."""
    imports = (node for node in source.body if isinstance(node, ast.ImportFrom))
    return next(str(node.module) for node in imports if name in [alias.name for alias in node.names])


def _type(text: str) -> Any:
    base, _, optional = text.partition(" | ")
    if base.startswith("tuple["):
        return list[_TYPES[base[6:].split(",")[0]]]  # type: ignore[misc]
    return _TYPES[base] | None if optional else _TYPES[base]


@app.command()
@with_options("specdec.training.data", "DataOptions")
def data(
    prompts: Annotated[Path, typer.Option(exists=True, help="JSON lines with `prompt` or `turns`.")],
    out: Annotated[Path, typer.Option(help="Where the answers go; a run that was interrupted goes on there.")],
    target: Target = "smollm2",
    **options: Any,
) -> None:
    """Make training text: prompts in, the target's own answers out."""
    quiet()
    from specdec.training.data import DataOptions, generate_data

    checked = DataOptions(**_tuples(options))
    model, tokenizer = _plain_target(target)
    generate_data(model, tokenizer, prompts, out, checked)
    typer.echo(str(out))


@app.command()
@with_options("specdec.training.eagle3", "Eagle3Options")
def eagle3(
    data: Annotated[Path, typer.Option(exists=True, help="What `specdec train data` wrote.")],
    out: Annotated[Path, typer.Option(help="Gets checkpoint-*/, curve.jsonl and options.json.")],
    target: Target = "smollm2",
    features: Annotated[Path | None, typer.Option(help="Where features are kept; default: OUT/features.")] = None,
    resume: Annotated[bool, typer.Option(help="Go on from the last checkpoint in OUT.")] = True,
    **options: Any,
) -> None:
    """Train an EAGLE-3 head on a target's own answers; its last checkpoint serves as --draft."""
    quiet()
    from specdec.training.eagle3 import Eagle3Options, train_eagle3

    checked = Eagle3Options(**_tuples(options))
    model, tokenizer = _plain_target(target)
    typer.echo(str(train_eagle3(model, tokenizer, data, out, checked, features=features, resume=resume)))


def _tuples(options: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}


def _plain_target(target: str) -> tuple[Any, Any]:
    """A target as transformers runs it, in fp32, with its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    from specdec.loading import PRESETS

    preset = PRESETS.get(target)
    with status(f"loading {target}"):
        source = preset.target() if preset else target
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(source)
    logging.set_verbosity_warning()  # from here on the trainer's progress bar is wanted; it follows the verbosity
    return model, tokenizer
