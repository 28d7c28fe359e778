"""Pictures of how a matrix lies on ranks: in the ranks' colours, or where there are none in their digits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..errors import plural
from ..mapping import ShardedTensor
from ._output import lengths

_COLOURS = ("cyan", "magenta", "yellow", "green", "blue", "red", "bright_cyan", "bright_magenta")
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
_WIDTH, _HEIGHT = 28, 12  # of a picture, in characters

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
    # Replicas cover each other: only the first one's name is written.
    seen = {rank for ranks in owner for rank in ranks}
    return Picture(owner, tuple(_label(rank, box) for rank, box in enumerate(boxes) if rank in seen))


def filled(picture: Picture) -> tuple[str, ...]:
    """Return a picture's lines where a rank's digit fills its block: readable without colour."""
    return _labelled(["".join(map(_digit, ranks)) for ranks in picture.owner], picture)


def blank(picture: Picture) -> tuple[str, ...]:
    """Return a picture's lines with nothing but the ranks' names, for a coloured background."""
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
    """Return the line and column of a rank's name in its block, and the name, empty if it has no room."""
    top, left, bottom, right = box
    room = right - left if bottom > top else 0
    label = next((text for text in (f" rank {rank} ", f" {rank} ") if len(text) <= room), "")
    return (top + bottom - 1) // 2, left + (room - len(label)) // 2, label


# Printing it.


def show_layouts(console: Console, before: Sequence[ShardedTensor], after: Sequence[ShardedTensor]) -> None:
    """Print how a matrix lay on the ranks that saved it, and how it lies on those that loaded it."""
    table = Table.grid(padding=(0, 1))
    titles = (f"saved by {plural(len(before), 'rank')}", f"loaded by {plural(len(after), 'rank')}")
    table.add_row(Text(titles[0], style="dim"), "", Text(titles[1], style="dim"))
    pictures = [draw(shards, width=_WIDTH, height=_height(before, after)) for shards in (before, after)]
    left, right = (_painted(console, picture) for picture in pictures)
    arrow = Text("\n" * (len(pictures[0].owner) // 2) + " → ")
    table.add_row(left, arrow, right)
    table.add_row(Text(_cut(before), style="dim"), "", Text(_cut(after), style="dim"))
    console.print(table)


def rank_label(rank: int) -> Text:
    """Return a rank's number on its colour."""
    return Text(f" {rank} ", style=_style(rank))


def _style(rank: int) -> str:
    return f"black on {_COLOURS[rank % len(_COLOURS)]}"


def _height(*layouts: Sequence[ShardedTensor]) -> int:
    """Return enough lines for every piece to have one."""
    return max(_HEIGHT, *(len({shard.global_offset[0] for shard in shards}) for shards in layouts))


def _painted(console: Console, picture: Picture) -> Text:
    """Return a picture in the ranks' colours, or filled with their digits where the console has no colours."""
    if console.color_system is None:
        return Text("\n".join(filled(picture)))
    lines = []
    for owners, characters in zip(picture.owner, blank(picture), strict=True):
        text = Text(characters)
        for column, rank in enumerate(owners):
            if rank is not None:
                text.stylize(_style(rank), column, column + 1)
        lines.append(text)
    return Text("\n").join(lines)


def _cut(shards: Sequence[ShardedTensor]) -> str:
    axis = next((axis for axis in (0, 1) if len({shard.global_offset[axis] for shard in shards}) > 1), None)
    if axis is None:
        return "whole on every rank"
    return f"{('rows', 'columns')[axis]}: {lengths([shard.local_shape[axis] for shard in shards])}"
