"""Plans of buffers as lines of text."""

from __future__ import annotations

from collections.abc import Sequence

from ...errors import plural, shorten

_SHOWN = 32


def plan_lines(
    parameters: int, padding: int, buckets: Sequence[Sequence[int]], held: Sequence[Sequence[int]]
) -> list[str]:
    """Return a plan as two tables: its buckets, and what each rank has; up to 32 lines of each.

    Args:
        parameters: how many there are.
        padding: elements of no parameter.
        buckets: start, stop, parameters, elements of them, and elements of one rank's slice.
        held: for each rank, how many parameters it has something of, and how many elements of them.

    Examples:
        >>> for line in plan_lines(2, 1, [(0, 10, 2, 9, 5)], [(1, 5), (2, 4)]):
        ...     print(line)
        2 parameters of 9 elements, 1 of padding (10.0 %): 1 bucket, cut for 2 ranks
        bucket  from  to  parameters  elements  padding  a rank's slice
             0     0  10           2         9        1               5
        rank  parameters  elements  padding
           0           1         5        0
           1           2         4        1
    """
    size = buckets[-1][1] if buckets else 0
    share = f"{100 * padding / max(size, 1):.1f} %"
    counts = f"{plural(parameters, 'parameter')} of {size - padding:,} elements, {padding:,} of padding ({share})"
    head = f"{counts}: {plural(len(buckets), 'bucket')}, cut for {plural(len(held), 'rank')}"
    own = sum(bucket[4] for bucket in buckets)
    spans = [(n, at, to, count, full, to - at - full, part) for n, (at, to, count, full, part) in enumerate(buckets)]
    ranks = [(rank, count, elements, own - elements) for rank, (count, elements) in enumerate(held)]
    lines = _lines(("bucket", "from", "to", "parameters", "elements", "padding", "a rank's slice"), spans)
    return [head, *(lines if buckets else []), *_lines(("rank", "parameters", "elements", "padding"), ranks)]


def place_lines(rows: Sequence[tuple[int, slice, slice]]) -> list[str]:
    """Return who has what of a parameter, up to 32 lines.

    Args:
        rows: rank, slice of the parameter, slice of the rank's own slice of the bucket.

    Examples:
        >>> place_lines([(1, slice(0, 3), slice(1, 4))])
        ['rank  of the parameter  of its slice', '   1             [0:3]         [1:4]']
    """
    texts = [(rank, _text(flat), _text(taken)) for rank, flat, taken in rows]
    return _lines(("rank", "of the parameter", "of its slice"), texts)


def _text(part: slice) -> str:
    return f"[{part.start}:{part.stop}]"


def _lines(head: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    cells = [head, *([f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]
    return [lines[0], *shorten(lines[1:], _SHOWN)]
