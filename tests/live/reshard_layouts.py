"""Random layouts to reshard between, in columns: meshes, irregular cuts, flat ranges, replicas cut otherwise."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np
import torch
from hypothesis import strategies as st

from shardtree.core.geometry import box_column
from shardtree.layouts import Mesh, PartitionSpec, ShardColumns, TensorKind, mesh_shards
from shardtree.testing import Piece, layouts, shapes

DTYPES = {
    torch.int8: torch.int16,
    torch.int16: torch.int8,
    torch.float32: torch.bfloat16,
    torch.float64: torch.float32,
    torch.bfloat16: torch.float64,
}
"""Dtypes of tensors before, with another that each can become, and from which it can be made again."""


class Tensor(NamedTuple):
    """A tensor and who holds what of it."""

    kind: TensorKind
    pieces: tuple[Piece, ...]


class Case(NamedTuple):
    """Two layouts; no part of a box that is cut between senders is shorter than so many bytes."""

    source: ShardColumns
    target: ShardColumns
    shortest_cut: int


def columns_of(tensors: Mapping[str, Tensor]) -> ShardColumns:
    """Return tensors' pieces as columns."""
    keys = tuple(sorted(tensors))
    rows = [(number, piece) for number, key in enumerate(keys) for piece in tensors[key].pieces]
    return ShardColumns(
        keys,
        tuple(tensors[key].kind for key in keys),
        int64(number for number, _ in rows),
        box_column([piece.offset for _, piece in rows], fill=0),
        box_column([piece.shape for _, piece in rows], fill=1),
        int64(-1 if piece.flat is None else piece.flat[0] for _, piece in rows),
        int64(-1 if piece.flat is None else piece.flat[1] for _, piece in rows),
        int64(piece.rank for _, piece in rows),
        np.array([piece.replica in (0, (0, 0)) for _, piece in rows], dtype=np.bool_),
    )


def int64(values: Iterable[int]) -> np.ndarray:
    return np.array(list(values), dtype=np.int64)


def mesh_pieces(shape: tuple[int, ...], mesh: Mesh, spec: PartitionSpec) -> tuple[Piece, ...]:
    """Return what each rank of a mesh holds."""
    parts = mesh_shards(shape, mesh, spec)
    return tuple(
        Piece(part.rank, box.offset, box.shape, None, part.replica_id)
        for part in parts
        for box in part.boxes
        if box.shape
    )


def mesh_layout(mesh: Mesh, spec: PartitionSpec, shape: tuple[int, ...] = (48, 48)) -> ShardColumns:
    """Return one tensor of float32 as it lies on a mesh."""
    return columns_of({"w": Tensor(TensorKind(torch.float32, shape, 0), mesh_pieces(shape, mesh, spec))})


@st.composite
def pieces(draw: st.DrawFn, shape: tuple[int, ...], ranks: int, first: int) -> tuple[Piece, ...]:
    """Return who holds what of a tensor, on ranks from the first given: the main replicas tile it."""
    drawn = draw(layouts(shape, ranks)).pieces
    return tuple(Piece(first + one.rank, one.offset, one.shape, one.flat, one.replica) for one in drawn)


def copies(others: tuple[Piece, ...]) -> tuple[Piece, ...]:
    """Return pieces as replicas, none of them the main one."""
    return tuple(Piece(one.rank, one.offset, one.shape, one.flat, 7) for one in others)


@st.composite
def reshards(draw: st.DrawFn, *, odd: bool = True) -> Case:
    """Return two layouts; if odd, replicas may be cut otherwise than the main ones, and wanted places may overlap.

    Some tensors have another dtype afterwards.
    """
    ranks, more = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    first = draw(st.integers(0, ranks))
    source, target = {}, {}
    for number in range(draw(st.integers(1, 3))):
        shape = draw(shapes(max_axes=3))
        dtype = draw(st.sampled_from(list(DTYPES)))
        wanted_in = DTYPES[dtype] if draw(st.booleans()) else dtype
        before, after = (TensorKind(each, shape, 0) for each in (dtype, wanted_in))
        held, wanted = draw(pieces(shape, ranks, 0)), draw(pieces(shape, more, first))
        if odd and draw(st.booleans()):
            held += copies(draw(pieces(shape, ranks + 1, 0)))
        if odd and draw(st.booleans()):
            wanted += draw(pieces(shape, more, first))
        source[f"w{number}"], target[f"w{number}"] = Tensor(before, held), Tensor(after, wanted)
    if draw(st.booleans()):
        source["apart"] = source["w0"]
    return Case(columns_of(source), columns_of(target), draw(st.sampled_from([1, 8, 1 << 16])))
