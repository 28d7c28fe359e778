"""The source of a conversion: a checkpoint as a flat tree of lazy shards, whose every key must be accounted for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch

from ...errors import KeyMismatch, WorldError, error_text
from ...lazy import Fetch, LazyTensor, stored
from ...mapping import ShardedObject, ShardedTensor
from ...storage import Directory, in_larger_requests, storage_at
from ...strategies import Checkpoint, LoadOptions, Strategies
from ...world import World, one_process, share
from .._lazy_tree import OpenCheckpoint
from .._open import open_at, parse_together
from ..comparison._values import BoxReader

COMMON = "common"
"""What `leave_out` calls the common state."""

Shard = ShardedTensor | ShardedObject
Note = Callable[[Fetch], None]


class SourceKey(str):
    """The key of a source tensor: another class than str, so that a lazy tensor from elsewhere isn't taken for one."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, eq=False)
class StoredObject:
    """A sharded object that isn't read yet, as its shard's data.

    Attributes:
        unique_key: the object's.
        read: returns the object.
    """

    unique_key: str
    read: Callable[[], Any]


def open_alike(where: Directory, world: World, options: LoadOptions, strategies: Strategies | None) -> Checkpoint:
    """Return a checkpoint that each rank reads by itself, once rank 0 has parsed its metadata for all; collective.

    Raises:
        NotACheckpoint, CorruptCheckpoint, StrategyError: as `open_checkpoint`.
        WorldError: the ranks see different checkpoints there.
    """

    def alone() -> Checkpoint:
        return open_at(in_larger_requests(storage_at(where)), one_process(), options, strategies)

    # Each opens it, rather than take rank 0's word: so each notices when another save takes its place.
    found, fields = share(world, "convert: open", alone, lambda checkpoint: checkpoint.fields)
    other = next((rank for rank, each in enumerate(fields) if each != fields[0]), None)
    if other is not None:
        what = f"convert: rank {other} sees another checkpoint than rank 0 in {found.storage.where()!r}"
        raise WorldError(error_text(what, fix="Wait until it is saved, on storage that all ranks share."))
    parse_together(replace(found, world=world), None, strategies)
    return found


def source_tree(reader: BoxReader, left_out: Sequence[str], note: Note) -> dict[str, Shard]:
    """Return a checkpoint as a dict of whole lazy shards, by key and unique key.

    Args:
        reader: of the checkpoint.
        left_out: keys and unique keys that don't belong to the tree.
        note: called with every box that is read, and for every object with a box of no axes.
    """
    absent = set(left_out)
    return {key: _shard(reader, key, note) for key in reader.opened if key not in absent}


def _shard(reader: BoxReader, key: str, note: Note) -> Shard:
    known = reader.opened.metadata[key]
    if isinstance(known, ShardedObject):
        return replace(known, data=StoredObject(key, partial(_read_object, reader.opened, key, note)))
    name = SourceKey(key)
    read_box = partial(_read_box, reader, name, known.dtype, note)
    return replace(known, data=stored(read_box, known.global_shape, known.dtype, name=name))


def _read_object(opened: OpenCheckpoint, unique_key: str, note: Note) -> Any:
    note(Fetch(SourceKey(unique_key), torch.uint8, (), ()))
    return opened[unique_key].data


def _read_box(
    reader: BoxReader, key: SourceKey, dtype: torch.dtype, note: Note, offset: tuple[int, ...], shape: tuple[int, ...]
) -> torch.Tensor:
    note(Fetch(key, dtype, offset, shape))
    return reader.read(key, offset, shape)


def expect_tensors(reader: BoxReader, tensors: Iterable[ShardedTensor]) -> None:
    """Announce that these will be read."""
    lazies = (shard.data for shard in tensors if isinstance(shard.data, LazyTensor))
    reader.expect(fetch for lazy in lazies for fetch in lazy.fetches if isinstance(fetch.name, SourceKey))


def left_out_keys(metadata: Mapping[str, Shard], patterns: Sequence[str]) -> tuple[str, ...]:
    """Return the keys and unique keys that patterns name; ``"common"`` names the common state alone.

    Args:
        metadata: what is stored.
        patterns: globs; an object is named by its key or its unique key.

    Raises:
        KeyMismatch: a pattern names nothing.

    Examples:
        >>> rng = ShardedObject("rng", None, (1,), (0,))
        >>> left_out_keys({"rng/shard_0_1": rng}, ["rng", "common"])
        ('rng/shard_0_1',)
    """
    if isinstance(patterns, str) or not all(isinstance(pattern, str) for pattern in patterns):
        raise KeyMismatch(error_text("convert: leave_out", found=repr(patterns)[:200], expected="a list of patterns"))
    globs = [pattern for pattern in patterns if pattern != COMMON]
    named = {
        pattern: [key for key, shard in metadata.items() if _is_named(pattern, key, shard)]
        for pattern in dict.fromkeys(globs)
    }
    nothing = [repr(pattern) for pattern, keys in named.items() if not keys]
    if nothing:
        fix = "Correct the pattern, or take it out if there is nothing to leave out."
        raise KeyMismatch(error_text("convert: leave_out names what isn't in the source", offenders=nothing, fix=fix))
    chosen = {key for keys in named.values() for key in keys}
    return tuple(key for key in metadata if key in chosen)


def _is_named(pattern: str, key: str, shard: Shard) -> bool:
    return fnmatchcase(key, pattern) or fnmatchcase(shard.key, pattern)
