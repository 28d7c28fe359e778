"""What the demo prints: where the state comes from, who wrote and read what, the layouts, and the findings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..errors import plural
from ..mapping import ShardedTensor
from ._output import lengths, rate, size
from ._picture import Picture, blank, draw, filled
from ._ranks import SENTENCES, Embeddings, Loaded, Saved
from ._verdict import Finding

_COLOURS = ("cyan", "magenta", "yellow", "green", "blue", "red", "bright_cyan", "bright_magenta")
_WIDTH, _HEIGHT = 28, 12  # of a picture, in characters


def show_heading(console: Console, text: str) -> None:
    """Print a section's heading."""
    console.print()
    console.print(Text(text, style="bold"))


def show_facts(console: Console, facts: Mapping[str, str]) -> None:
    """Print names and what they are, in two columns."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    for name, fact in facts.items():
        table.add_row(Text(name), Text(fact))
    console.print(table)


def show_saved(console: Console, saved: Sequence[Saved], files: dict[str, int]) -> None:
    """Print which rank wrote how much, to which file, and how fast all of them were.

    Args:
        console: where to.
        saved: by rank.
        files: length in bytes of each file, by name.
    """
    table = _table("rank", "holds", "wrote", "file")
    for rank, report in enumerate(saved):
        own = [name for name in files if name.startswith(f"{rank:05}-of-")]
        table.add_row(_rank(rank), size(report.held), size(report.written), Text("\n".join(own), style="dim"))
    others = {name: length for name, length in reversed(files.items()) if "-of-" not in name}
    table.add_row(_rank(0), "", size(sum(others.values())), Text("\n".join(others), style="dim"))
    table.add_section()
    held, written = sum(report.held for report in saved), sum(files.values())
    seconds = max(report.ended for report in saved) - min(report.began for report in saved)
    table.add_row("all", size(held), size(written), _speed(written, seconds))
    console.print(table)


def show_loaded(console: Console, loaded: Sequence[Loaded]) -> None:
    """Print which rank read how much, from how many files, and how fast all of them were."""
    table = _table("rank", "holds", "read", "files")
    for rank, report in enumerate(loaded):
        table.add_row(_rank(rank), size(report.held), size(report.read.bytes_read), f"{report.read.files}")
    held, read = sum(report.held for report in loaded), sum(report.read.bytes_read for report in loaded)
    seconds = max(report.ended for report in loaded) - min(report.began for report in loaded)
    table.add_section()
    table.add_row("all", size(held), size(read), _speed(read, seconds))
    console.print(table)


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


def show_findings(console: Console, findings: Sequence[Finding]) -> None:
    """Print what holds and what doesn't."""
    for finding in findings:
        mark = ("✓ ", "bold green") if finding.holds else ("✗ ", "bold red")
        console.print(Text.assemble(mark, finding.text))
        for detail in finding.details:
            console.print(Text(f"    {detail}", style="red"))


def show_similarities(console: Console, embeddings: Embeddings) -> None:
    """Print how close in meaning the encoder finds sentences to the first one, with either weights."""
    table = _table("likeness to the first sentence", "original", "reloaded")
    columns = ((vectors @ vectors[0]).tolist() for vectors in (embeddings.original, embeddings.reloaded))
    for sentence, *likeness in zip(SENTENCES, *columns, strict=True):
        table.add_row(Text(sentence), *(f"{value:.6f}" for value in likeness))
    console.print(table)


def _table(*names: str) -> Table:
    """Return an empty table; the columns in the middle hold numbers."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), show_edge=False)
    for name in names:
        numbers = name in ("holds", "wrote", "read", "original", "reloaded")
        table.add_column(name, justify="right" if numbers else "left", no_wrap=True)
    return table


def _speed(count: int, seconds: float) -> Text:
    return Text(f"{rate(count, seconds)}, in {seconds:.2f} s", style="bold")


def _rank(rank: int) -> Text:
    return Text(f" {rank} ", style=_style(rank))


def _style(rank: int) -> str:
    return f"black on {_COLOURS[rank % len(_COLOURS)]}"


def _height(*layouts: Sequence[ShardedTensor]) -> int:
    """Return enough lines for every piece to have one."""
    return max(_HEIGHT, *(len({shard.global_offset[0] for shard in shards}) for shards in layouts))


def _painted(console: Console, picture: Picture) -> Text:
    """Return a picture in the ranks' colours, or where there are none filled with their digits."""
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
