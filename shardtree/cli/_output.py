"""Where commands print to, and how they end: exit statuses, errors as text, and a reader that has heard enough."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Literal, NoReturn

import typer
from rich.console import Console

from ..errors import CheckpointingException

TROUBLE = 2
"""The exit status of what couldn't be done."""

_NOBODY_READS, _INTERRUPTED = 141, 130  # what a shell shows for programs that SIGPIPE and SIGINT ended

_PICKLE_WARNING = (
    "warning: --allow-pickle: loading pickled values can run any code that the checkpoint's writer put there"
)

_ASCII = str.maketrans({"\N{MULTIPLICATION SIGN}": "x", "─": "-", "✓": "+", "✗": "!", "→": ">"})


class Output(Console):
    """A console that is plain wherever it isn't shown to a person, and never cuts a line."""

    def __init__(self, *, stderr: bool = False) -> None:
        colours: Literal["auto"] | None = None if os.environ.get("NO_COLOR") else "auto"
        super().__init__(
            stderr=stderr, color_system=colours, highlight=False, markup=False, emoji=False, soft_wrap=True
        )

    def on_broken_pipe(self) -> None:
        """Leave it to `finish`."""
        raise BrokenPipeError


def finish(command: str, work: Callable[[], int], *, interrupted: str = "interrupted") -> NoReturn:
    """Leave with the exit status that the work returns; a `CheckpointingException` becomes text and status 2.

    Args:
        command: its name.
        work: prints, and returns the status.
        interrupted: what is said on Ctrl-C.
    """
    try:
        for stream in (sys.stdout, sys.stderr):  # a terminal may not know box characters, or those in a key
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
        status = work()
        sys.stdout.flush()
    except CheckpointingException as error:
        complain(command, error)
        status = TROUBLE
    except BrokenPipeError:
        _read_no_more()
        status = _NOBODY_READS
    except KeyboardInterrupt:
        typer.echo(f"shardtree {command}: {interrupted}", err=True)
        status = _INTERRUPTED
    raise typer.Exit(status)


def complain(command: str, error: Exception) -> None:
    """Print an error's text, with its notes."""
    text = "\n".join([str(error), *getattr(error, "__notes__", [])]).removeprefix(f"{command}: ")
    typer.echo(f"shardtree {command}: " + "\n".join(map(printable, text.split("\n"))), err=True)


def warn_of_pickle(allowed: bool) -> None:
    """Print what `--allow-pickle` means, where it is given."""
    if allowed:
        typer.echo(_PICKLE_WARNING, err=True)


def printable(text: str) -> str:
    r"""Return text on one line and without what would steer a terminal: such characters as Python writes them.

    Examples:
        >>> printable("a.b ü"), printable("a\x1b[2J\n")
        ('a.b ü', 'a\\x1b[2J\\n')
    """
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode("ascii") for one in text)


def spellable(console: Console) -> Callable[[str], str]:
    """Return what replaces our own signs where the console's encoding lacks them."""
    if console.encoding.lower().startswith("utf"):
        return lambda words: words
    return lambda words: words.translate(_ASCII)


def json_text(document: Mapping[str, Any]) -> str:
    """Return a document as JSON in ASCII, every name of it and every item of its lists on a line of its own.

    Examples:
        >>> print(json_text({"sound": False, "damage": [{"file": "a"}, {"file": "b"}], "more": []}))
        {
        "sound": false,
        "damage": [
        {"file": "a"},
        {"file": "b"}
        ],
        "more": []
        }
    """
    return "{\n" + ",\n".join(f"{json.dumps(name)}: {_value(value)}" for name, value in document.items()) + "\n}"


def _value(value: Any) -> str:
    if isinstance(value, list) and value:
        return "[\n" + ",\n".join(map(json.dumps, value)) + "\n]"
    return json.dumps(value)


def _read_no_more() -> None:
    """Let what is left in the buffers go nowhere, so that closing them at the end fails no more."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    with suppress(OSError, ValueError):
        os.dup2(nowhere, sys.stdout.fileno())
