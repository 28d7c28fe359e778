"""`shardtree picture`, and the layouts in the demo: pictures in a terminal, in colours where it has them."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..checkpoint import open_checkpoint
from ..display import draw
from ..errors import plural
from ..layouts import tree_columns
from ..mapping import ShardedTensor
from ..pictures import COLOURS, TONES, Plane, Spans, cell_lines, layout_picture, picture_lines
from ..storage import Directory
from ..strategies import LoadOptions
from ._output import Output, lengths, printable

_WIDTH, _HEIGHT = 28, 12


def run_picture(checkpoint: Directory, key: str | None, out: str | None, *, allow_pickle: bool) -> int:
    """Draw which file holds which part of a checkpoint's tensors, print it or write it, and return the exit status.

    Args:
        checkpoint: a path or URL.
        key: the tensor's; None for the largest ones.
        out: the file to write, by its ending an SVG, a page of HTML or text; None to print.
        allow_pickle: whether pickled values may be unpickled.

    Raises:
        CheckpointingException: it can't be opened, has no such tensor, or the file can't be written.
    """
    drawing = draw(open_checkpoint(checkpoint, options=LoadOptions(allow_pickle=allow_pickle)), key)
    console = Output()
    if out is not None:
        drawing.save(out)
        console.print(Text(f"written: {printable(out)}"))
        return 0
    is_plain = console.color_system is None
    for line in picture_lines(drawing.picture, console.width, filled=is_plain):
        console.print(_painted(line, is_plain=is_plain))
    return 0


def show_layouts(console: Console, before: Sequence[ShardedTensor], after: Sequence[ShardedTensor]) -> None:
    """Print how a matrix lay on the ranks that saved it, and how it lies on those that loaded it."""
    table = Table.grid(padding=(0, 1))
    titles = (f"saved by {plural(len(before), 'rank')}", f"loaded by {plural(len(after), 'rank')}")
    table.add_row(Text(titles[0], style="dim"), "", Text(titles[1], style="dim"))
    height = max(_HEIGHT, *(len({shard.global_offset[0] for shard in shards}) for shards in (before, after)))
    left, right = (_layout(console, shards, height) for shards in (before, after))
    arrow = Text("\n" * (height // 2) + " → ")
    table.add_row(left, arrow, right)
    table.add_row(Text(_cut(before), style="dim"), "", Text(_cut(after), style="dim"))
    console.print(table)


def _layout(console: Console, shards: Sequence[ShardedTensor], height: int) -> Text:
    plane = layout_picture(tree_columns(shards)).rows[0][0]
    assert isinstance(plane, Plane), "a layout's picture begins with the plane of its tensor"
    is_plain = console.color_system is None
    lines = cell_lines(plane, _WIDTH, height, filled=is_plain)
    return Text("\n").join(_painted(line, is_plain=is_plain) for line in lines)


def rank_label(rank: int) -> Text:
    """Return a rank's number on its colour."""
    return Text(f" {rank} ", style=_style(f"t{rank % TONES}"))


def _painted(line: Spans, *, is_plain: bool) -> Text:
    return Text.assemble(*((span.text, "" if is_plain else _style(span.tone)) for span in line))


def _style(tone: str) -> str:
    return f"black on {COLOURS[tone]}" if tone else ""


def _cut(shards: Sequence[ShardedTensor]) -> str:
    axis = next((axis for axis in (0, 1) if len({shard.global_offset[axis] for shard in shards}) > 1), None)
    if axis is None:
        return "whole on every rank"
    return f"{('rows', 'columns')[axis]}: {lengths([shard.local_shape[axis] for shard in shards])}"
