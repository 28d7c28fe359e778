"""Pictures of layouts: which ranks hold which part of a tensor, which ranks a mesh has, and which file stores what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, islice, pairwise, product
from math import prod

import numpy as np
import torch

from ..core.geometry import Column, group_sums
from ..core.layouts import ShardColumns, StoredLayout, TensorKind, select_rows, shard_columns, sharding_faults
from ..core.mapping import ShardedTensor
from ..core.trees import near_names
from ..errors import KeyMismatch, error_text, plural, size_text
from ..meshes import Mesh, PartitionSpec, mesh_columns, splits
from ._picture import Bar, Bars, Cell, Entry, Picture, Plane
from ._regions import PlaneRegions, places, regions_of
from ._style import rank_labels, rank_words
from ._tensors import (
    ELSEWHERE,
    RANKS,
    HolderNames,
    digit,
    faults_legend,
    notes_on,
    plane_of,
    tensor_sheets,
    tones_of,
)

MOST_REGIONS = 400
"""Largest number of regions in a picture; each takes about 200 bytes of SVG."""
_MOST_TENSORS = 6
_MOST_FILES = 12


def layout_picture(columns: ShardColumns, key: str | None = None) -> Picture:
    """Return the picture of a tensor's layout across ranks.

    Elements without a main replica, and elements with several, are shown as faults.

    Args:
        columns: The shards of all ranks.
        key: Key of the tensor; None for several tensors: those with faults first, then the largest.

    Raises:
        KeyMismatch: There is no such tensor.

    Examples:
        >>> from shardtree.layouts import Mesh, P, layout_of
        >>> import torch
        >>> columns = layout_of({"w": torch.empty(8, 6)}, Mesh(dp=2, tp=4), P("tp"))
        >>> picture = layout_picture(columns, "w")
        >>> picture.title, [cell.title for cell in picture.rows[0][0].cells][:2]
        ("'w' (8, 6) float32", ['[0:2, 0:6] ranks 0, 4', '[2:4, 0:6] ranks 1, 5'])
    """
    if not columns.keys:
        return Picture("no tensors", ())
    if key is None and len(columns.keys) > 1:
        return _overview(columns, RANKS, "rank")
    key = checked_key(columns.keys, columns.keys[0] if key is None else key)
    return _tensor_picture(columns, key, RANKS)


def shard_picture(shard: ShardedTensor) -> Picture:
    """Return the picture of a shard's place in its global tensor.

    Examples:
        >>> import torch
        >>> shard = ShardedTensor.from_rank_offsets("w", torch.zeros(2, 3), (0, 1, 2))
        >>> [cell.title for cell in shard_picture(shard).rows[0][0].cells]
        ['[0:2, 0:3] on other ranks', '[2:4, 0:3] this shard']
    """
    # A replica without its main shard would be drawn as a hole, so the shard is drawn as a main one.
    columns = shard_columns([replace(shard, replica_id=0, data=None)])
    this = HolderNames(lambda _: "this shard", lambda _: ("this shard", "shard"), ELSEWHERE)
    return _tensor_picture(columns, shard.key, this, with_gaps=False)


def stored_picture(layout: StoredLayout) -> Picture:
    """Return the picture of which file holds which part of stored tensors.

    Args:
        layout: The layout of one or several tensors; of several, the largest are drawn.

    Examples:
        >>> import torch
        >>> columns = shard_columns([ShardedTensor.from_rank_offsets("w", torch.zeros(4, 3))])
        >>> [cell.title for cell in stored_picture(StoredLayout(columns, ("a.bin",))).rows[0][0].cells]
        ['[0:4, 0:3] a.bin']
    """
    names, keys = layout.files, layout.columns.keys

    def words(files: Column) -> str:
        first = ", ".join(names[file] for file in files[:2].tolist())
        return first if files.size < 3 else f"{first}, ... ({files.size} files)"

    def labels(files: Column) -> tuple[str, ...]:
        last = names[int(files[0])].rpartition("/")[2]
        return (last, f"file {files[0]}", f"{files[0]}") if files.size == 1 else (f"{files.size} files",)

    if not keys:
        return Picture("no tensors", ())
    holders = HolderNames(words, labels, Entry("hole", "stored in no file", "!"))
    single = len(keys) == 1
    picture = (
        _tensor_picture(layout.columns, keys[0], holders) if single else _overview(layout.columns, holders, "file")
    )
    return replace(picture, rows=(*picture.rows, (_file_bars(layout),)))


def _file_bars(layout: StoredLayout) -> Bars:
    columns = layout.columns
    nbytes = group_sums(columns.rank, columns.nbytes, len(layout.files))
    files = np.flatnonzero(nbytes).tolist()
    folders = {layout.files[file].rpartition("/")[0] for file in files}
    # A folder that has all of the files is named once.
    folder = f"{folders.pop()}/" if len(folders) == 1 and "" not in folders else ""
    bars = tuple(
        Bar(layout.files[file].removeprefix(folder), int(nbytes[file]), size_text(int(nbytes[file])))
        for file in files[:_MOST_FILES]
    )
    more = f"and {plural(len(files) - _MOST_FILES, 'more file')}" if len(files) > _MOST_FILES else ""
    return Bars(f"bytes in each file{folder and f' of {folder}'}", bars, more)


def checked_key(keys: Sequence[str], key: object) -> str:
    """Return a tensor's key after checking that the tensor exists.

    Raises:
        KeyMismatch: There is no such tensor.
    """
    if isinstance(key, str) and key in keys:
        return key
    near = near_names([key], keys) if isinstance(key, str) else {}
    fix = f"Did you mean {near[str(key)]!r}?" if near else "Pass one of the tensors' keys."
    raise KeyMismatch(error_text("draw: no tensor has this key", found=repr(key)[:200], fix=fix))


def _tensor_picture(columns: ShardColumns, key: str, holders: HolderNames, *, with_gaps: bool = True) -> Picture:
    number = columns.keys.index(key)
    kind, title = columns.kinds[number], f"{key!r} {columns.kinds[number]}"
    sheets = tensor_sheets(columns, key, most=MOST_REGIONS, with_gaps=with_gaps)
    if not sheets:
        return Picture(title, (), ("It has no elements.",))
    # Slices share the number of regions that a picture may have.
    if len(sheets) > 1:
        sheets = tensor_sheets(columns, key, most=MOST_REGIONS // len(sheets), with_gaps=with_gaps)
    tones = tones_of(sheets)
    caption = _cut(columns, number) if holders is RANKS and len(sheets) == 1 else ""
    planes = tuple(plane_of(sheet, tones, holders, caption=caption) for sheet in sheets)
    whole = [axis for axis in range(len(kind.global_shape)) if axis in sheets[0].others and len(sheets) == 1]
    notes = [f"Axis {axis}, of {kind.global_shape[axis]:,}, is not cut." for axis in whole]
    return Picture(title, _in_rows(planes), (*notes, *notes_on(sheets)), faults_legend(planes))


def _overview(columns: ShardColumns, holders: HolderNames, noun: str) -> Picture:
    """Return the picture of several tensors, drawn small: those with gaps or overlaps first, then the largest."""
    faulty = set(np.unique(sharding_faults(select_rows(columns, np.flatnonzero(columns.main))).key).tolist())
    length = [np.prod(kind.global_shape, dtype=np.float64) for kind in columns.kinds]
    order = sorted(range(len(length)), key=lambda number: (number not in faulty, -length[number], number))
    those = plural(int(np.unique(columns.rank).size), noun)
    counts = f"{plural(len(order), 'tensor')} {'in' if noun == 'file' else 'on'} {those}"
    return _small_planes(counts, columns, order, holders)


def _small_planes(counts: str, columns: ShardColumns, order: Sequence[int], holders: HolderNames) -> Picture:
    """Return the picture of the first few tensors, each drawn small.

    Args:
        counts: Beginning of the title, such as "2 tensors on 4 ranks".
        columns: Shards of all tensors.
        order: Indices of all tensors, in the order in which they are drawn.
        holders: Names for ranks or files.
    """
    is_one_rank = holders.absent is ELSEWHERE
    keys = [columns.keys[number] for number in order[:_MOST_TENSORS]]
    most = MOST_REGIONS // _MOST_TENSORS
    sheets = {key: tensor_sheets(columns, key, most=most, with_gaps=not is_one_rank)[:1] for key in keys}
    # One numbering for all, so that a rank has one tone.
    tones = tones_of(list(chain.from_iterable(sheets.values())))
    planes = []
    for number, (key, own) in zip(order, sheets.items(), strict=False):
        headings = {"heading": f"{key!r} {columns.kinds[number]}", "short_heading": repr(key)}
        caption = "" if is_one_rank else _cut(columns, number)
        planes += [plane_of(sheet, tones, holders, **headings, caption=caption) for sheet in own]
    left = len(order) - len(keys)
    notes = (f"And {plural(left, 'tensor')} more: name one to see it.",) if left else ()
    title = f"{counts}, {size_text(int(columns.nbytes.sum()))}"
    return Picture(title, _in_rows(planes, 3), notes, faults_legend(planes))


def _cut(columns: ShardColumns, number: int) -> str:
    """Return the number of a tensor's distinct shards and of replicas of each, such as "2 pieces, 4 copies of each"."""
    shards = select_rows(columns, np.flatnonzero(columns.key == number))
    rows = np.column_stack([shards.offset, shards.shape, shards.start, shards.stop])[shards.elements > 0]
    _, copies = np.unique(rows, axis=0, return_counts=True)
    if not copies.size:
        return ""
    least, most = int(copies.min()), int(copies.max())
    times = "" if most == 1 else f", {least} copies" if least == most else f", {least} to {most} copies"
    times += " of each" if times and copies.size > 1 else ""
    pieces = plural(copies.size, "piece").replace(str(copies.size), f"{copies.size:,}", 1)
    return f"{pieces}{times}"


def tree_picture(columns: ShardColumns) -> Picture:
    """Return the picture of one rank's tree: its largest tensors, each with the positions of its shards.

    Examples:
        >>> import torch
        >>> halves = [ShardedTensor.from_rank_offsets(key, torch.zeros(2, 3), (0, 1, 2)) for key in "ab"]
        >>> picture = tree_picture(shard_columns(halves))
        >>> picture.title, len(picture.rows[0])
        ("one rank's 2 tensors, 48 B", 2)
    """
    order = np.argsort(-group_sums(columns.key, columns.nbytes, len(columns.keys)), kind="stable").tolist()
    this = HolderNames(lambda _: "held here", lambda _: ("held here", "here"), ELSEWHERE)
    mine = replace(columns, main=np.ones(len(columns), dtype=np.bool_), rank=np.zeros(len(columns), dtype=np.int64))
    return _small_planes(f"one rank's {plural(len(order), 'tensor')}", mine, order, this)


# Meshes: ranks in a grid, and beside it the tensor that a spec cuts over them.

_MOST_GRIDS = 8
_KEY = "tensor"
_MIXED = Entry("kept", "ranks that hold different pieces", "#")


def mesh_picture(mesh: Mesh, spec: PartitionSpec | None = None, shape: Sequence[int] | None = None) -> Picture:
    """Return the picture of a mesh's ranks; with a spec, also of a tensor and the ranks that hold each part of it.

    Args:
        mesh: The mesh.
        spec: The spec that cuts the tensor.
        shape: Shape of the tensor; by default, the smallest shape that the spec cuts into all parts.

    Raises:
        MetadataError: The spec doesn't fit the mesh or the shape.

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
    # A region of merged pieces is named by its first one; the mesh's cells by their own pieces.
    what = f"a tensor of {lengths}" if shape is not None else "a tensor"
    planes = [plane_of(sheet, tones_of(sheets), RANKS, heading=what if len(sheets) == 1 else "") for sheet in sheets]
    if shape is None:  # its lengths are made up
        planes = [replace(one, across=one.across.partition(":")[0], down=one.down.partition(":")[0]) for one in planes]
    notes = (*_left_out(mesh), *notes_on(sheets))
    is_mixed = any(cell.tone == "kept" for grid in grids for cell in grid.cells)
    legend = (*((_MIXED,) if is_mixed else ()), *faults_legend(planes))
    return Picture(f"{title}, cut by {spec!r}", _in_rows([*grids, *planes]), notes, legend)


def _in_rows(planes: Sequence[Plane], most: int = 4) -> tuple[tuple[Plane, ...], ...]:
    return tuple(tuple(planes[place : place + most]) for place in range(0, len(planes), most))


def _pieces(mesh: Mesh, spec: PartitionSpec) -> tuple[int, ...]:
    """Return the smallest shape of a tensor that a spec cuts into all its parts: each part has one element.

    Axes of length 1 are appended until there are two axes.
    """
    sizes = [
        prod(mesh.shape.get(split.axis, 1) * split.split_factor for split in splits(entry)) for entry in spec.entries
    ]
    return (*sizes, *[1] * (2 - len(sizes)))


def _leads(columns: ShardColumns) -> dict[int, int]:
    """Return a representative of each rank: the rank that has the main replica of the same box.

    Args:
        columns: Shards of one tensor, one for each rank.
    """
    boxes = np.concatenate([columns.offset, columns.shape], axis=1)
    _, number = np.unique(boxes, axis=0, return_inverse=True)
    first = np.full(len(boxes), np.iinfo(np.int64).max)
    np.minimum.at(first, number.ravel(), np.where(columns.main, columns.rank, first))
    return dict(zip(columns.rank.tolist(), first[number.ravel()].tolist(), strict=True))


def _left_out(mesh: Mesh) -> tuple[str, ...]:
    grids = prod(size for _, size in mesh.axes[:-2])
    return (f"The first {_MOST_GRIDS} of {grids:,} grids.",) if grids > _MOST_GRIDS else ()


def _grids(mesh: Mesh, lead: dict[int, int], tones: dict[int, str], most: int) -> list[Plane]:
    """Return planes of a mesh's ranks, one for each index along all axes except the last two; at most eight planes.

    Args:
        mesh: The mesh.
        lead: Representative of each rank, from `_leads`. Ranks with the same representative look alike.
        tones: Tone (colour) of each representative.
        most: Approximate upper bound on the number of cells in all planes; if there are more ranks, they share cells.
    """
    *outer, (down, rows), (across, columns) = [("", 1), ("", 1), *mesh.axes][-max(len(mesh.axes), 2) :]
    ranks = np.array(mesh.ranks, dtype=np.int64).reshape([*(size for _, size in outer), rows, columns])
    steps = list(islice(product(*(range(size) for _, size in outer)), _MOST_GRIDS))
    planes = []
    for step in steps:
        at = {name: index for (name, _), index in zip(outer, step, strict=True)}
        heading = ", ".join(f"{name}={index}" for name, index in at.items())
        planes.append(_grid(mesh, ranks[step], (down, across), heading, lead, tones, most // len(steps)))
    return planes


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
    regions = regions_of(begin, begin + 1, (rows, columns), np.zeros((0, 2), dtype=np.int64), most)
    flat = ranks.reshape(-1)
    down, across = places(regions.row_edges, 0.01), places(regions.column_edges, 0.01)
    cells = []
    for region in regions.regions:
        here = np.sort(flat[region.boxes])
        leads = {lead.get(rank, -1) for rank in here[:2000].tolist()}
        tone = tones.get(next(iter(leads)), "none") if len(leads) == 1 else "kept"
        axes = f": {', '.join(f'{n}={i}' for n, i in mesh.coordinates(int(here[0])).items())}" if here.size == 1 else ""
        (top, bottom), (left, right) = region.rows, region.columns
        # Ranks with the same mark hold the same piece.
        mark = digit(leads.pop()) if len(leads) == 1 else "#"
        place = across[left], down[top], across[right], down[bottom]
        cells.append(Cell(*place, tone, f"{rank_words(here)}{axes}", rank_labels(here), mark))
    aspect = min(max(rows / columns, 0.14), 1.0)
    return Plane(
        heading or "ranks",
        tuple(cells),
        regions.column_edges.size - 1,
        regions.row_edges.size - 1,
        aspect,
        f"{names[1]}: {columns:,}" if names[1] else "",
        f"{names[0]}: {rows:,}" if names[0] else "",
        _band_names(regions, 1),
        _band_names(regions, 0),
    )


def _band_names(regions: PlaneRegions, axis: int) -> tuple[str, ...]:
    edges = (regions.row_edges, regions.column_edges)[axis].tolist()
    if len(edges) == 2 and edges[1] == 1:
        return ()
    return tuple(f"{low}" if high == low + 1 else f"{low}-{high - 1}" for low, high in pairwise(edges))
