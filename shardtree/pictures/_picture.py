"""Picture: what is drawn, as an immutable value without a size in pixels or characters; renderers give it one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

Tone: TypeAlias = str
"""How an area is filled: "t0" to "t7" tell neighbours apart, "h1" to "h8" are amounts, and the rest says what is there:
"hole", "overlap", "kept", "goes", "none"."""

TONES = 8
"""How many tones tell neighbours apart, and how many steps an amount has."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A rectangle of a plane.

    Attributes:
        left: as a fraction of the plane's width, like `right`.
        top: as a fraction of its height, like `bottom`.
        right: where it ends.
        bottom: where it ends.
        tone: how it is filled.
        title: all that there is to say of it, shown on hover.
        labels: what may be written into it, the longest first: the first that fits is.
        mark: the character that fills it in text.
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
    """Cells that lie side by side: a tensor cut into pieces, ranks on a mesh, or who sends how much to whom.

    Attributes:
        heading: above it.
        cells: none of which overlap.
        columns: how many cells are side by side, at most.
        rows: how many are above each other, at most.
        aspect: its height, as a multiple of its width.
        across: what runs from left to right.
        down: what runs from top to bottom.
        across_names: of the columns, where each is something by itself.
        down_names: of the rows, likewise.
        caption: below it.
        short_heading: for where the heading doesn't fit; empty for the heading without its middle.
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
    """An amount.

    Attributes:
        name: what it is of.
        amount: 0 or more.
        text: the amount, as it is written.
        tone: how it is filled.
        title: all that there is to say of it.
    """

    name: str
    amount: float
    text: str
    tone: Tone = "h5"
    title: str = ""


@dataclass(frozen=True, slots=True)
class Bars:
    """Amounts that are compared by length.

    Attributes:
        heading: above them.
        bars: from top to bottom.
        caption: below them.
    """

    heading: str
    bars: tuple[Bar, ...]
    caption: str = ""


@dataclass(frozen=True, slots=True)
class Block:
    """A tensor of which rows come or go, in a flow.

    Attributes:
        name: what it is.
        rows: how many it has.
    """

    name: str
    rows: int


@dataclass(frozen=True, slots=True)
class Stream:
    """Rows that lie together on both sides of a flow.

    Attributes:
        block: on the left.
        start: the first row there.
        rows: how many there are.
        to_block: on the right; -1 for rows that go nowhere.
        to_start: the first row there.
        tone: how both ends are filled.
        title: all that there is to say of them.
        label: what is written into the left end, if it fits.
        to_label: what is written into the right end, if it fits.
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
    """Which rows of the blocks on the left are which rows of those on the right.

    Attributes:
        heading: above the left side.
        to_heading: above the right side.
        blocks: on the left, from top to bottom.
        to_blocks: on the right.
        streams: between them.
        caption: below.
    """

    heading: str
    to_heading: str
    blocks: tuple[Block, ...]
    to_blocks: tuple[Block, ...]
    streams: tuple[Stream, ...]
    caption: str = ""


@dataclass(frozen=True, slots=True)
class Moment:
    """Something that happened at a place of a line, such as a save.

    Attributes:
        at: where, as a fraction of the line.
        name: what it is called.
        height: of its measure, as a fraction; None where it has none.
        tone: how it is filled; "goes" is hollow.
        title: all that there is to say of it.
        is_pinned: whether it is marked as one that stays.
    """

    at: float
    name: str
    height: float | None
    tone: Tone
    title: str
    is_pinned: bool = False


@dataclass(frozen=True, slots=True)
class Line:
    """Moments in their order.

    Attributes:
        heading: above it.
        moments: from left to right.
        measure: what heights mean, from bottom to top; empty where there are none.
        caption: below it.
    """

    heading: str
    moments: tuple[Moment, ...]
    measure: str = ""
    caption: str = ""


Panel: TypeAlias = Plane | Bars | Flow | Line
"""One part of a picture."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A line of a legend.

    Attributes:
        tone: what is explained.
        text: what it means.
        mark: the character that fills such cells in text.
    """

    tone: Tone
    text: str
    mark: str = ""


@dataclass(frozen=True, slots=True)
class Picture:
    """What is drawn: panels in rows, under a title.

    Attributes:
        title: what it shows.
        rows: panels that belong side by side; a renderer may put them below each other.
        notes: sentences below, such as what was left out.
        legend: what tones mean that aren't written into their cells.
        is_step: whether the panels of a row follow from each other, which an arrow between them says.
    """

    title: str
    rows: tuple[tuple[Panel, ...], ...]
    notes: tuple[str, ...] = ()
    legend: tuple[Entry, ...] = ()
    is_step: bool = False
