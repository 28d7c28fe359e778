"""Offences: faults as records, which errors print as lines. Each kind of fault has its own class of records."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Protocol

from ..errors import TreePath, error_text, render_path

_SHOWN_OF_ONE_KEY = 3


class Offence(Protocol):
    """Protocol of a fault: a frozen record with texts for its key, location, description and fix.

    Ranks send records to each other, so they can be pickled. A class of records may have further fields, for code that
    inspects them.
    """

    @property
    def key(self) -> str | TreePath:
        """Key of the tensor or object; for other faults a path, or the name of a file, an output or an error."""

    @property
    def where(self) -> str:
        """Affected part of the tensor or object, or the affected ranks, as text; empty if all of it is affected."""

    @property
    def what(self) -> str:
        """Description of the fault, without its key and location."""

    @property
    def fix(self) -> str:
        """Advice for the caller, as sentences; empty if there is none."""


def offence_text(offence: Offence) -> str:
    """Return one line for an offence (a fault's record), with its key, location and description.

    Examples:
        >>> from shardtree.plans import Gap
        >>> offence_text(Gap("w", (0, 2), 3, 4))
        "'w' at (0, 2): 3 of 4 elements are stored"
    """
    return f"{' '.join(filter(None, (_name(offence), offence.where)))}: {offence.what}"


def _name(offence: Offence) -> str:
    return render_path(offence.key) if isinstance(offence.key, tuple) else repr(offence.key)


def by_key(offence: Offence) -> str:
    """Return the key of an offence (a fault's record) as text, to sort by; offences of one key keep their order."""
    return str(offence.key)


def offence_lines(offences: Iterable[Offence]) -> list[str]:
    """Return one line for each offence, but only the first few of each key and then a count of its other offences.

    One key with many offences then does not hide the other keys. Offences of one key must be adjacent.

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
    """Return an error text: the heading, a line for each offence, and advice without repetitions.

    Args:
        heading: First line of the text, a statement of the fault.
        offences: All offences; at most ten lines are shown.
        fixes: Advice that follows the offences' own.

    Examples:
        >>> from shardtree.layouts import Problem
        >>> print(offences_text("save", [Problem("w", (0,), "is stored twice", fix="Store it once.")]))
        save
          'w' (rank 0): is stored twice
          Store it once.
    """
    advice = dict.fromkeys([*(offence.fix for offence in offences if offence.fix), *fixes])
    return error_text(heading, offenders=offence_lines(offences), fix="\n  ".join(advice))
