"""Planes of a global tensor, cut like its shards or stored chunks; if more than two axes are cut, it is sliced.

A plane is a drawing of the tensor along two axes, divided into regions. Holders are the ranks or the files that hold
the tensor's parts. One holder of each region is its lead, and determines the region's tone (colour). A `Sheet` is a
plane before the tones are chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise, product

import numpy as np

from ..core.geometry import Column, distinct, rows_of
from ..core.layouts import ShardColumns, TensorKind, place_text, select_rows, shard_boxes, sharding_faults
from ._picture import TONES, Cell, Entry, Plane
from ._regions import PlaneRegion, PlaneRegions, places, regions_of
from ._style import rank_labels, rank_words

_MOST_SLICES = 8
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
HOLE = Entry("hole", "held by no main replica", "!")
OVERLAP = Entry("overlap", "held by more than one main replica", "X")
ELSEWHERE = Entry("none", "on other ranks", ".")


@dataclass(frozen=True, slots=True, eq=False)
class HolderNames:
    """Texts for the holders of a tensor's parts, which are ranks or files.

    Attributes:
        words: Function from holders to a text that names them, shown on hover.
        labels: Function from holders to labels for their cell, the longest first.
        absent: Legend entry for cells without a holder.
    """

    words: Callable[[Column], str]
    labels: Callable[[Column], tuple[str, ...]]
    absent: Entry = HOLE


RANKS = HolderNames(rank_words, rank_labels)


@dataclass(frozen=True, slots=True, eq=False)
class Sheet:
    """A plane of a tensor before its tones (colours) are chosen.

    Tones are chosen for all planes of a picture together, since a holder has the same tone in all of them.

    Attributes:
        heading: Heading of the plane.
        kind: Dtype and shape of the tensor.
        axes: Axis drawn downwards, and axis drawn across. The first is None for a tensor with one axis.
        others: Range of indices that the plane shows along each axis that isn't drawn, by axis.
        regions: Regions of the plane.
        holders: Ranks or files that hold a part of each region, ascending, int64.
        lead: Rank or file whose tone each region gets; -1 if no rank or file has a part of the region.
        faults: Fault of each region: "hole", "overlap" or empty.
    """

    heading: str
    kind: TensorKind
    axes: tuple[int | None, int]
    others: dict[int, slice]
    regions: PlaneRegions
    holders: tuple[Column, ...]
    lead: tuple[int, ...]
    faults: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _Pieces:
    """The distinct boxes of one tensor, with their holders.

    Attributes:
        begin: First index of each box, int64 (boxes, axes).
        end: Stop index of each box, int64 (boxes, axes).
        holders: Ranks or files that hold each box, ascending.
        lead: Lowest rank or file that holds the main replica of each box or, without a main replica, another replica.
        faults: Boxes without exactly one main replica: their first indices and their stop indices, both int64 (faults,
            axes), and whether they have several main replicas, bool (faults,).
    """

    begin: Column
    end: Column
    holders: list[Column]
    lead: list[int]
    faults: tuple[Column, Column, np.ndarray]


def tensor_sheets(columns: ShardColumns, key: str, *, most: int, with_gaps: bool = True) -> list[Sheet]:
    """Return the planes of one tensor, as sheets.

    If more than two axes are cut, two of them are drawn, and there is a plane for each slice along the others, but at
    most eight. Otherwise there is one plane. A tensor without elements has none.

    Args:
        columns: All shards, or those of one rank.
        key: Key of the tensor.
        most: Approximate upper bound on the number of regions in each plane.
        with_gaps: Whether elements without a main replica are a fault.
    """
    number = columns.keys.index(key)
    kind, own_columns = columns.kinds[number], select_rows(columns, np.flatnonzero(columns.key == number))
    # Other keys are dropped: otherwise, all other tensors would be searched for holes, too.
    own_columns = replace(own_columns, keys=(key,), kinds=(kind,), key=np.zeros_like(own_columns.key))
    whole = kind.global_shape or (1,)
    if not all(whole):
        return []
    pieces = _pieces(own_columns, len(whole), with_gaps=with_gaps)
    rows, column, outer = _drawn_axes(pieces, whole)
    others = {axis: slice(0, length) for axis, length in enumerate(whole) if axis not in (rows, column, *outer)}
    cuts = [distinct(np.concatenate([pieces.begin[:, a], pieces.end[:, a], [0, whole[a]]])).tolist() for a in outer]
    spans = [list(map(slice, cut, cut[1:])) for cut in cuts]
    slices = [dict(zip(outer, each, strict=True)) for each in islice(product(*spans), _MOST_SLICES)]
    return [_sheet(pieces, kind, (rows, column), others | place, place, most) for place in slices]


MERGED = "Pieces too small to be told apart share a cell, which names all that hold them."


def notes_on(sheets: Sequence[Sheet]) -> tuple[str, ...]:
    """Return a picture's notes on one tensor: that small pieces share a cell, or that not all slices are shown."""
    notes = [MERGED] if any(sheet.regions.is_merged for sheet in sheets) else []
    if len(sheets) == _MOST_SLICES:
        notes.append(f"The first {_MOST_SLICES} slices are shown; others may be cut differently.")
    return tuple(notes)


def _pieces(own: ShardColumns, axes: int, *, with_gaps: bool) -> _Pieces:
    boxes = shard_boxes(own.offset, own.shape, own.start, own.stop)
    rows = np.flatnonzero((boxes.shape > 0).all(axis=1))
    shard, offset, shape = boxes.shard[rows], boxes.offset[rows, -axes:], boxes.shape[rows, -axes:]
    unique, inverse = np.unique(np.concatenate([offset, offset + shape], axis=1), axis=0, return_inverse=True)
    order = np.lexsort((own.rank[shard], ~own.main[shard], inverse.ravel()))
    starts = np.searchsorted(inverse.ravel()[order], np.arange(len(unique) + 1))
    of_box = [own.rank[shard[order[low:high]]] for low, high in pairwise(starts)]
    faults = sharding_faults(select_rows(own, np.flatnonzero(own.main)))
    faults = rows_of(faults, np.flatnonzero(faults.doubled | with_gaps))
    bad = shard_boxes(faults.offset, faults.shape, faults.start, faults.stop)
    begin = bad.offset[:, -axes:]
    return _Pieces(
        unique[:, :axes],
        unique[:, axes:],
        [np.unique(ranks) for ranks in of_box],
        [int(ranks[0]) for ranks in of_box],
        (begin, begin + bad.shape[:, -axes:], faults.doubled[bad.shard]),
    )


def _drawn_axes(pieces: _Pieces, whole: tuple[int, ...]) -> tuple[int | None, int, tuple[int, ...]]:
    """Return the axis drawn downwards, the axis drawn across, and the axes along which the tensor is sliced.

    The last two cut axes are drawn. If fewer than two are cut, uncut axes complete the pair. The axis drawn downwards
    is None for a tensor with one axis.
    """
    begin, end, _ = pieces.faults
    lows, highs = np.concatenate([pieces.begin, begin]), np.concatenate([pieces.end, end])
    is_cut = ((lows > 0) | (highs < np.array(whole))).any(axis=0)
    cut = np.flatnonzero(is_cut).tolist()
    if len(whole) == 1:
        return None, 0, ()
    if len(cut) >= 2:
        return cut[-2], cut[-1], tuple(cut[:-2])
    axis = cut[0] if cut else len(whole) - 2
    other_axis = len(whole) - 1 if axis < len(whole) - 1 else axis - 1
    return min(axis, other_axis), max(axis, other_axis), ()


def _sheet(
    pieces: _Pieces,
    kind: TensorKind,
    axes: tuple[int | None, int],
    others: dict[int, slice],
    span_of: dict[int, slice],
    most: int,
) -> Sheet:
    """Return one plane of a tensor, as a sheet.

    Args:
        pieces: Boxes of the tensor.
        kind: Dtype and shape of the tensor.
        axes: Axis drawn downwards, or None, and axis drawn across.
        others: Range of indices to show along each axis that isn't drawn, by axis.
        span_of: The ranges in `others` that select a slice; the heading names them.
        most: Approximate upper bound on the number of regions.
    """
    bad_begin, bad_end, is_double = pieces.faults
    here, bad = (_meeting(begin, end, others) for begin, end in ((pieces.begin, pieces.end), (bad_begin, bad_end)))
    begin, end = (_on_plane(column[here], axes, fill) for column, fill in ((pieces.begin, 0), (pieces.end, 1)))
    low, high = (_on_plane(column[bad], axes, fill) for column, fill in ((bad_begin, 0), (bad_end, 1)))
    whole = kind.global_shape or (1,)
    extent = (1 if axes[0] is None else whole[axes[0]], whole[axes[1]])
    # Faults also cut the plane, so that even the thinnest hole has a region of its own.
    both = np.concatenate([begin, low]), np.concatenate([end, high])
    plane = regions_of(*both, extent, np.concatenate([low, high]), most)
    holders, lead, faults = [], [], []
    for region in plane.regions:
        numbers, wrong = region.boxes[region.boxes < len(here)], region.boxes[region.boxes >= len(here)] - len(here)
        mine = here[numbers].tolist()
        names = [pieces.holders[each] for each in mine]
        holders.append(np.unique(np.concatenate(names)) if names else np.zeros(0, dtype=np.int64))
        lead.append(min((pieces.lead[each] for each in mine), default=-1))
        faults.append("" if not wrong.size else "overlap" if is_double[bad[wrong]].all() else "hole")
    heading = ", ".join(f"[{span.start}:{span.stop}] of axis {axis}" for axis, span in span_of.items())
    return Sheet(heading, kind, axes, others, plane, tuple(holders), tuple(lead), tuple(faults))


def _meeting(begin: Column, end: Column, spans: dict[int, slice]) -> Column:
    meets = np.ones(len(begin), dtype=np.bool_)
    for axis, span in spans.items():
        meets &= (begin[:, axis] < span.stop) & (end[:, axis] > span.start)
    return np.flatnonzero(meets)


def _on_plane(column: Column, axes: tuple[int | None, int], fill: int) -> Column:
    rows = np.full(len(column), fill) if axes[0] is None else column[:, axes[0]]
    return np.stack([rows, column[:, axes[1]]], axis=1)


# Planes made of sheets, once each holder has a tone.


def tones_of(sheets: Sequence[Sheet]) -> dict[int, str]:
    """Return the tone (colour) of each rank or file that determines a region's tone. They get tones in turn."""
    leads = sorted({lead for sheet in sheets for lead in sheet.lead if lead >= 0})
    return {lead: f"t{number % TONES}" for number, lead in enumerate(leads)}


def plane_of(
    sheet: Sheet,
    tones: dict[int, str],
    holders: HolderNames,
    *,
    heading: str = "",
    short_heading: str = "",
    caption: str = "",
) -> Plane:
    """Return the drawable plane for a sheet, with tones and texts.

    Args:
        sheet: The plane's regions and their holders.
        tones: Tone (colour) by rank or file, from `tones_of`.
        holders: Names for ranks or files that hold parts.
        heading: Text before the sheet's own heading.
        short_heading: Heading to use if the whole one doesn't fit.
        caption: Text below the plane.
    """
    regions = sheet.regions
    across, down = places(regions.column_edges, 0.012), places(regions.row_edges, 0.02)
    cells = tuple(
        Cell(
            across[region.columns[0]],
            down[region.rows[0]],
            across[region.columns[1]],
            down[region.rows[1]],
            *_looks(sheet, number, region, tones, holders),
        )
        for number, region in enumerate(regions.regions)
    )
    rows, columns = regions.row_edges.size - 1, regions.column_edges.size - 1
    heading = ", ".join(filter(None, [heading, sheet.heading]))
    axis_names = (
        None if axis is None else f"axis {axis}: {(sheet.kind.global_shape or (1,))[axis]:,}" for axis in sheet.axes
    )
    down_name, across_name = axis_names
    names = (across_name or "", down_name or "")
    return Plane(heading, cells, columns, rows, _aspect(sheet), *names, caption=caption, short_heading=short_heading)


def _aspect(sheet: Sheet) -> float:
    """Return the height of a sheet's plane as a multiple of its width; a long matrix isn't drawn to scale."""
    if sheet.axes[0] is None:
        return 0.14
    rows, columns = (int(edges[-1]) for edges in (sheet.regions.row_edges, sheet.regions.column_edges))
    return float(min(max((rows / columns) ** 0.5, 0.5), 1.0))


def _looks(
    sheet: Sheet, number: int, region: PlaneRegion, tones: dict[int, str], holders: HolderNames
) -> tuple[str, str, tuple[str, ...], str]:
    """Return the tone, title, labels and mark of the `Cell` that draws a region.

    Args:
        sheet: The plane's regions and their holders.
        number: Index of the region in the sheet.
        region: The region.
        tones: Tone (colour) by rank or file.
        holders: Names for ranks or files that hold parts.
    """
    place = place_text(_box(sheet, region))
    ranks, lead, fault = sheet.holders[number], sheet.lead[number], sheet.faults[number]
    words = holders.words(ranks) if ranks.size else ""
    if fault == "overlap":
        return "overlap", f"{place} {OVERLAP.text}: {words}", (f"twice: {words}", "twice"), OVERLAP.mark
    if fault:
        # Ranks may hold it as a replica of a missing main shard.
        labels = ("no main replica", "no main") if words else ("held by none", "none")
        return "hole", f"{place} {holders.absent.text}{words and ': '}{words}", labels, HOLE.mark
    if lead < 0:
        return holders.absent.tone, f"{place} {holders.absent.text}", (), holders.absent.mark
    return tones[lead], f"{place} {words}", holders.labels(ranks), digit(lead)


def digit(holder: int) -> str:
    """Return the character that fills a holder's cells in text.

    Examples:
        >>> digit(3), digit(35), digit(36), digit(-1)
        ('3', 'z', '0', '.')
    """
    return _DIGITS[holder % len(_DIGITS)] if holder >= 0 else "."


def _box(sheet: Sheet, region: PlaneRegion) -> tuple[slice, ...]:
    """Return a region's box in the global tensor."""
    rows, columns = sheet.regions.place(region)
    spans = sheet.others | {sheet.axes[1]: columns} | ({} if sheet.axes[0] is None else {sheet.axes[0]: rows})
    return tuple(spans[axis] for axis in range(len(sheet.kind.global_shape or (1,))))


def faults_legend(planes: Sequence[Plane]) -> tuple[Entry, ...]:
    """Return legend entries for the holes, overlaps and parts on other ranks in drawings of tensors."""
    tones = {cell.tone for plane in planes for cell in plane.cells}
    return tuple(entry for entry in (HOLE, OVERLAP, ELSEWHERE) if entry.tone in tones)
