"""Pictures of meshes: ranks in a grid, and beside it the tensor that a spec cuts over them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice, pairwise, product
from math import prod

import numpy as np
import torch

from ..geometry import Column
from ..layouts import Mesh, PartitionSpec, ShardColumns, TensorKind, mesh_columns, splits
from ._labels import rank_labels, rank_words
from ._layouts import MOST_REGIONS
from ._picture import Cell, Entry, Picture, Plane
from ._regions import Regions, places, regions_of
from ._tensors import RANKS, digit, faults_legend, notes_on, plane_of, tensor_sheets, tones_of

_MOST_GRIDS = 8
_KEY = "tensor"
_MIXED = Entry("kept", "ranks that hold different pieces", "#")


def mesh_picture(mesh: Mesh, spec: PartitionSpec | None = None, shape: Sequence[int] | None = None) -> Picture:
    """Return the picture of a mesh's ranks, and with a spec, of which of them hold the same piece of a tensor.

    Args:
        mesh: the ranks.
        spec: how a tensor is cut.
        shape: the tensor's; by default, one element for each piece along each axis.

    Raises:
        MetadataError: the spec fits neither the mesh nor the shape.

    Examples:
        >>> from shardtree.layouts import P
        >>> picture = mesh_picture(Mesh(dp=2, tp=2), P("tp"), (8, 6))
        >>> grid, tensor = picture.rows[0]
        >>> [cell.title for cell in grid.cells][:2], [cell.title for cell in tensor.cells]
        (['rank 0: dp=0, tp=0', 'rank 1: dp=0, tp=1'], ['[0:4, 0:6] ranks 0, 2', '[4:8, 0:6] ranks 1, 3'])
    """
    title = repr(mesh) if len(repr(mesh)) < 60 else repr(mesh).partition(".on_ranks")[0]
    if spec is None:
        grids = _grids(mesh, dict.fromkeys(mesh.ranks, 0), {0: "t0"}, MOST_REGIONS)
        return Picture(title, _in_rows(grids), _left_out(mesh))
    lengths = _pieces(mesh, spec) if shape is None else tuple(shape)
    kind = TensorKind(torch.float32, lengths, 0)
    columns = mesh_columns({_KEY: kind}, mesh, {_KEY: spec})
    sheets = tensor_sheets(columns, _KEY, most=MOST_REGIONS // 2)
    lead = _leads(columns)
    grids = _grids(mesh, lead, tones_of(sheets), MOST_REGIONS // 2)
    # A region of merged pieces is called by its first one; the mesh's cells by their own.
    what = f"a tensor of {lengths}" if shape is not None else "a tensor"
    planes = [plane_of(sheet, tones_of(sheets), RANKS, heading=what if len(sheets) == 1 else "") for sheet in sheets]
    if shape is None:  # its lengths are made up
        planes = [replace(one, across=one.across.partition(":")[0], down=one.down.partition(":")[0]) for one in planes]
    notes = (*_left_out(mesh), *notes_on(sheets))
    mixed = any(cell.tone == "kept" for grid in grids for cell in grid.cells)
    legend = (*((_MIXED,) if mixed else ()), *faults_legend(planes))
    return Picture(f"{title}, cut by {spec!r}", _in_rows([*grids, *planes]), notes, legend)


def _in_rows(planes: Sequence[Plane]) -> tuple[tuple[Plane, ...], ...]:
    return tuple(tuple(planes[place : place + 4]) for place in range(0, len(planes), 4))


def _pieces(mesh: Mesh, spec: PartitionSpec) -> tuple[int, ...]:
    """Return the smallest shape that a spec cuts into as many pieces as it can; of two axes at least."""
    sizes = [
        prod(mesh.shape.get(split.axis, 1) * split.split_factor for split in splits(entry)) for entry in spec.entries
    ]
    return (*sizes, *[1] * (2 - len(sizes)))


def _leads(columns: ShardColumns) -> dict[int, int]:
    """Return the first holder of the piece that each rank holds."""
    boxes = np.concatenate([columns.offset, columns.shape], axis=1)
    _, number = np.unique(boxes, axis=0, return_inverse=True)
    first = np.full(len(boxes), np.iinfo(np.int64).max)
    np.minimum.at(first, number.ravel(), np.where(columns.main, columns.rank, first))
    return dict(zip(columns.rank.tolist(), first[number.ravel()].tolist(), strict=True))


def _left_out(mesh: Mesh) -> tuple[str, ...]:
    grids = prod(size for _, size in mesh.axes[:-2])
    return (f"The first {_MOST_GRIDS} of {grids:,} grids.",) if grids > _MOST_GRIDS else ()


def _grids(mesh: Mesh, lead: dict[int, int], tones: dict[int, str], most: int) -> list[Plane]:
    """Return a plane of ranks for each place along all axes but the last two."""
    *outer, (down, rows), (across, columns) = [("", 1), ("", 1), *mesh.axes][-max(len(mesh.axes), 2) :]
    ranks = np.array(mesh.ranks, dtype=np.int64).reshape([*(size for _, size in outer), rows, columns])
    steps = list(islice(product(*(range(size) for _, size in outer)), _MOST_GRIDS))
    found = []
    for step in steps:
        at = {name: index for (name, _), index in zip(outer, step, strict=True)}
        heading = ", ".join(f"{name}={index}" for name, index in at.items())
        found.append(_grid(mesh, ranks[step], (down, across), heading, lead, tones, most // len(steps)))
    return found


def _grid(
    mesh: Mesh,
    ranks: Column,
    names: tuple[str, str],
    heading: str,
    lead: dict[int, int],
    tones: dict[int, str],
    most: int,
) -> Plane:
    rows, columns = ranks.shape
    begin = np.stack(np.unravel_index(np.arange(ranks.size), ranks.shape), axis=1)
    found = regions_of(begin, begin + 1, (rows, columns), np.zeros((0, 2), dtype=np.int64), most)
    flat = ranks.reshape(-1)
    down, across = places(found.row_edges, 0.01), places(found.column_edges, 0.01)
    cells = []
    for region in found.regions:
        here = np.sort(flat[region.boxes])
        leads = {lead.get(rank, -1) for rank in here[:2000].tolist()}
        tone = tones.get(next(iter(leads)), "none") if len(leads) == 1 else "kept"
        one = f": {', '.join(f'{n}={i}' for n, i in mesh.coordinates(int(here[0])).items())}" if here.size == 1 else ""
        (top, bottom), (left, right) = region.rows, region.columns
        # Ranks with one mark hold one piece.
        mark = digit(leads.pop()) if len(leads) == 1 else "#"
        place = across[left], down[top], across[right], down[bottom]
        cells.append(Cell(*place, tone, f"{rank_words(here)}{one}", rank_labels(here), mark))
    aspect = min(max(rows / columns, 0.14), 1.0)
    return Plane(
        heading or "ranks",
        tuple(cells),
        found.column_edges.size - 1,
        found.row_edges.size - 1,
        aspect,
        f"{names[1]}: {columns:,}" if names[1] else "",
        f"{names[0]}: {rows:,}" if names[0] else "",
        _band_names(found, 1),
        _band_names(found, 0),
    )


def _band_names(found: Regions, axis: int) -> tuple[str, ...]:
    edges = (found.row_edges, found.column_edges)[axis].tolist()
    if len(edges) == 2 and edges[1] == 1:
        return ()
    return tuple(f"{low}" if high == low + 1 else f"{low}-{high - 1}" for low, high in pairwise(edges))
