"""What is in a checkpoint, as rows: tensors and how they are cut, objects, and the common state in short."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import translate
from math import prod

import numpy as np

from ..checkpoint import OpenCheckpoint
from ..codec import dtype_name
from ..errors import KeyMismatch, error_text
from ..layouts import Grid, chunk_grids
from ..mapping import ShardedObject, ShardedTensor
from ..plans import near_names
from ..strategies import StrategyAction, get_default_strategy
from ..strategies.index import Index, IndexMetadata, item_sizes, texts


@dataclass(frozen=True, slots=True)
class TensorRow:
    """One stored tensor.

    Attributes:
        key: its key.
        dtype: the dtype's name.
        shape: of the whole tensor.
        length: bytes of all its elements.
        grid: how it is cut, None where the format doesn't say.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    length: int
    grid: Grid | None

    @property
    def elements(self) -> int:
        """How many elements it has."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class ObjectRow:
    """One cell of a stored array of objects.

    Attributes:
        key: the array's key.
        unique_key: the cell's own.
        shape: of the array; -1 for a length that an old checkpoint left out.
        offset: of the cell.
        length: bytes that it takes, None where the format doesn't say.
    """

    key: str
    unique_key: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    length: int | None


@dataclass(frozen=True, slots=True)
class Contents:
    """Everything but the common state.

    Attributes:
        tensors: by key.
        objects: by unique key.
    """

    tensors: tuple[TensorRow, ...]
    objects: tuple[ObjectRow, ...]


def contents_of(metadata: Mapping[str, ShardedTensor | ShardedObject]) -> Contents:
    """Return the rows of what a format says is stored, whichever format it is.

    Examples:
        >>> import torch
        >>> whole = ShardedTensor.from_rank_offsets("w", torch.zeros(2, 3))
        >>> contents_of({"w": whole}).tensors
        (TensorRow(key='w', dtype='float32', shape=(2, 3), length=24, grid=None),)
    """
    if isinstance(metadata, IndexMetadata):
        return Contents(_indexed_tensors(metadata.index), _indexed_objects(metadata.index))
    tensors = (_tensor(shard) for shard in metadata.values() if isinstance(shard, ShardedTensor))
    objects = (_object(shard, None) for shard in metadata.values() if isinstance(shard, ShardedObject))
    return Contents(tuple(tensors), tuple(objects))


def contents_at(tree: OpenCheckpoint) -> Contents:
    """Return the rows of an open checkpoint, with how tensors are cut where its format keeps an index of any kind."""
    fields = tree.checkpoint.fields
    backend = fields["sharded_backend"], fields["sharded_backend_version"]
    metadata = get_default_strategy(StrategyAction.LOAD_METADATA, *backend, strategies=tree.strategies)(tree.checkpoint)
    if not isinstance(metadata, IndexMetadata):
        return contents_of(tree.metadata)
    # Where that format holds no objects, the common state's format does.
    rest = {} if len(metadata) == len(tree.metadata) else {k: v for k, v in tree.metadata.items() if k not in metadata}
    indexed, others = contents_of(metadata), contents_of(rest)
    return Contents((*indexed.tensors, *others.tensors), (*indexed.objects, *others.objects))


def select(contents: Contents, patterns: Sequence[str]) -> Contents:
    """Return the tensors and objects whose key matches one of the patterns; everything where there is none."""
    matches = matcher(patterns)
    return Contents(
        tuple(row for row in contents.tensors if matches(row.key)),
        tuple(row for row in contents.objects if matches(row.key) or matches(row.unique_key)),
    )


def matcher(patterns: Sequence[str]) -> Callable[[str], bool]:
    """Return whether a key matches one of a shell's patterns; every key does where there is none.

    Examples:
        >>> matches = matcher(["*.bias", "step"])
        >>> [matches(key) for key in ("fc.bias", "step", "fc.Bias")]
        [True, True, False]
    """
    if not patterns:
        return lambda _: True
    expression = re.compile("|".join(map(translate, patterns)))
    return lambda key: expression.match(key) is not None


def check_patterns(command: str, patterns: Sequence[str], *checkpoints: Contents) -> None:
    """Raise where a pattern matches no key of any of the checkpoints: a misspelt one would show that all is well.

    Raises:
        KeyMismatch: names each such pattern, and the key that looks most like it.

    Examples:
        >>> check_patterns("inspect", ["*.bias"], Contents((TensorRow("fc.bias", "float32", (4,), 16, None),), ()))
    """
    names = {row.key for contents in checkpoints for row in contents.tensors}
    names |= {name for contents in checkpoints for row in contents.objects for name in (row.key, row.unique_key)}
    unmatched = [pattern for pattern in patterns if not any(map(matcher([pattern]), names))]
    if unmatched:
        near = near_names(unmatched, names)
        lines = [f"{one!r}" + (f" (did you mean {near[one]!r}?)" if one in near else "") for one in unmatched]
        fix = "Leave out --key to see all keys; quote a pattern, so that the shell leaves its stars alone."
        raise KeyMismatch(error_text(f"{command}: --key matches nothing", offenders=lines, fix=fix))


def _indexed_tensors(index: Index) -> tuple[TensorRow, ...]:
    # By columns: a shard a key would take most of the time where there are very many.
    grids = chunk_grids(index.chunk_key, index.chunk_offset, index.chunk_shape, index.chunk_start, index.key_axes)
    names = texts(index.dtype_text, index.dtype_start)
    sizes = item_sizes(index).tolist()
    stored = np.bincount(index.chunk_key, weights=index.chunk_length, minlength=index.key_axes.size).tolist()
    keys, width = texts(index.key_text, index.key_start), index.key_shape.shape[1]
    shapes, axes, dtypes = index.key_shape.tolist(), index.key_axes.tolist(), index.key_dtype.tolist()
    return tuple(
        TensorRow(key, names[dtype], tuple(shape[width - count :]), _length(shape, sizes[dtype], held), grid)
        for key, shape, count, dtype, grid, held in zip(keys, shapes, axes, dtypes, grids, stored, strict=True)
    )


def _length(shape: list[int], size: int, stored: float) -> int:
    """Return a tensor's length in bytes, of what is stored where this torch doesn't know the dtype."""
    return prod(shape) * size if size >= 0 else int(stored)


def _indexed_objects(index: Index) -> tuple[ObjectRow, ...]:
    keys = texts(index.object_text, index.object_start)
    lengths = index.object_length.tolist()
    return tuple(
        _object(ShardedObject.empty_from_unique_key(key), length) for key, length in zip(keys, lengths, strict=True)
    )


def _tensor(shard: ShardedTensor) -> TensorRow:
    length = prod(shard.global_shape) * shard.dtype.itemsize
    return TensorRow(shard.key, dtype_name(shard.dtype), shard.global_shape, length, None)


def _object(item: ShardedObject, length: int | None) -> ObjectRow:
    return ObjectRow(item.key, item.unique_key, item.global_shape, item.global_offset, length)
