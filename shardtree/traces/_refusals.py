"""Refusals of a recording: they are remembered, since code may catch the error and do something else instead."""

from __future__ import annotations

import re
import sys
from collections.abc import Collection
from typing import NoReturn

import torch

from ..errors import TraceError, error_text

_OURS = (__file__.removesuffix("_refusals.py"), *torch.__path__)


class RunRefusals:
    """The refusals of one run."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}  # the operation's name, by what is said of it and where that was

    def refuse(self, name: str, what: str, fix: str) -> NoReturn:
        """Raise the error for something that can't be recorded.

        Args:
            name: Name of the operation, as `check_caught` takes it.
            what: Sentence about it.
            fix: Advice for the caller.

        Raises:
            TraceError: Always; names the caller's line.
        """
        line = caller()
        self._names.setdefault(f"{what}, {line}", name)
        raise TraceError(error_text(f"trace: {what}", found=line, fix=fix))

    def check_caught(self, may_catch: Collection[str]) -> None:
        """Raise if code that has ended caught refusals.

        Args:
            may_catch: Names of operations whose refusals it may catch.

        Raises:
            TraceError: Names each other one, with its line.
        """
        if caught := self._caught(may_catch):
            names = ", ".join(map(repr, dict.fromkeys(caught.values())))
            fix = f"Let them through; or pass may_catch=[{names}] if what the code does instead is meant."
            raise TraceError(error_text("trace: the code caught refusals and went on", offenders=caught, fix=fix))

    def check_raised(self, error: Exception, may_catch: Collection[str]) -> None:
        """Raise if code that has raised an error of another kind caught refusals before, as `load_state_dict` does.

        Args:
            error: What the code raised.
            may_catch: Names of operations whose refusals it may catch.

        Raises:
            TraceError: Names each other one, with its line.
        """
        if caught := self._caught(may_catch):
            what = f"trace: the code caught refusals and raised {type(error).__name__}"
            raise TraceError(error_text(what, offenders=caught, fix="Mend what is refused first.")) from error

    def _caught(self, may_catch: Collection[str]) -> dict[str, str]:
        return {
            text: name
            for text, name in self._names.items()
            if not {name, *re.split(", | or ", name)}.intersection(may_catch)
        }


def caller() -> str:
    """Return the line of the code that is traced."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back
    return f"at {frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
