"""How Hypothesis and IPython show our values: by their own repr, not by walking through dataclass fields."""

from __future__ import annotations

from typing import Any


def pretty_repr(value: Any, printer: Any, cycle: bool) -> None:
    """Print a value's repr: as a class's ``_repr_pretty_``, which Hypothesis asks before it prints fields.

    Examples:
        >>> from hypothesis.vendor.pretty import pretty
        >>> from shardtree.testing import Piece
        >>> pretty(Piece(0, (2,), (3,)))
        'Piece(0, (2,), (3,))'
    """
    printer.text(repr(value))
