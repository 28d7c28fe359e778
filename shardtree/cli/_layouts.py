"""Layouts of tensors over ranks: a tree of shards without data for each rank.

A layout is typed on the command line, as a mesh with specs or a number of ranks, or follows from the pieces in a
checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import typer

from ..core.mapping import ShardedTensor, with_keys
from ..core.trees import near_patterns
from ..errors import KeyMismatch, error_text
from ..inspection import OpenCheckpoint
from ..meshes import Mesh, PartitionSpec, abstract_at
from ..shell.table.index import Index
from ._contents import matcher, note_shell_patterns, stored_index
from ._names import did_you_mean

RankTree = dict[str, ShardedTensor]


@dataclass(frozen=True, slots=True)
class RankTrees(Sequence[RankTree]):
    """Sequence with the tree of each rank. A tree is made at each access, since all ranks' trees could fill the memory.

    Attributes:
        make: Function that returns the tree of a rank.
        ranks: Number of ranks.

    Examples:
        >>> RankTrees(lambda rank: {}, 2)[1], len(list(RankTrees(lambda rank: {}, 2)))
        ({}, 2)
    """

    make: Callable[[int], RankTree]
    ranks: int

    def __len__(self) -> int:
        return self.ranks

    def __getitem__(self, rank: Any) -> Any:
        return self.make(range(self.ranks)[rank])


# This section makes typed layouts.


@dataclass(frozen=True, slots=True)
class MeshLayout:
    """Layout from the command line: a mesh, and partition specs by key pattern.

    Attributes:
        mesh: Mesh of the ranks.
        specs: Patterns of keys, with the specs of their tensors. A tensor is cut by the first spec whose pattern
            matches its key, leaving out specs with more entries than the tensor has axes. A tensor without a spec is
            whole on every rank.
    """

    mesh: Mesh
    specs: tuple[tuple[str, PartitionSpec], ...]


def mesh_layout(mesh: str | None, specs: Sequence[str], ranks: int | None) -> MeshLayout | None:
    """Return the layout that the command's options describe; None if no option is given.

    Args:
        mesh: Axes with their sizes, as tp=4,dp=2; ranks along the last axis are consecutive.
        specs: Texts PATTERN=SPEC, such as **.weight=tp,-. A spec has an entry for each tensor axis: a mesh axis,
            several mesh axes joined by +, or - if the tensor axis isn't cut.
        ranks: Number of ranks that every tensor is cut over along its first axis, instead of mesh and specs.

    Raises:
        typer.BadParameter: The options contradict each other, or can't be parsed.

    Examples:
        >>> mesh_layout("tp=4,dp=2", ["**.weight=tp,-"], None).specs
        (('**.weight', PartitionSpec('tp', None)),)
    """
    if ranks is not None:
        if mesh is not None or specs:
            raise typer.BadParameter("a number of ranks is a layout by itself: leave out the mesh and the specs")
        return MeshLayout(Mesh(rank=ranks), (("**", PartitionSpec("rank")),))
    if mesh is None:
        if specs:
            raise typer.BadParameter("specs need a mesh, such as tp=4,dp=2")
        return None
    parts = [part.partition("=") for part in mesh.split(",")]
    if not all(name.isidentifier() and size.isascii() and size.isdecimal() and int(size) for name, _, size in parts):
        raise typer.BadParameter(f"{mesh!r} is not a mesh: axes with their sizes, as in tp=4,dp=2")
    axes = {name: int(size) for name, _, size in parts}
    if len(axes) < len(parts):
        raise typer.BadParameter(f"{mesh!r} names an axis twice")
    return MeshLayout(Mesh(**axes), tuple(_spec(text, axes) for text in specs))


def _spec(text: str, axes: dict[str, int]) -> tuple[str, PartitionSpec]:
    pattern, sign, entries = text.rpartition("=")  # A key may contain the sign.
    if not sign or not pattern:
        raise typer.BadParameter(f"{text!r} is not PATTERN=SPEC, as in '**.weight=tp,-'")
    split = [tuple(entry.split("+")) if entry not in ("", "-") else () for entry in entries.split(",")]
    for axis in {axis for entry in split for axis in entry} - axes.keys():
        raise typer.BadParameter(f"{text!r}: the mesh has no axis {axis!r}. {did_you_mean(axis, axes.keys())}")
    names = [axis for entry in split for axis in entry]
    if len(set(names)) < len(names):
        raise typer.BadParameter(f"{text!r} names an axis of the mesh twice")
    return pattern, PartitionSpec(*(entry or None for entry in split))


def trees_on_mesh(shards: RankTree, layout: MeshLayout) -> RankTrees:
    """Return each rank's tree of shards, without data, for whole tensors that are cut over a mesh.

    Args:
        shards: Whole tensors by key.
        layout: Mesh of the ranks, and specs that cut the tensors.

    Raises:
        KeyMismatch: A spec fits no tensor.
        MetadataError: A spec doesn't fit its tensor.
    """
    rows = [(pattern, matcher([pattern]), spec) for pattern, spec in layout.specs]

    def fitting(key: str) -> tuple[str, PartitionSpec] | None:
        # A spec for matrices isn't used for vectors that its pattern fits too: '**.weight' also fits norms.
        axes = len(shards[key].global_shape)
        specs = ((pattern, spec) for pattern, fits, spec in rows if fits(key) and len(spec.entries) <= axes)
        return next(specs, None)

    specs = {key: fitting(key) for key in shards}
    patterns = {row[0] for row in specs.values() if row is not None}
    spare = [pattern for pattern, _ in layout.specs if pattern not in patterns]
    if spare:
        lines = [_why_unused(pattern, fits, spec, shards) for pattern, fits, spec in rows if pattern in spare]
        fix = "Correct or leave out these specs; quote patterns, so that the shell does not expand them."
        raise KeyMismatch(error_text("--spec: these specs are used for no tensor", offenders=lines, fix=fix))
    note_shell_patterns("--spec", patterns, shards)
    # Layers repeat shapes and specs, so that one tensor of each kind is cut, and others copy its cut.
    alike = {key: (shards[key].global_shape, shards[key].dtype, row and row[1]) for key, row in specs.items()}
    first = {kind: key for key, kind in reversed(alike.items())}
    models = {key: shards[key] for key in shards if first[alike[key]] == key}

    def tree(rank: int) -> RankTree:
        spec_of = {key: alike[key][2] or PartitionSpec() for key in models}
        cuts: RankTree = abstract_at(models, layout.mesh, lambda key, _: spec_of[key], layout.mesh.ranks[rank])
        keys = [key for key in shards if first[alike[key]] in cuts]
        return dict(zip(keys, with_keys([cuts[first[alike[key]]] for key in keys], keys), strict=True))

    tree(0)  # A spec that doesn't fit its tensor raises at once.
    return RankTrees(tree, layout.mesh.size)


def _why_unused(pattern: str, fits: Callable[[str], bool], spec: PartitionSpec, shards: RankTree) -> str:
    keys = [key for key in shards if fits(key)]
    if not keys:
        return near_patterns([pattern], shards)[0]
    key = max(keys, key=lambda key: len(shards[key].global_shape))
    axes = len(shards[key].global_shape)
    if len(spec.entries) > axes:
        return f"{pattern!r}: a spec of {len(spec.entries)} axes, but {key!r} has {axes}"
    return f"{pattern!r} fits {key!r}, but an earlier --spec does too: put this one first"


# This section makes stored layouts.


def stored_trees(tree: OpenCheckpoint, matches: Callable[[str], bool]) -> Sequence[RankTree]:
    """Return a tree for each rank, as if piece i of each stored tensor, in row-major order, were on rank i.

    A checkpoint records the pieces, but not the ranks that had them.

    Args:
        tree: Open checkpoint.
        matches: Predicate of the wanted keys.

    Returns:
        A tree for each rank; one tree with whole tensors if the format has no index of pieces.
    """
    wholes = whole_tensors(tree, matches)
    index = stored_index(tree, wholes)
    if index is None:
        return [wholes]
    keys = index.keys()
    order = np.lexsort((index.chunk_start, *index.chunk_offset.T[::-1], index.chunk_key))
    is_whole = np.array([key in wholes for key in keys], dtype=np.bool_)
    row = order[is_whole[index.chunk_key[order]]]
    key = index.chunk_key[row]
    place = np.arange(row.size) - np.searchsorted(key, key)

    def pieces(rank: int) -> RankTree:
        chunks = row[place == rank].tolist()
        names = [keys[number] for number in index.chunk_key[chunks].tolist()]
        return {name: chunk_shard(index, chunk, wholes[name]) for name, chunk in zip(names, chunks, strict=True)}

    return RankTrees(pieces, int(place.max(initial=-1)) + 1)


def chunk_shard(index: Index, row: int, whole: ShardedTensor) -> ShardedTensor:
    """Return a stored chunk as a shard without data.

    Args:
        index: Index of the checkpoint.
        row: Number of the chunk in the index.
        whole: Whole tensor that has the chunk.
    """
    axes, shape = len(whole.global_shape), whole.global_shape
    offset, local = (column[row].tolist()[-axes or None :][:axes] for column in (index.chunk_offset, index.chunk_shape))
    start, stop = int(index.chunk_start[row]), int(index.chunk_stop[row])
    flat = None if start < 0 else slice(start, stop)
    return ShardedTensor(whole.key, None, whole.dtype, tuple(local), shape, tuple(offset), None, flattened_range=flat)


def whole_tensors(tree: OpenCheckpoint, matches: Callable[[str], bool]) -> RankTree:
    """Return the whole tensors of a checkpoint whose keys match, without data."""
    return {key: shard for key, shard in tree.metadata.items() if isinstance(shard, ShardedTensor) and matches(key)}
