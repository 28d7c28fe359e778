"""Offences: faults as data. Their records differ in fields, but print and sort alike."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Protocol

from ..errors import TreePath, error_text, render_path

_SHOWN_OF_ONE_KEY = 3


class Offence(Protocol):
    """A fault: a frozen record that can be pickled, so that ranks can send it to each other.

    Records also have fields of their own, for code that inspects them.
    """

    @property
    def key(self) -> str | TreePath:
        """Key of the tensor or object; for other faults a path, or the name of a file, an output or an error."""

    @property
    def where(self) -> str:
        """Part of the key's object, or the ranks concerned, as text; empty if the whole object is meant."""

    @property
    def what(self) -> str:
        """The fault, as text."""

    @property
    def fix(self) -> str:
        """Advice for the caller, as sentences; empty if there is none."""


def offence_text(offence: Offence) -> str:
    """Return an offence as one line.

    Examples:
        >>> from shardtree.plans import Gap
        >>> offence_text(Gap("w", (0, 2), 3, 4))
        "'w' at (0, 2): 3 of 4 elements are stored"
    """
    return f"{' '.join(filter(None, (_name(offence), offence.where)))}: {offence.what}"


def _name(offence: Offence) -> str:
    return render_path(offence.key) if isinstance(offence.key, tuple) else repr(offence.key)


def by_key(offence: Offence) -> str:
    """Return the key by which offences are sorted; offences of one key keep their order."""
    return str(offence.key)


def offence_lines(offences: Iterable[Offence]) -> list[str]:
    """Return offences as lines, at most a few for each key, so that one key doesn't hide the others.

    Examples:
        >>> from shardtree.layouts import Problem
        >>> offence_lines([Problem(key, (0,), str(n)) for key in "ab" for n in range(5)])[2:5]
        ["'a' (rank 0): 2", "'a': and 2 more", "'b' (rank 0): 0"]
    """
    lines = []
    for _, group in groupby(offences, key=by_key):
        same = list(group)
        lines += list(map(str, same[:_SHOWN_OF_ONE_KEY]))
        more = len(same) - _SHOWN_OF_ONE_KEY
        lines += [f"{_name(same[0])}: and {more} more"] if more > 0 else []
    return lines


def offences_text(heading: str, offences: Sequence[Offence], *fixes: str) -> str:
    """Return the text of an error: its offences, their advice without repetitions, and further advice.

    Args:
        heading: Text that tells what is wrong with what.
        offences: All offences; at most ten lines are shown.
        fixes: Further advice.

    Examples:
        >>> from shardtree.layouts import Problem
        >>> print(offences_text("save", [Problem("w", (0,), "is stored twice", fix="Store it once.")]))
        save
          'w' (rank 0): is stored twice
          Store it once.
    """
    advice = dict.fromkeys([*(offence.fix for offence in offences if offence.fix), *fixes])
    return error_text(heading, offenders=offence_lines(offences), fix="\n  ".join(advice))
