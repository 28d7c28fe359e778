"""Common parts of all commands: help, exit statuses, errors in the shell's words, a stdout that may be closed."""

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
"""The library's formats that can be written, as help shows them: the table of formats would have to wait for torch."""

Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
"""The option of all commands that print JSON."""

TROUBLE = 2
"""The exit status where something couldn't be done."""

INTERRUPTED = 130  # what a shell shows for programs that SIGINT ended
_BROKEN_PIPE = 141  # what a shell shows for programs that SIGPIPE ended

_OF_SAVES = {"sharded_strategy": "backend", "common_strategy": "common_backend"}
"""Keywords of `save`, whose errors a conversion may raise, and its own for the same."""

_options: ContextVar[Mapping[str, str]] = ContextVar("options", default=MappingProxyType({}))


def options_as_typed() -> Mapping[str, str]:
    """Return the running command's options as they are typed, by the names of the keywords that they are passed as."""
    return _options.get()


class Command(TyperCommand):
    """A command of shardtree."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return its parameters, --help included."""
        return _without_types(super().get_params(ctx))

    def invoke(self, ctx: Any) -> Any:
        """Run it, and leave with the exit status that it returns; an error of ours becomes text and status 2."""
        options = [one for one in self.params if isinstance(one, TyperOption)]
        texts = {str(one.name): _spelling(one) for one in options}
        token = _options.set({**texts, **{name: texts[same] for name, same in _OF_SAVES.items() if same in texts}})
        name = ctx.command_path.partition(" ")[2]  # without the program: "series prune"
        try:
            # Backslashes, since a key with a character that the encoding lacks must still be told from others.
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
    """All commands together."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return its parameters, --help included."""
        return _without_types(super().get_params(ctx))

    def make_context(self, *args: Any, **more: Any) -> Any:
        """Parse the command line, which prints the help and the version."""
        with _checked_stdout():
            return super().make_context(*args, **more)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments; without any, help is what is wanted."""
        return super().parse_args(ctx, args or ["--help"])

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        with _checked_stdout():
            return super().invoke(ctx)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Print what each command does, whole: the libraries' own lists cut it at a line."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, one.get_short_help_str(limit=1000)) for name, one in self.commands.items()])


# A stdout that can't be written.


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
    """Return the exit status of a stdout that can't be written: a closed pipe is quiet, a full disk is told.

    Raises:
        OSError: the error is of a file, or one of ours.
    """
    if error.errno is None or error.filename is not None:
        raise error
    # What is still buffered goes to /dev/null, so that closing stdout at the interpreter's exit doesn't fail. The
    # descriptor is replaced, not sys.stdout: the buffer that is flushed last belongs to the old object.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    with suppress(OSError, ValueError):
        os.dup2(nowhere, sys.stdout.fileno())
    if isinstance(error, BrokenPipeError):
        return _BROKEN_PIPE
    typer.echo(f"shardtree: stdout can't be written: {error.strerror}", err=True)
    return TROUBLE


def printed(work: Callable[[], int]) -> int:
    """Return the exit status of what prints, or that of a stdout that can't be written."""
    try:
        status = work()
        # Here, so that a closed pipe is found now; at the interpreter's exit it would print an error.
        sys.stdout.flush()
    except OSError as error:
        return unprintable(error)
    return status


def complain(command: str, error: Exception) -> None:
    """Print an error's text, with its notes."""
    # Errors of a function that is called as the command is begin with its name already.
    texts = [str(error), *getattr(error, "__notes__", [])]
    text = "\n  ".join(one.removeprefix(f"{command.partition(' ')[0]}: ") for one in texts)
    text = shell_words(text, options_as_typed())
    typer.echo(f"shardtree {command}: " + "\n".join(map(printable, text.split("\n"))), err=True)


# Options.


def _spelling(option: TyperOption) -> str:
    long = next((name for name in option.opts if name.startswith("--")), option.opts[0])
    return long if option.is_flag else f"{long} {option.metavar or 'VALUE'}"


def _without_types(params: list[Any]) -> list[Any]:
    for one in params:
        # A flag takes no value: with a type beside it, people type one.
        if isinstance(one, TyperOption) and one.is_flag and one.metavar is None:
            one.metavar = ""
    return params


# Errors are the library's, and say what to pass to a function: leave_out=['common']. A command's options have the names
# of the keywords that they are passed on as, so the option is found by its name: --leave-out common.

# A keyword with a value, maybe within the options that hold it: options=LoadOptions(allow_pickle=True).
_KEYWORD = re.compile(
    r"(?P<within>(?:\w*options=)?(?:Load|Save)Options\()?\b(?P<name>[a-z]\w*)="
    r"(?P<value>True|False|None|\[[^\[\]]*\]|\([^()]*\)|'[^']*'|\"[^\"]*\"|\d+|\.{3}|(?![\w(]))(?(within)\))"
)
_LEFT = re.compile(r"\b(?:Load|Save)Options\(|\b[Pp]ass [a-z]\w*=")
_NAME = re.compile(r"(?<![\w.'\"/])[a-z]+(?:_[a-z]+)+(?![\w('\"=.]\w*)")


def shell_words(text: str, options: Mapping[str, str]) -> str:
    """Return an error's text with a command's options in the place of Python's keywords.

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
    # `partial_rename` is what --rename calls.
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
    # A value that the option doesn't take is another thing than this keyword's.
    if not flag or is_switch == bool(metavar) or value == "False":
        return match[0]
    if is_switch:
        return flag
    return " ".join(f"{flag} {shlex.quote(one)}" for one in _values(value)) or f"{flag} {metavar}"


def _values(value: str) -> list[str]:
    """Return the values of a literal as they are typed; none where it only stands for some."""
    try:
        read = ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return []
    values = read if isinstance(read, list) else [read]
    # A pair is a format with its version, typed as zarr:3.
    texts = (":".join(map(str, one)) if isinstance(one, tuple) else str(one) for one in values)
    return [] if {None, ...} & set(values) else list(texts)
