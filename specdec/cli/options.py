"""What the commands share: options, their checks, and how errors are told."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

Target = Annotated[str, typer.Option(help="A preset (smollm2), a folder or a Hub id.")]
Draft = Annotated[str | None, typer.Option(help="An EAGLE-3 head or a smaller model; presets bring one.")]
Device = Annotated[str | None, typer.Option(help="Default: cuda if there is one, else cpu.")]
Dtype = Annotated[str | None, typer.Option(help="Default: float32 on a CPU, else the checkpoint's.")]
Temperature = Annotated[float, typer.Option(help="0 is greedy.")]
TopP = Annotated[float, typer.Option(help="Draw from the likeliest tokens that hold this probability.")]
TopK = Annotated[int, typer.Option(help="Draw from so many of the likeliest tokens; 0: all.")]
Seed = Annotated[int, typer.Option(help="The same seed gives the same text with every lossless method.")]
Raw = Annotated[bool, typer.Option("--raw", help="Take prompts as they are, without the chat template.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]

USER_ERRORS = (ValueError, OSError, FloatingPointError, ModuleNotFoundError)


class Commands(TyperGroup):
    """What a user can put right is one message and exit code 2; anything else is a bug and keeps its traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise typer.Exit(130) from None
        except BrokenPipeError:  # the reader of our output has gone, which is not an error
            raise
        except USER_ERRORS as error:
            if ctx.params.get("traceback"):
                raise
            typer.echo(f"Error: {_message(error)}", err=True)
            raise typer.Exit(2) from None


def _message(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError):
        extra = {"gguf": "demo", "accelerate": "train"}.get(error.name or "")
        hint = f"pip install 'specdec-kernels[{extra}]'" if extra else f"pip install {error.name}"
        return f"the Python package {error.name!r} is not installed; run: {hint}"
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def version(wanted: bool) -> None:
    if wanted:
        from specdec import __version__

        typer.echo(f"specdec {__version__}")
        raise typer.Exit


def quiet() -> None:
    """No progress bars and no advice from transformers; its errors still come."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


@contextmanager
def status(text: str) -> Iterator[None]:
    """A spinner on standard error while something takes seconds; nothing where nobody watches."""
    from specdec.cli.report import stderr

    with stderr.status(f"{text} …"):
        yield


def all_of(*checks: Callable[[], Any]) -> list[Any]:
    """The results of all checks.

    Raises:
        ValueError: the messages of all that failed.
    """
    results, wrong = [], []
    for check in checks:
        try:
            results.append(check())
        except (ValueError, OSError) as error:
            wrong.append(str(error))
    if wrong:
        raise ValueError("\n       ".join(wrong))
    return results


def at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ValueError(f"{name} is {value}; expected at least {least}")


def print_json(value: dict[str, Any]) -> None:
    """One object on standard output, and nothing else."""
    typer.echo(json.dumps(value, ensure_ascii=False, allow_nan=False))


def read_prompt(given: str | None) -> str:
    """The argument, or standard input for `-` and for nothing.

    Raises:
        ValueError: there is none, or it is empty.
    """
    if given is None and sys.stdin.isatty():
        raise ValueError("no prompt; give one as an argument, or - to read it from standard input")
    text = sys.stdin.read().removesuffix("\n") if given in (None, "-") else given
    if not text or not text.strip():
        raise ValueError("the prompt is empty; expected some text")
    return text


def options_by_method(names: str, pairs: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Checked options of every method in a comma-separated list, from `method.key=value` pairs.

    Raises:
        ValueError: an unknown method, a pair of another form or for a method that is not in the list, a bad option.
    """
    listed = [name.strip() for name in names.split(",") if name.strip()]
    if not listed:
        raise ValueError("--methods is empty; expected names separated by commas")
    split = [(*pair.partition(".")[::2], pair) for pair in pairs]
    stray = [pair for name, _, pair in split if name not in listed]
    if stray:
        raise ValueError(f"--set {stray[0]}: expected method.key=value for one of {', '.join(listed)}")
    return {name: method_options(name, [rest for owner, rest, _ in split if owner == name]) for name in listed}


def method_options(name: str, pairs: Sequence[str]) -> dict[str, Any]:
    """Checked options of one method from `key=value` pairs.

    Raises:
        ValueError: an unknown method or option, a value of the wrong type or out of range.
    """
    from specdec.methods import method

    chosen = method(name)
    types = chosen.option_types
    options = {}
    for pair in pairs:
        key, sign, text = pair.partition("=")
        if not (key and sign):
            raise ValueError(f"--set {pair}: expected key=value")
        options[key] = _value(f"{name}: {key}", text, types.get(key, object))
    chosen.check(options)
    return options


def _value(what: str, text: str, wanted: Any) -> Any:
    try:
        value = None if text == "None" else json.loads(text)
    except ValueError:
        value = text
    if wanted is float and type(value) is int:
        value = float(value)
    if not isinstance(value, wanted) or isinstance(value, bool):
        raise ValueError(f"{what} is {text!r}; expected {getattr(wanted, '__name__', wanted)}")
    return value
