"""A picture of how a matrix lies on ranks, as characters: pure, so that colour is the printer's business."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..mapping import ShardedTensor

_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"

Box = tuple[int, int, int, int]  # first row, first column, one past the last row, one past the last column


@dataclass(frozen=True, slots=True)
class Picture:
    """A matrix drawn in character cells.

    Attributes:
        owner: the rank that each cell belongs to, by line; None outside of every shard.
        labels: (line, column, text) of each rank's name, in the middle of its block, where there is room.
    """

    owner: tuple[tuple[int | None, ...], ...]
    labels: tuple[tuple[int, int, str], ...]


def draw(shards: Sequence[ShardedTensor], *, width: int, height: int) -> Picture:
    r"""Return a picture of one matrix.

    Args:
        shards: for each rank, its shard of the same global tensor of two axes.
        width: of the picture, in characters.
        height: of the picture, in lines.

    Examples:
        >>> import torch
        >>> halves = [ShardedTensor.from_rank_offsets("w", torch.zeros(4, 2), (1, rank, 2)) for rank in range(2)]
        >>> print(*filled(draw(halves, width=20, height=3)), sep="\n")
        00000000001111111111
        0 rank 0 01 rank 1 1
        00000000001111111111
    """
    boxes = [_box(shard, width, height) for shard in shards]
    owner = tuple(tuple(_owner(boxes, line, column) for column in range(width)) for line in range(height))
    # Where replicas lie on each other, only the first can be seen.
    seen = {rank for ranks in owner for rank in ranks}
    return Picture(owner, tuple(_label(rank, box) for rank, box in enumerate(boxes) if rank in seen))


def filled(picture: Picture) -> tuple[str, ...]:
    """Return a picture's lines where a rank's digit fills its block: readable without colour."""
    return _labelled(["".join(map(_digit, ranks)) for ranks in picture.owner], picture)


def blank(picture: Picture) -> tuple[str, ...]:
    """Return a picture's lines with nothing but the ranks' names, to be put on coloured ground."""
    return _labelled([" " * len(ranks) for ranks in picture.owner], picture)


def _labelled(lines: list[str], picture: Picture) -> tuple[str, ...]:
    for line, column, label in picture.labels:
        lines[line] = lines[line][:column] + label + lines[line][column + len(label) :]
    return tuple(lines)


def _box(shard: ShardedTensor, width: int, height: int) -> Box:
    rows, columns = shard.global_shape
    (row, column), (row_count, column_count) = shard.global_offset, shard.local_shape
    return (
        round(row * height / rows),
        round(column * width / columns),
        round((row + row_count) * height / rows),
        round((column + column_count) * width / columns),
    )


def _owner(boxes: Sequence[Box], line: int, column: int) -> int | None:
    for rank, (top, left, bottom, right) in enumerate(boxes):
        if top <= line < bottom and left <= column < right:
            return rank
    return None


def _digit(rank: int | None) -> str:
    return " " if rank is None else _DIGITS[rank % len(_DIGITS)]


def _label(rank: int, box: Box) -> tuple[int, int, str]:
    """Return the line and column at which a rank's name stands in its block, and the name, empty if it has no room."""
    top, left, bottom, right = box
    room = right - left if bottom > top else 0
    label = next((text for text in (f" rank {rank} ", f" {rank} ") if len(text) <= room), "")
    return (top + bottom - 1) // 2, left + (room - len(label)) // 2, label
