"""Picture: an immutable description of a drawing, without a size in pixels or characters; renderers choose the size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

Tone: TypeAlias = str
"""Fill of an area: "t0" to "t7" distinguish neighbours, "h1" to "h8" show amounts, and five others have a meaning of
their own: "hole", "overlap", "kept", "goes", "none"."""

TONES = 8
"""Number of tones that distinguish neighbours, and of tones that show amounts."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A rectangle of a plane.

    Attributes:
        left: Left edge, as a fraction of the plane's width.
        top: Top edge, as a fraction of the plane's height.
        right: Right edge, as a fraction of the plane's width.
        bottom: Bottom edge, as a fraction of the plane's height.
        tone: Name of the fill colour.
        title: The full text, shown on hover.
        labels: Texts for the cell, the longest first; the first that fits is written.
        mark: The character that fills the cell in text.
    """

    left: float
    top: float
    right: float
    bottom: float
    tone: Tone
    title: str
    labels: tuple[str, ...] = ()
    mark: str = " "


@dataclass(frozen=True, slots=True)
class Plane:
    """A rectangle made of cells: a tensor and its shards, ranks on a mesh, or the traffic between ranks.

    Attributes:
        heading: Text above the plane.
        cells: Cells, which don't overlap.
        columns: Largest number of cells side by side.
        rows: Largest number of cells above each other.
        aspect: The plane's height, as a multiple of its width.
        across: Meaning of the horizontal axis.
        down: Meaning of the vertical axis.
        across_names: Names of the columns; empty if they have none.
        down_names: Names of the rows; empty if they have none.
        caption: Text below the plane.
        short_heading: Heading to use if `heading` doesn't fit; if empty, `heading` is shortened in the middle.
    """

    heading: str
    cells: tuple[Cell, ...]
    columns: int
    rows: int
    aspect: float
    across: str = ""
    down: str = ""
    across_names: tuple[str, ...] = ()
    down_names: tuple[str, ...] = ()
    caption: str = ""
    short_heading: str = ""


@dataclass(frozen=True, slots=True)
class Bar:
    """An amount in a bar chart.

    Attributes:
        name: The bar's label.
        amount: The amount, at least 0.
        text: The amount as text.
        tone: Name of the fill colour.
        title: The full text, shown on hover.
    """

    name: str
    amount: float
    text: str
    tone: Tone = "h5"
    title: str = ""


@dataclass(frozen=True, slots=True)
class Bars:
    """A bar chart.

    Attributes:
        heading: Text above the bars.
        bars: Bars from top to bottom.
        caption: Text below the bars.
    """

    heading: str
    bars: tuple[Bar, ...]
    caption: str = ""


@dataclass(frozen=True, slots=True)
class Block:
    """A tensor on one side of a `Flow`.

    Attributes:
        name: Name of the tensor.
        rows: Length of the tensor along the axis that is drawn downwards.
    """

    name: str
    rows: int


@dataclass(frozen=True, slots=True)
class Stream:
    """Rows that are consecutive both in a left and in a right block of a `Flow`; they are drawn as one band.

    Attributes:
        block: Index of the block on the left.
        start: First row in that block.
        rows: Number of rows.
        to_block: Index of the block on the right; -1 for rows without a counterpart.
        to_start: First row in that block.
        tone: Name of the colour that fills both ends.
        title: The full text, shown on hover.
        label: Text for the left end, written if it fits.
        to_label: Text for the right end, written if it fits.
    """

    block: int
    start: int
    rows: int
    to_block: int
    to_start: int
    tone: Tone
    title: str
    label: str = ""
    to_label: str = ""


@dataclass(frozen=True, slots=True)
class Flow:
    """A mapping from rows of the left blocks to rows of the right blocks.

    Attributes:
        heading: Text above the left side.
        to_heading: Text above the right side.
        blocks: Blocks on the left, from top to bottom.
        to_blocks: Blocks on the right, from top to bottom.
        streams: Streams from left to right.
        caption: Text below the flow.
    """

    heading: str
    to_heading: str
    blocks: tuple[Block, ...]
    to_blocks: tuple[Block, ...]
    streams: tuple[Stream, ...]
    caption: str = ""


@dataclass(frozen=True, slots=True)
class Moment:
    """An event on a line, such as the save of a step.

    Attributes:
        at: Position on the line, as a fraction of its length.
        name: Text below the line.
        height: Measured value, such as a metric, as a fraction of the line's height; None if nothing was measured.
        tone: Name of the fill colour; "goes" draws a hollow mark.
        title: The full text, shown on hover.
        is_pinned: Whether the moment is marked as pinned.
    """

    at: float
    name: str
    height: float | None
    tone: Tone
    title: str
    is_pinned: bool = False


@dataclass(frozen=True, slots=True)
class Line:
    """A line chart of events, each a `Moment`.

    Attributes:
        heading: Text above the line.
        moments: Moments from left to right.
        measure: Name and range of the measured value, such as "loss: 0.1 to 2"; empty without one.
        caption: Text below the line.
    """

    heading: str
    moments: tuple[Moment, ...]
    measure: str = ""
    caption: str = ""


Panel: TypeAlias = Plane | Bars | Flow | Line
"""One part of a picture."""


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry of a legend.

    Attributes:
        tone: The colour that is explained.
        text: Meaning of the colour.
        mark: The character that fills such cells in text.
    """

    tone: Tone
    text: str
    mark: str = ""


@dataclass(frozen=True, slots=True)
class Picture:
    """Panels in rows, under a title.

    Attributes:
        title: Text above all panels.
        rows: Rows of panels; a renderer may put panels of a row below each other.
        notes: Sentences below the panels, such as what was left out.
        legend: Meanings of tones that the cells' own texts don't explain.
        is_step: Whether an arrow leads from each panel of the first row to the next panel.
    """

    title: str
    rows: tuple[tuple[Panel, ...], ...]
    notes: tuple[str, ...] = ()
    legend: tuple[Entry, ...] = ()
    is_step: bool = False
