"""`shardtree picture`, and pictures in a terminal, in colours where it has them."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from ..checkpoint import open_checkpoint
from ..display import draw
from ..pictures import COLOURS, Picture, picture_lines
from ..storage import Directory
from ..strategies import LoadOptions
from ._output import Output, printable


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
    show_picture(console, drawing.picture)
    return 0


def show_picture(console: Console, picture: Picture) -> None:
    """Print a picture, in colours where the console has them, else with a mark for each."""
    is_plain = console.color_system is None
    for line in picture_lines(picture, console.width, filled=is_plain):
        spans = ((span.text, f"black on {COLOURS[span.tone]}" if span.tone and not is_plain else "") for span in line)
        console.print(Text.assemble(*spans))
