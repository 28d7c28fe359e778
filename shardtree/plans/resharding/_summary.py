"""Totals as tables: what each rank sends, gets and keeps, the links that carry most, and what moves in each step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch

from ...errors import plural, shorten
from ...geometry import Column
from .._tables import size_text, table_lines

_SHOWN_RANKS = 32
_SHOWN_LINKS = 5
_SHOWN_STEPS = 32


def totals_table(sent: Mapping[int, int], received: Mapping[int, int], kept: Mapping[int, int]) -> list[str]:
    """Return a line for each rank, up to 32 of them, and one for all.

    Args:
        sent: bytes, by rank; the others have the same ranks.
        received: bytes, by rank.
        kept: bytes, by rank.

    Examples:
        >>> for line in totals_table({0: 8, 1: 0}, {0: 0, 1: 8}, {0: 0, 1: 0}):
        ...     print(line)
        rank  sends  gets  keeps
           0    8 B   0 B    0 B
           1    0 B   8 B    0 B
         all    8 B   8 B    0 B
    """
    columns = (sent, received, kept)
    rows: list[Sequence[str]] = [(str(rank), *(size_text(column[rank]) for column in columns)) for rank in sent]
    every = ("all", *(size_text(sum(column.values())) for column in columns))
    heading, *lines, last = table_lines([("rank", "sends", "gets", "keeps"), *rows, every])
    return [heading, *shorten(lines, _SHOWN_RANKS), last]


def link_lines(links: Mapping[tuple[int, int], int]) -> list[str]:
    """Return the links that carry most, and how many more there are.

    Args:
        links: bytes, by (from, to).

    Examples:
        >>> link_lines({(0, 1): 8, (1, 0): 16})
        ['2 links: 1 → 0 16 B, 0 → 1 8 B']
    """
    largest = sorted(links.items(), key=lambda link: (-link[1], link[0]))
    texts = shorten((f"{one} → {other} {size_text(count)}" for (one, other), count in largest), _SHOWN_LINKS)
    return [f"{plural(len(links), 'link')}: {', '.join(texts)}"] if links else []


def cast_lines(casts: Iterable[tuple[torch.dtype, torch.dtype]]) -> list[str]:
    """Return which dtypes become which, and of how many tensors; no line where none are cast.

    Args:
        casts: before and after, for each tensor that is cast.

    Examples:
        >>> cast_lines([(torch.float32, torch.bfloat16)] * 2 + [(torch.int64, torch.int32)])
        ['3 tensors are cast at the sender: float32 → bfloat16 (2), int64 → int32 (1)']
    """
    count = Counter(casts)
    texts = shorten((f"{cast_text(*pair)} ({number})" for pair, number in count.most_common()), _SHOWN_LINKS)
    total = count.total()
    verb = "is" if total == 1 else "are"
    return [f"{plural(total, 'tensor')} {verb} cast at the sender: {', '.join(texts)}"] if total else []


def cast_text(before: torch.dtype, after: torch.dtype) -> str:
    """Return how a dtype becomes another.

    Examples:
        >>> cast_text(torch.float32, torch.bfloat16)
        'float32 → bfloat16'
    """
    return " → ".join(str(dtype).removeprefix("torch.") for dtype in (before, after))


def steps_table(step: Column, from_rank: Column, to_rank: Column, nbytes: Column) -> list[str]:
    """Return a line for each step, up to 32 of them: what moves, and who sends and gets most.

    Args:
        step: when, ascending, int64 (pieces,).
        from_rank: int64 (pieces,).
        to_rank: int64 (pieces,).
        nbytes: int64 (pieces,).

    Examples:
        >>> for line in steps_table(*map(np.array, ([0, 0, 1], [0, 1, 0], [1, 2, 2], [8, 4, 2]))):
        ...     print(line)
        step  moves  fullest rank
           0   12 B     1 of 12 B
           1    2 B      0 of 2 B
    """
    shown, first = np.unique(step, return_index=True)
    rows = [("step", "moves", "fullest rank")]
    for number, begin, end in zip(shown.tolist()[:_SHOWN_STEPS], first, [*first[1:], step.size], strict=False):
        ranks, place = np.unique(np.stack([from_rank[begin:end], to_rank[begin:end]]), return_inverse=True)
        load = np.zeros(ranks.size, dtype=np.int64)
        np.add.at(load, place.ravel(), np.tile(nbytes[begin:end], 2))
        fullest = int(load.argmax())
        most = f"{ranks[fullest]} of {size_text(int(load[fullest]))}"
        rows.append((str(number), size_text(int(nbytes[begin:end].sum())), most))
    more = shown.size - _SHOWN_STEPS
    return [*table_lines(rows), *([f"and {more} more"] if more > 0 else [])]
