"""Public signatures: short enough to read."""

from __future__ import annotations

import inspect

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
