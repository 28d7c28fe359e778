"""Parsers of formats, dtypes, functions, keys and sizes in a command line; errors suggest the most similar name."""

from __future__ import annotations

import re
import runpy
import traceback
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import typer

from ..core.codec import dtype_name
from ..core.trees import near_names
from ..errors import CheckpointingException, TreeError, error_text
from ..shell.table import StrategyAction, formats_with

ALIASES = {
    "hf": "huggingface",
    "transformers": "huggingface",
    "megatron": "torch_dist",
    "bf16": "bfloat16",
    "f16": "float16",
    "fp16": "float16",
    "half": "float16",
    "f32": "float32",
    "float": "float32",
    "fp32": "float32",
    "double": "float64",
    "f64": "float64",
    "fp64": "float64",
}
"""Other names of formats and dtypes, in lower case."""

# Parse errors are BadParameter, which typer shows with the usage before it exits with status 2.


def format_named(text: str) -> str | tuple[str, int]:
    """Return the format that a text names, as BACKEND or BACKEND:VERSION.

    Raises:
        typer.BadParameter: There is no writable format of that name.

    Examples:
        >>> format_named("hf"), format_named("zarr:3")
        ('huggingface', ('zarr', 3))
    """
    backend, sign, version = text.partition(":")
    # int() would also accept digits of other scripts, signs and underscores.
    if not backend or (sign and not (version.isascii() and version.isdecimal())):
        raise typer.BadParameter(f"{text!r} is not BACKEND or BACKEND:VERSION")
    formats = formats_with(StrategyAction.SAVE_SHARDED)
    name = known_name("format", backend, {backend for backend, _ in formats})
    if not sign:
        return name
    if (name, int(version)) not in formats:
        versions = ", ".join(f"{backend}:{number}" for backend, number in formats if backend == name)
        raise typer.BadParameter(f"{text!r} cannot be written, but {versions} can")
    return name, int(version)


def float_dtype_named(text: str) -> str:
    """Return the name of the floating-point dtype that a text names.

    Raises:
        typer.BadParameter: This torch has no such dtype.

    Examples:
        >>> float_dtype_named("bf16")
        'bfloat16'
    """
    import torch

    dtypes = [value for value in vars(torch).values() if isinstance(value, torch.dtype)]
    names = {dtype_name(dtype) for dtype in dtypes if dtype.is_floating_point}
    return known_name("floating-point dtype", text, names)


def known_name(kind: str, text: str, names: Collection[str]) -> str:
    """Return the known name that a user typed, perhaps in another case, with dashes, or as an alias.

    Args:
        kind: Noun for the error message, such as "format".
        text: Text that the user typed.
        names: Known names.

    Raises:
        typer.BadParameter: The text is no known name; the error suggests the most similar name, or lists all.

    Examples:
        >>> known_name("format", "HF", {"huggingface", "zarr"})
        'huggingface'
    """
    plain = text.lower().replace("-", "_").removeprefix("torch.")
    for name in (text, plain, ALIASES.get(plain, plain)):
        if name in names:
            return name
    others = [short for short, name in ALIASES.items() if name in names]
    raise typer.BadParameter(f"no {kind} {text!r}. {did_you_mean(text, names, others)}")


def did_you_mean(text: str, names: Collection[str], others: Collection[str] = ()) -> str:
    """Return the sentence that names the most similar name, or all names if there is none.

    Args:
        text: Unknown name.
        names: Known names.
        others: Further known names, which aren't listed.

    Examples:
        >>> did_you_mean("bf61", ["bfloat16"], ["bf16"])
        "Did you mean 'bf16'?"
    """
    near = near_names([text], [*names, *others]).get(text)
    return f"Did you mean {near!r}?" if near is not None else f"There is {', '.join(sorted(names)) or 'none'}."


def function_named(text: str) -> Callable[[Any], Any]:
    """Execute a Python file, and return the function or trace in it that a text FILE.py:NAME names.

    If the function raises an error later, the line of the file is added to it: a `CheckpointingException` gets a note,
    and another error becomes a TreeError.

    Raises:
        typer.BadParameter: There is no such file or function, or the file raised an error.
    """
    file, _, name = text.rpartition(":")
    if not file.endswith(".py") or not name.isidentifier():
        raise typer.BadParameter(f"{text!r} is not FILE.py:NAME")
    if not Path(file).is_file():
        raise typer.BadParameter(f"there is no file {file!r}")
    try:
        names = runpy.run_path(file)
    except Exception as error:
        raise typer.BadParameter(f"{_place(error, file)}: {type(error).__name__}: {error}") from error
    functions = {key for key, value in names.items() if callable(value) and not key.startswith("__")}
    if name not in functions:
        what = "is not a function" if name in names else "is not there"
        raise typer.BadParameter(f"{file}: {name!r} {what}. {did_you_mean(name, functions)}")
    from ..traces import Trace  # Most commands don't need this import.

    return names[name] if isinstance(names[name], Trace) else _with_location(names[name], file, name)


def _with_location(function: Callable[[Any], Any], file: str, name: str) -> Callable[[Any], Any]:
    def call(tree: Any) -> Any:
        try:
            return function(tree)
        except CheckpointingException as error:
            error.add_note(f"raised in {name}, {_place(error, file)}")
            raise
        except Exception as error:
            heading = f"{name} of {_place(error, file)}: {type(error).__name__}: {error}"
            key = error.args[0] if isinstance(error, KeyError) and error.args else None
            near = near_names([key], list(tree)) if isinstance(key, str) and isinstance(tree, Mapping) else {}
            fix = f"Did you mean {near[key]!r}?" if key in near else "Correct the function."
            raise TreeError(error_text(heading, fix=fix)) from error

    return call


def _place(error: Exception, file: str) -> str:
    """Return the line of a file at which an error was raised, as text; only the file if the error has no line in it."""
    if isinstance(error, SyntaxError) and error.filename == file:
        return f"{file}, line {error.lineno}"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f"{file}, line {lines[-1]}" if lines else file


def renamings(texts: Collection[str]) -> dict[str, str]:
    """Return new keys by old keys, from texts of the form OLD=NEW.

    Raises:
        typer.BadParameter: A text has another form, or two texts have the same OLD.

    Examples:
        >>> renamings(["decoder.*=layers.*"])
        {'decoder.*': 'layers.*'}
    """
    names: dict[str, str] = {}
    for text in texts:
        old, _, new = text.partition("=")
        if not old or not new or old in names:
            raise typer.BadParameter(f"{text!r} is not OLD=NEW, or its OLD is given twice")
        names[old] = new
    return names


_UNITS = {"": 1, "B": 1} | {
    f"{letter}{form}": base**power
    for power, letter in enumerate("KMGT", start=1)
    for form, base in (("", 1000), ("B", 1000), ("IB", 1024))
}


def size_named(text: str) -> int:
    """Return the number of bytes that a text states; units such as MB are decimal, units such as MiB are binary.

    Raises:
        typer.BadParameter: The text isn't such a number, or is below one.

    Examples:
        >>> size_named("256MB"), size_named("1.5 GiB"), size_named("4096")
        (256000000, 1610612736, 4096)
    """
    # A float has fifteen exact digits.
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,15})?) ?([A-Za-z]*)", text.strip(), re.ASCII)
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None or float(match[1]) * unit < 1:
        raise typer.BadParameter(f"{text!r} is not a number of bytes, such as 256MB or 1GiB")
    return int(float(match[1]) * unit)


_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}


def seconds_named(text: str) -> float:
    """Return the number of seconds that a text states: a number, maybe followed by s, m, h, d or w.

    Raises:
        typer.BadParameter: The text isn't such a number.

    Examples:
        >>> seconds_named("90"), seconds_named("1.5h"), seconds_named("7d")
        (90.0, 5400.0, 604800.0)
    """
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,15})?) ?([smhdw]?)", text.strip().lower(), re.ASCII)
    if match is None:
        raise typer.BadParameter(f"{text!r} is not a length of time, such as 90s, 30m, 12h or 7d")
    return float(match[1]) * _SECONDS[match[2]]
