"""The source of a conversion: a checkpoint as a flat dict of lazy shards; each key must be used or left out."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from ..core.codec import is_dense
from ..core.geometry import slices
from ..core.lazy import Fetch, stored
from ..core.mapping import ShardedObject, ShardedTensor
from ..core.trees import (
    HOLE,
    holds_tensors,
    key_matcher,
    leaves_with_paths,
    near_patterns,
    path_key,
    shell_differences,
)
from ..errors import KeyMismatch, UnsafeFile, UnsupportedValue, WorldError, error_text, render_path
from ..inspection import BoxReader, OpenCheckpoint
from ..shell.checkpoint import load_common, open_at, parse_together
from ..shell.storage import Directory, storage_at
from ..shell.table import Checkpoint, LoadOptions, Strategies
from ..shell.table.index import untaken_of
from ..shell.world import World, one_process, share
from ..stores import in_larger_requests

COMMON = "common"
"""Name of the common state in `leave_out`."""

Shard = ShardedTensor | ShardedObject
Note = Callable[[Fetch], None]


class SourceKey(str):
    """Key that names a lazy tensor of the source; lazy tensors of other checkpoints have plain strings as names."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, eq=False)
class StoredObject:
    """Data of a sharded object that isn't read yet.

    Attributes:
        unique_key: Unique key of the object.
        read: Function that returns the object.
    """

    unique_key: str
    read: Callable[[], Any]


def open_alike(where: Directory, world: World, options: LoadOptions, strategies: Strategies | None) -> Checkpoint:
    """Open a checkpoint that each rank then reads by itself; rank 0 parses the metadata for all. Collective.

    Raises:
        NotACheckpoint, CorruptCheckpoint, StrategyError: The checkpoint can't be opened, as in `open_checkpoint`.
        WorldError: The ranks see different checkpoints there.
    """

    def alone() -> Checkpoint:
        return open_at(in_larger_requests(storage_at(where)), one_process(), options, strategies)

    # Each rank opens it itself, so that each notices when another save replaces it.
    opened, fields = share(world, "convert: open", alone, lambda checkpoint: checkpoint.fields)
    other = next((rank for rank, fields_of_rank in enumerate(fields) if fields_of_rank != fields[0]), None)
    if other is not None:
        heading = f"convert: rank {other} sees another checkpoint than rank 0 in {opened.storage.where()!r}"
        raise WorldError(error_text(heading, fix="Wait until the save ends, and use storage that all ranks share."))
    checkpoint = parse_together(replace(opened, world=world), None, strategies)
    return replace(checkpoint, world=opened.world)


def source_tree(
    reader: BoxReader, leave_out: Sequence[str], note: Note
) -> tuple[dict[str, Shard], tuple[str, ...], tuple[str, ...]]:
    """Return a checkpoint as a dict of whole lazy shards, and the keys and paths that are left out of it.

    Args:
        reader: Reader of the checkpoint.
        leave_out: Patterns of keys to leave out of the dict; `COMMON` leaves out the common state. The tensors of a
            left-out common state become tensors of the dict, with their paths as keys.
        note: Callback for each read: its argument is the box of a tensor, or a box without axes for an object.

    Returns:
        The dict, whose keys are tensors' keys and objects' unique keys; the keys that patterns leave out; and the
        paths of tensors in a left-out common state that can't be in the dict. These are sparse, lie in a value such as
        a set, or have the key of another tensor.

    Raises:
        KeyMismatch: A pattern matches nothing.
    """
    metadata = reader.tree.metadata
    common, others = _tensors_of_common(reader.tree, note) if COMMON in leave_out else ({}, ())
    left_out = left_out_keys("convert", {**metadata, **common} if common else metadata, leave_out, untaken_of(metadata))
    absent = set(left_out)
    tree = {key: _shard(reader, key, note) for key in reader.tree if key not in absent}
    return tree | {key: shard for key, shard in common.items() if key not in absent}, left_out, others


def _tensors_of_common(tree: OpenCheckpoint, note: Note) -> tuple[dict[str, Shard], tuple[str, ...]]:
    shards, others, common = dict[str, Shard](), [], HOLE
    # Values that need pickled code stay unread: they may be the reason why the common state is left out.
    with suppress(UnsafeFile, UnsupportedValue):
        common = load_common(tree.checkpoint, None, tree.strategies)
    for path, leaf in leaves_with_paths(common):
        key = path_key(path)
        if isinstance(leaf, torch.Tensor) and is_dense(leaf) and key not in tree.metadata and key not in shards:
            shards[key] = _common_shard(SourceKey(key), leaf.detach(), note)
        elif holds_tensors(leaf):
            others.append(render_path(path, COMMON))
    return shards, tuple(others)


def _common_shard(name: SourceKey, tensor: torch.Tensor, note: Note) -> ShardedTensor:
    def read_box(offset: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
        note(Fetch(name, tensor.dtype, offset, shape))
        return tensor[slices(offset, shape)].clone()

    whole = ShardedTensor.from_rank_offsets(str(name), tensor)
    return replace(whole, data=stored(read_box, whole.global_shape, tensor.dtype, name=name))


def _shard(reader: BoxReader, key: str, note: Note) -> Shard:
    shard = reader.tree.metadata[key]
    if isinstance(shard, ShardedObject):
        return replace(shard, data=StoredObject(key, partial(_read_object, reader.tree, key, note)))
    name = SourceKey(key)
    read_box = partial(_read_box, reader, name, shard.dtype, note)
    return replace(shard, data=stored(read_box, shard.global_shape, shard.dtype, name=name))


def _read_object(tree: OpenCheckpoint, unique_key: str, note: Note) -> Any:
    note(Fetch(SourceKey(unique_key), torch.uint8, (), ()))
    return tree[unique_key].data


def _read_box(
    reader: BoxReader, key: SourceKey, dtype: torch.dtype, note: Note, offset: tuple[int, ...], shape: tuple[int, ...]
) -> torch.Tensor:
    note(Fetch(key, dtype, offset, shape))
    return reader.read(key, offset, shape)


def left_out_keys(
    doing: str, metadata: Mapping[str, Shard], patterns: Sequence[str], others: Collection[str] = ()
) -> tuple[str, ...]:
    """Return the keys and unique keys that patterns match; ``"common"`` names only the common state.

    Args:
        doing: Name of the operation in error messages.
        metadata: Stored tensors and objects.
        patterns: Patterns of keys; an object matches by its key or its unique key. A pattern gives a FutureWarning if
            it matches other keys as a shell pattern, where ``*`` matches dots too.
        others: Further keys that patterns may match, such as those of unreadable values.

    Raises:
        KeyMismatch: A pattern matches nothing.

    Examples:
        >>> rng = ShardedObject("rng", None, (1,), (0,))
        >>> left_out_keys("convert", {"rng/shard_0_1": rng}, ["rng", "common"])
        ('rng/shard_0_1',)
    """
    if isinstance(patterns, str) or not all(isinstance(pattern, str) for pattern in patterns):
        raise KeyMismatch(
            error_text(f"{doing}: wrong leave_out", found=repr(patterns)[:200], expected="a list of patterns")
        )
    key_patterns = [pattern for pattern in dict.fromkeys(patterns) if pattern != COMMON]
    names = {name for key, shard in metadata.items() for name in (key, shard.key)} | {*others}
    nothing = [pattern for pattern in key_patterns if not any(map(key_matcher([pattern]), names))]
    if nothing:
        fix = (
            "Correct the pattern, or remove it if there is nothing to leave out. * matches one part between dots,\n"
            "  ** any number of parts."
        )
        heading = f"{doing}: leave_out has patterns that match nothing"
        raise KeyMismatch(error_text(heading, offenders=near_patterns(nothing, names, widen=False), fix=fix))
    note_shell_patterns(f"{doing}: leave_out", key_patterns, names)
    fits = key_matcher(key_patterns)
    return tuple(key for key, shard in metadata.items() if fits(key) or fits(shard.key))


def note_shell_patterns(what: str, patterns: Iterable[str], keys: Collection[str]) -> None:
    """Warn of patterns that match different keys here than in a shell, where ``*`` matches dots too.

    `what` names the patterns in the warning, such as "convert: layout".
    """
    lines = shell_differences(patterns, keys)
    if lines:
        heading = f"{what}: patterns that match other keys than they would as a shell's globs"
        fix = "Write ** where dots may be matched too: * matches one part between dots, ** any number of parts."
        warnings.warn(error_text(heading, offenders=lines, fix=fix), FutureWarning, 3)
