"""Public signatures: short enough to read, and those of the root as they were released."""

from __future__ import annotations

import inspect
import re
from enum import Enum
from pathlib import Path
from textwrap import fill

import pytest

import shardtree as st
from shardtree.strategies import default_strategies

SCREEN = 900  # characters


def signature(value: object) -> str:
    """Return a function's or constructor's signature as `help` shows it, nothing for what isn't called."""
    try:
        return str(inspect.signature(value)) if callable(value) else ""
    except (TypeError, ValueError):  # an alias of a type, or an exception
        return ""


@pytest.mark.parametrize("name", st.__all__)
def test_a_signature_fits_on_a_screen(name: str) -> None:
    assert len(signature(getattr(st, name))) < SCREEN


def test_a_long_signature_is_found() -> None:
    def planted(tree: object, strategies: object = dict(default_strategies)) -> None:
        """Show the whole table as its default."""

    assert len(signature(planted)) > SCREEN
    assert len(signature(st.load)) > 500


# The root's names are frozen: tests/root_names.txt has them, with their parameters and defaults.

FROZEN = Path(__file__).with_name("root_names.txt")


def outline(value: object) -> str:
    """Return the parameters of a function or constructor with their defaults, an Enum's members, else the kind."""
    if isinstance(value, type) and issubclass(value, Enum):
        return f": {', '.join(value.__members__)}"
    if isinstance(value, type) and issubclass(value, Exception):
        return f": {', '.join(base.__name__ for base in value.__bases__)}"
    if not signature(value) or getattr(value, "_is_protocol", False):
        return ""
    asked = inspect.signature(value)  # type: ignore[arg-type]
    plain = [each.replace(annotation=each.empty) for each in asked.parameters.values()]
    text = str(asked.replace(parameters=plain, return_annotation=asked.empty))
    return re.sub(r"<(?:function )?([\w.]+)[^<>]*>", r"<\1>", text)


def listed() -> str:
    """Return the root's names as root_names.txt has them."""
    names = (f"{name}{outline(getattr(st, name))}" for name in st.__all__)
    return "".join(fill(name, 120, subsequent_indent="    ", break_on_hyphens=False) + "\n" for name in names)


def test_the_root_has_the_names_and_signatures_that_were_released() -> None:
    assert listed().split("\n") == FROZEN.read_text().split("\n"), (
        "The names and signatures of 0.1.0 are promised: a call that worked goes on working. Where a change adds only "
        "(a name, a parameter with a default that comes last or goes by keyword), say it in CHANGELOG.md and write the "
        "list anew: python -m tests.test_signatures. Anything else breaks callers: keep the old form beside the new."
    )


if __name__ == "__main__":
    FROZEN.write_text(listed())
