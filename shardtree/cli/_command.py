"""Behaviour that all commands share: help, exit statuses, errors that name options, and a stdout closed early."""

from __future__ import annotations

import ast
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import partial
from types import MappingProxyType
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

from ..errors import CheckpointingException, printable

FORMATS = "dcp, huggingface, safetensors, torch_dist, zarr"
"""Writable formats of the library, for help texts: making the table of formats would import torch."""

Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
"""Option of all commands that print JSON."""

TROUBLE = 2
"""Exit status if something couldn't be done."""

INTERRUPTED = 130  # A shell shows this status for programs that SIGINT ended.
_BROKEN_PIPE = 141  # A shell shows this status for programs that SIGPIPE ended.

_OF_SAVES = {"sharded_strategy": "backend", "common_strategy": "common_backend"}
"""Keyword of `convert` by the keyword of `save` that means the same, since a conversion may raise errors of `save`."""

_options: ContextVar[Mapping[str, str]] = ContextVar("options", default=MappingProxyType({}))


def options_as_typed() -> Mapping[str, str]:
    """Return the running command's options as users type them, such as ``--key PATTERN``, by Python keyword."""
    return _options.get()


class Command(TyperCommand):
    """A command of shardtree: its function returns the exit status, and its errors name options."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters, --help included; the help shows no value type for flags."""
        return _without_types(super().get_params(ctx))

    def invoke(self, ctx: Any) -> Any:
        """Run the command, and exit with the status that it returns; our own errors are printed, and give status 2."""
        options = [param for param in self.params if isinstance(param, TyperOption)]
        texts = {str(option.name): _spelling(option) for option in options}
        token = _options.set({**texts, **{name: texts[same] for name, same in _OF_SAVES.items() if same in texts}})
        name = ctx.command_path.partition(" ")[2]  # The name lacks the program's: "series prune".
        try:
            # Backslashes distinguish keys whose characters the encoding lacks.
            for stream in (sys.stdout, sys.stderr):
                stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
            status = printed(partial(super().invoke, ctx))
        except CheckpointingException as error:
            complain(name, error)
            status = TROUBLE
        except KeyboardInterrupt as error:
            typer.echo(f"shardtree {name}: {str(error) or 'interrupted'}", err=True)
            status = INTERRUPTED
        finally:
            _options.reset(token)
        raise typer.Exit(status)


class CommandGroup(TyperGroup):
    """The group of all commands."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters, --help included; the help shows no value type for flags."""
        return _without_types(super().get_params(ctx))

    def make_context(self, *args: Any, **more: Any) -> Any:
        """Parse the command line, and handle a stdout that can't be written, since --help and --version print here."""
        with _checked_stdout():
            return super().make_context(*args, **more)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments; without arguments, print the help."""
        return super().parse_args(ctx, args or ["--help"])

    def invoke(self, ctx: Any) -> Any:
        """Run the command, and handle a stdout that can't be written."""
        with _checked_stdout():
            return super().invoke(ctx)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Print each command with its whole summary; by default, the libraries cut it to fit a line."""
        with formatter.section("Commands"):
            summaries = [(name, command.get_short_help_str(limit=1000)) for name, command in self.commands.items()]
            formatter.write_dl(summaries)


# This section handles a stdout that can't be written.


@contextmanager
def _checked_stdout() -> Iterator[None]:
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except OSError as error:
        raise typer.Exit(unprintable(error)) from error


def unprintable(error: OSError) -> int:
    """Return the exit status after an error of writing to stdout; print the error unless the reader closed the pipe.

    Raises:
        OSError: `error` doesn't come from stdout: it names a file, or is one of our own errors.
    """
    if error.errno is None or error.filename is not None:
        raise error
    # Buffered text goes to /dev/null, so that closing stdout at the interpreter's exit doesn't fail. The descriptor is
    # replaced rather than sys.stdout, since the buffer that is flushed last belongs to the old object.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    with suppress(OSError, ValueError):
        os.dup2(nowhere, sys.stdout.fileno())
    if isinstance(error, BrokenPipeError):
        return _BROKEN_PIPE
    typer.echo(f"shardtree: stdout cannot be written: {error.strerror}", err=True)
    return TROUBLE


def printed(work: Callable[[], int]) -> int:
    """Run a function that prints, and return its exit status, or that of `unprintable` if stdout can't be written."""
    try:
        status = work()
        # The flush finds a closed pipe now; at the interpreter's exit it would print an error.
        sys.stdout.flush()
    except OSError as error:
        return unprintable(error)
    return status


def complain(command: str, error: Exception) -> None:
    """Print an error's text and notes to stderr, in terms of the command's options."""
    # Errors of a function with the command's name already begin with it.
    texts = [str(error), *getattr(error, "__notes__", [])]
    text = "\n  ".join(part.removeprefix(f"{command.partition(' ')[0]}: ") for part in texts)
    text = shell_words(text, options_as_typed())
    typer.echo(f"shardtree {command}: " + "\n".join(map(printable, text.split("\n"))), err=True)


# Options.


def _spelling(option: TyperOption) -> str:
    long = next((name for name in option.opts if name.startswith("--")), option.opts[0])
    return long if option.is_flag else f"{long} {option.metavar or 'VALUE'}"


def _without_types(params: list[Any]) -> list[Any]:
    for param in params:
        # A flag takes no value, but users would type one if help showed a type beside it.
        if isinstance(param, TyperOption) and param.is_flag and param.metavar is None:
            param.metavar = ""
    return params


# Errors of the library name keywords of functions: leave_out=['common']. A command's options have the names of these
# keywords, so that the option is found by its name: --leave-out common.

# The pattern matches a keyword with a value, also within options: options=LoadOptions(allow_pickle=True).
_KEYWORD = re.compile(
    r"(?P<within>(?:\w*options=)?(?:Load|Save)Options\()?\b(?P<name>[a-z]\w*)="
    r"(?P<value>True|False|None|\[[^\[\]]*\]|\([^()]*\)|'[^']*'|\"[^\"]*\"|\d+|\.{3}|(?![\w(]))(?(within)\))"
)
_LEFT = re.compile(r"\b(?:Load|Save)Options\(|\b[Pp]ass [a-z]\w*=")
_NAME = re.compile(r"(?<![\w.'\"/])[a-z]+(?:_[a-z]+)+(?![\w('\"=.]\w*)")


def shell_words(text: str, options: Mapping[str, str]) -> str:
    """Return an error's text with Python's keywords replaced by a command's options.

    Args:
        text: Text of the error. Keywords that aren't options stay unchanged.
        options: Spelling of each option by its keyword: ``--name`` for a flag, else ``--name VALUE``.

    Examples:
        >>> options = {"allow_pickle": "--allow-pickle", "leave_out": "--leave-out PATTERN"}
        >>> shell_words("Pass options=LoadOptions(allow_pickle=True) if you trust it.", options)
        'Pass --allow-pickle if you trust it.'
        >>> shell_words("leave_out=['common'] converts without it", options)
        '--leave-out common converts without it'
    """
    text = _KEYWORD.sub(lambda match: _as_option(match, options), text)
    # --rename calls `partial_rename`, which errors name.
    spellings = {f"partial_{name}": spelling for name, spelling in options.items()} | {**options}
    text = _NAME.sub(lambda match: spellings.get(match[0], match[0]).partition(" ")[0], text)
    left = _LEFT.search(text) if options else None
    if left is None:
        return text
    name = left[0].strip("(=").rpartition(" ")[2]
    return f"{text}\n  {name} is for a call from Python: this command has no option for it."


def _as_option(match: re.Match[str], options: Mapping[str, str]) -> str:
    name, value = match["name"], match["value"]
    if value == "False" and f"no_{name}" in options:
        return options[f"no_{name}"]
    flag, _, metavar = options.get(name, "").partition(" ")
    is_switch = value in ("True", "False")
    # If the option can't take the value, it isn't the option of this keyword.
    if not flag or is_switch == bool(metavar) or value == "False":
        return match[0]
    if is_switch:
        return flag
    return " ".join(f"{flag} {shlex.quote(text)}" for text in _values(value)) or f"{flag} {metavar}"


def _values(value: str) -> list[str]:
    """Return the items of a list literal as command-line arguments; any other literal is a single item.

    The result is empty if `value` isn't a literal, or if an item is None or Ellipsis (``...``).
    """
    try:
        literal = ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return []
    values = literal if isinstance(literal, list) else [literal]
    # A pair is a format with its version, which is typed as zarr:3.
    texts = (":".join(map(str, item)) if isinstance(item, tuple) else str(item) for item in values)
    return [] if {None, ...} & set(values) else list(texts)
