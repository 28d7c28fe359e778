"""Refusals: errors for operations that a trace can't record. They are remembered, since code may catch them."""

from __future__ import annotations

import re
import sys
from collections.abc import Collection
from typing import NoReturn

import torch

from ..errors import TraceError, error_text

_OURS = (__file__.removesuffix("_refusals.py"), *torch.__path__)


class RunRefusals:
    """The refusals of one run: errors for operations of the traced code that can't be recorded.

    Code may catch such an error and go on with a fallback. The trace would then contain the fallback by accident.
    """

    def __init__(self) -> None:
        self._names: dict[str, str] = {}  # operations' names, by message and caller's line

    def refuse(self, name: str, what: str, fix: str) -> NoReturn:
        """Raise the error for an operation that can't be recorded.

        Args:
            name: Name of the operation, as `may_catch` would list it.
            what: Sentence about the operation, for the heading.
            fix: Advice for the caller.

        Raises:
            TraceError: always; the error names the caller's line.
        """
        line = caller()
        self._names.setdefault(f"{what}, {line}", name)
        raise TraceError(error_text(f"trace: {what}", found=line, fix=fix))

    def check_caught(self, may_catch: Collection[str]) -> None:
        """Raise if the code caught refusals that it may not catch, and then returned.

        Args:
            may_catch: Names of operations whose refusals the code may catch.

        Raises:
            TraceError: other refusals were caught; the error names each, with its line.
        """
        if caught := self._caught(may_catch):
            names = ", ".join(map(repr, dict.fromkeys(caught.values())))
            fix = f"Let these errors propagate, or pass may_catch=[{names}] to trace the code's fallback."
            raise TraceError(error_text("trace: the code caught trace errors and went on", offenders=caught, fix=fix))

    def check_raised(self, error: Exception, may_catch: Collection[str]) -> None:
        """Raise if the code caught refusals that it may not catch, and then raised an error of its own.

        torch's `load_state_dict` does this: it collects all errors and raises one.

        Args:
            error: Error that the code raised.
            may_catch: Names of operations whose refusals the code may catch.

        Raises:
            TraceError: other refusals were caught; the error names each, with its line.
        """
        if caught := self._caught(may_catch):
            heading = f"trace: the code caught trace errors, then raised {type(error).__name__}"
            fix = f"Replace these operations first: {type(error).__name__} may be a consequence of their errors."
            raise TraceError(error_text(heading, offenders=caught, fix=fix)) from error

    def _caught(self, may_catch: Collection[str]) -> dict[str, str]:
        return {
            text: name
            for text, name in self._names.items()
            if not {name, *re.split(", | or ", name)}.intersection(may_catch)
        }


def caller() -> str:
    """Return the present line of the traced code, for a message."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back
    return f"at {frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
