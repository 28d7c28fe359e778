"""A problem of a layout as a value, and how boxes, flat ranges and ranks are written in it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

from ...errors import TreePath, rank_text, render_path

_SHOWN_OF_ONE = 3


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with how ranks share a state.

    Attributes:
        key: the key of the tensor or object; of a common value, its path.
        ranks: who is concerned, ascending.
        what: what is wrong, in words.
        box: where in the global tensor or array of objects, as slices; None where it isn't about a place.
        flat: which elements of the flattened box, where shards are flat ranges; None for all of it.
        fix: what to do about it, in words; nothing where that isn't known.
    """

    key: str | TreePath
    ranks: tuple[int, ...]
    what: str
    box: tuple[slice, ...] | None = None
    flat: slice | None = None
    fix: str = ""

    def __str__(self) -> str:
        name = render_path(self.key) if isinstance(self.key, tuple) else repr(self.key)
        holders = f" ({rank_text(self.ranks)})" if self.ranks else ""
        return f"{name}{holders}: {self.what}"


def problem_lines(problems: Iterable[Problem]) -> list[str]:
    """Return problems as lines, of which each key has a few, so that one key doesn't hide the others.

    Examples:
        >>> problem_lines([Problem(key, (0,), str(n)) for key in "ab" for n in range(5)])[2:5]
        ["'a' (rank 0): 2", "'a': and 2 more", "'b' (rank 0): 0"]
    """
    lines = []
    for _, of_one in groupby(problems, key=lambda problem: problem.key):
        same = list(of_one)
        lines += list(map(str, same[:_SHOWN_OF_ONE]))
        more = len(same) - _SHOWN_OF_ONE
        lines += [str(Problem(same[0].key, (), f"and {more} more"))] if more > 0 else []
    return lines


def place_text(box: tuple[slice, ...], flat: slice | None = None) -> str:
    """Return a box, or a flat range of it, in words.

    Examples:
        >>> place_text((slice(0, 2), slice(3, 6))), place_text((slice(0, 4),), slice(1, 3))
        ('[0:2, 3:6]', 'elements [1:3] of [0:4]')
    """
    spans = "[" + ", ".join(f"{span.start}:{span.stop}" for span in box) + "]"
    return spans if flat is None else f"elements [{flat.start}:{flat.stop}] of {spans}"


def holder_text(holders: Iterable[tuple[int, tuple[slice, ...], slice | None]], more: int = 0) -> str:
    """Return who holds what.

    Args:
        holders: rank, box and flat range of each shard.
        more: how many there are that aren't named.

    Examples:
        >>> holder_text([(0, (slice(0, 2),), None), (3, (slice(1, 4),), slice(0, 2))], more=5)
        'rank 0 [0:2], rank 3 elements [0:2] of [1:4], and 5 more'
    """
    texts = [f"rank {rank} {place_text(box, flat)}" for rank, box, flat in holders]
    return ", ".join([*texts, *([f"and {more} more"] if more else [])])
