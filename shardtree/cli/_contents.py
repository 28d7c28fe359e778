"""Rows for a checkpoint's contents: tensors with their cuts into pieces, objects, and short texts of other values."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
import torch
import typer

from ..core.codec import dtype_name
from ..core.layouts import Grid, chunk_grids
from ..core.mapping import ShardedObject, ShardedTensor
from ..core.trees import HOLE, Record, key_matcher, near_patterns, shell_differences
from ..errors import KeyMismatch, error_text, plural
from ..inspection import OpenCheckpoint, index_of, unproven_of
from ..shell.table.index import (
    DeferredMetadata,
    Index,
    IndexMetadata,
    item_sizes,
    reasoned,
    texts,
    untaken_of,
)


@dataclass(frozen=True, slots=True)
class TensorRow:
    """One stored tensor.

    Attributes:
        key: Key of the tensor.
        dtype: Name of the dtype.
        shape: Shape of the whole tensor.
        length: Number of bytes of all its elements.
        grid: Number of pieces along each axis; None if the format doesn't record it.
        is_proven: False if the shape was computed from the files' pieces: it is too small if a file is missing.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    length: int
    grid: Grid | None
    is_proven: bool = True

    @property
    def elements(self) -> int:
        """Number of elements."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class ObjectRow:
    """One cell of a stored array of objects.

    Attributes:
        key: Key of the array.
        unique_key: Unique key of the cell.
        shape: Shape of the array; -1 for a length that an old checkpoint omits.
        offset: Offset of the cell.
        length: Number of stored bytes; None if the format doesn't record it.
    """

    key: str
    unique_key: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    length: int | None


@dataclass(frozen=True, slots=True)
class StoredContents:
    """The tensors and objects of a checkpoint.

    Attributes:
        tensors: Tensors by key.
        objects: Objects by unique key.
        untaken: Reasons why further stored values can't be loaded and aren't included, by key or name.
    """

    tensors: tuple[TensorRow, ...]
    objects: tuple[ObjectRow, ...]
    untaken: Mapping[str, str] = field(default_factory=dict)


def shape_text(shape: Sequence[int]) -> str:
    """Return the lengths of a shape joined by multiplication signs; `scalar` if it has no axes.

    Examples:
        >>> shape_text((2,)), shape_text(())
        ('2', 'scalar')
    """
    return product_text(shape) or "scalar"


def product_text(numbers: Sequence[int]) -> str:
    """Return numbers joined by multiplication signs."""
    return " \N{MULTIPLICATION SIGN} ".join(map(str, numbers))


def cut_text(grid: Grid | None) -> str:
    """Return the number of pieces along each axis as text, or a word such as `whole` or `flat`; `?` if unknown."""
    if grid is None:  # Formats of other programs may not tell.
        return "?"
    if grid.kind in ("regular", "uneven"):
        return product_text(grid.counts) + " uneven" * (grid.kind == "uneven")
    return grid.kind if grid.kind in ("whole", "empty") else f"{grid.kind} ({grid.chunks})"


def contents_of(metadata: Mapping[str, ShardedTensor | ShardedObject]) -> StoredContents:
    """Return rows for the tensors and objects in a checkpoint's metadata.

    The number of pieces of each tensor and the length of each object are known only if the metadata is an
    `IndexMetadata`.

    Examples:
        >>> import torch
        >>> whole = ShardedTensor.from_rank_offsets("w", torch.zeros(2, 3))
        >>> contents_of({"w": whole}).tensors
        (TensorRow(key='w', dtype='float32', shape=(2, 3), length=24, grid=None, is_proven=True),)
    """
    if isinstance(metadata, IndexMetadata):
        index = metadata.index
        items = map(ShardedObject.empty_from_unique_key, index.object_names())
        objects = tuple(map(_object, items, index.object_length.tolist()))
        return StoredContents(_indexed_tensors(index, unproven_of(metadata)), objects, untaken_of(metadata))
    shards = [shard for shard in metadata.values() if isinstance(shard, ShardedTensor)]
    sizes = [prod(shard.global_shape) * shard.dtype.itemsize for shard in shards]
    tensors = tuple(
        TensorRow(shard.key, dtype_name(shard.dtype), shard.global_shape, nbytes, None)
        for shard, nbytes in zip(shards, sizes, strict=True)
    )
    objects = tuple(_object(shard, None) for shard in metadata.values() if isinstance(shard, ShardedObject))
    return StoredContents(tensors, objects)


def contents_at(tree: OpenCheckpoint) -> StoredContents:
    """Return rows for an open checkpoint's contents, under the names that a load uses.

    The number of pieces of each tensor is known only if the format has an index.
    """
    return _contents(tree, index_of(tree.checkpoint, tree.strategies, tree.metadata))


def contents_in_files(tree: OpenCheckpoint, patterns: Sequence[str] = ()) -> StoredContents:
    """Return rows for an open checkpoint's contents, under the names in its files.

    These names are known without further reads. In some formats a load uses other names, and finding them takes reads.
    The result for such a format is that of `contents_at` if a pattern matches none of the names in the files.
    """
    contents = _contents(tree, index_of(tree.checkpoint, tree.strategies))
    is_whole = not isinstance(tree.metadata, DeferredMetadata) or not _misses(patterns, _names_in([contents]))
    return contents if is_whole else contents_at(tree)


def _contents(tree: OpenCheckpoint, metadata: IndexMetadata | None) -> StoredContents:
    if metadata is None:
        return contents_of(tree.metadata)
    if isinstance(tree.metadata, DeferredMetadata):
        return contents_of(metadata)
    # If a format has no objects, the common state's format has them.
    is_all = len(metadata) == len(tree.metadata)
    others = {} if is_all else {key: shard for key, shard in tree.metadata.items() if key not in metadata}
    indexed, more = contents_of(metadata), contents_of(others)
    return StoredContents((*indexed.tensors, *more.tensors), (*indexed.objects, *more.objects), indexed.untaken)


def stored_index(tree: OpenCheckpoint, names: Iterable[str] = ()) -> Index | None:
    """Return the index of the pieces in a checkpoint's files; None if its format has no index.

    Args:
        tree: Open checkpoint.
        names: Names of tensors that the index must have; to find them, some formats read further files.
    """
    metadata = index_of(tree.checkpoint, tree.strategies, names)
    return None if metadata is None else metadata.shown


def select(contents: StoredContents, patterns: Sequence[str]) -> StoredContents:
    """Return the tensors and objects whose key matches one of the patterns; all of them if there are no patterns."""
    matches = matcher(patterns)
    return StoredContents(
        tuple(row for row in contents.tensors if matches(row.key)),
        tuple(row for row in contents.objects if matches(row.key) or matches(row.unique_key)),
    )


def matcher(patterns: Sequence[str]) -> Callable[[str], bool]:
    """Return the predicate for keys that match one of the patterns; without patterns, all keys match.

    Examples:
        >>> matches = matcher(["*.bias", "step"])
        >>> [matches(key) for key in ("fc.bias", "step", "fc.Bias")]
        [True, True, False]
    """
    return key_matcher(patterns) if patterns else lambda _: True


def check_patterns(command: str, patterns: Sequence[str], *checkpoints: StoredContents) -> None:
    """Raise if a pattern matches no key of any checkpoint: a misspelt one would select nothing, and a check would pass.

    Raises:
        KeyMismatch: A pattern matches no key; the error names each such pattern, with the most similar key.

    Examples:
        >>> row = TensorRow("fc.bias", "float32", (4,), 16, None)
        >>> check_patterns("inspect", ["*.bias"], StoredContents((row,), ()))
    """
    names = _names_in(checkpoints)
    misses = _misses(patterns, names)
    if misses:
        fix = "Leave out --key to see all keys; quote patterns, so that the shell does not expand them."
        untaken = {key: why for contents in checkpoints for key, why in contents.untaken.items()}
        lines = [reasoned(untaken, key) for key in filter(key_matcher(misses), untaken)]
        lines += near_patterns(_misses(misses, untaken), names)
        raise KeyMismatch(error_text(f"{command}: --key matches nothing", offenders=lines, fix=fix))
    note_shell_patterns("--key", patterns, names)


def _misses(patterns: Sequence[str], names: Collection[str]) -> list[str]:
    return [pattern for pattern in patterns if not any(map(key_matcher([pattern]), names))]


def note_shell_patterns(option: str, patterns: Iterable[str], keys: Collection[str]) -> None:
    """Print a note for each pattern that matches other keys as a shell pattern, where ``*`` matches dots too."""
    for line in shell_differences(patterns, keys):
        typer.echo(f"note: {option} {line}; * is one part between dots, ** any number", err=True)


def _names_in(checkpoints: Sequence[StoredContents]) -> set[str]:
    names = {row.key for contents in checkpoints for row in contents.tensors}
    return names | {name for contents in checkpoints for row in contents.objects for name in (row.key, row.unique_key)}


def _indexed_tensors(index: Index, unproven: Collection[str]) -> tuple[TensorRow, ...]:
    # The columns are read, since making a shard of each of very many keys would take most of the time.
    grids = chunk_grids(index.chunk_key, index.chunk_offset, index.chunk_shape, index.chunk_start, index.key_axes)
    names = texts(index.dtype_text, index.dtype_start)
    sizes = item_sizes(index).tolist()
    lengths = np.bincount(index.chunk_key, weights=index.chunk_length, minlength=index.key_axes.size).tolist()
    keys, width = index.keys(), index.key_shape.shape[1]
    shapes, axes, dtypes = index.key_shape.tolist(), index.key_axes.tolist(), index.key_dtype.tolist()
    return tuple(
        TensorRow(
            key,
            names[dtype],
            tuple(shape[width - count :]),
            _length(shape, sizes[dtype], nbytes),
            grid,
            key not in unproven,
        )
        for key, shape, count, dtype, grid, nbytes in zip(keys, shapes, axes, dtypes, grids, lengths, strict=True)
    )


def _length(shape: list[int], size: int, chunk_bytes: float) -> int:
    """Return a tensor's length in bytes; that of its chunks if `size`, the item size, is -1 (unknown)."""
    return prod(shape) * size if size >= 0 else int(chunk_bytes)


def _object(item: ShardedObject, length: int | None) -> ObjectRow:
    return ObjectRow(item.key, item.unique_key, item.global_shape, item.global_offset, length)


# This section shows values of the common state: in brief, and as JSON.

_LONGEST = 60
"""Upper bound of the characters of a value."""

_NAMES = 6
"""Upper bound of the names of a mapping's entries."""


def entries_of(common: Any) -> dict[str, Any]:
    """Return the top-level entries of a common state, by name or, in a list, by position.

    Examples:
        >>> entries_of({"step": 7}), entries_of([True])
        ({'step': 7}, {'0': True})
    """
    if isinstance(common, Mapping):
        return {_name(name): value for name, value in common.items()}
    if isinstance(common, list | tuple):
        return {str(place): value for place, value in enumerate(common) if value is not HOLE}
    return {} if common is HOLE else {"": common}


def _name(key: object) -> str:
    try:
        return str(key)
    except ValueError:  # The integer has more digits than Python converts to text.
        return f"({kind_of(key)} of very many digits)"


def kind_of(value: Any) -> str:
    """Return the name of a value's type; for a `Record`, the name of the class whose instance was stored.

    Examples:
        >>> kind_of(7), kind_of(Record("train.Config", {}))
        ('int', 'train.Config')
    """
    return value.type_name if isinstance(value, Record) else type(value).__name__


def brief(value: Any) -> str:
    """Return a short text that describes a value; for a mapping, its number of entries and the first names.

    Examples:
        >>> brief(7), brief({"lr": 0.1, "eps": 1e-8}), brief(torch.zeros(2, 3))
        ('7', '2 entries: lr, eps', 'float32 (2, 3)')
    """
    if isinstance(value, torch.Tensor):
        return f"{dtype_name(value.dtype)} {tuple(value.shape)}"
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {value.shape}"
    fields = fields_of(value)
    if fields is not None:
        names = list(fields)
        listing = ", ".join(names[:_NAMES]) + (", ..." if len(names) > _NAMES else "")
        return _short(f"{plural(len(names), 'entry').replace('entrys', 'entries')}{': ' * bool(names)}{listing}")
    if isinstance(value, str | bytes | bytearray):
        return _short(repr(value[:_LONGEST]))  # It is cut first, since a string may have megabytes.
    if isinstance(value, bool | int | float | complex | None | np.generic | torch.dtype | torch.device):
        # An int of more than 4300 digits has no decimal text in Python.
        if isinstance(value, int) and value.bit_length() > 200:
            return f"a number of {value.bit_length()} bits"
        return _short(str(value) if isinstance(value, np.generic) else repr(value))
    if isinstance(value, list | tuple | set | frozenset):
        return plural(len(value), "item")
    return ""


def plain(value: Any) -> Any:
    """Return a value in the types of JSON; values of other types become the text of `brief`.

    Examples:
        >>> plain({"a": (1, None), 2: float("inf")})
        {'a': [1, None], '2': 'inf'}
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    # json.dumps would write NaN and Infinity, which isn't JSON.
    if isinstance(value, float) and abs(value) < float("inf"):
        return value
    if isinstance(value, Mapping):
        return {_name(name): plain(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    return brief(value) or kind_of(value)


def fields_of(value: Any) -> dict[str, Any] | None:
    """Return the entries of a mapping, a `Record` or a namespace by name; None for any other value.

    Examples:
        >>> fields_of(Record("train.Config", {"lr": 0.1})), fields_of([0.1])
        ({'lr': 0.1}, None)
    """
    inner = value.fields if isinstance(value, Record) else value
    inner = vars(inner) if isinstance(inner, argparse.Namespace) else inner
    return {_name(name): entry for name, entry in inner.items()} if isinstance(inner, Mapping) else None


def _short(words: str) -> str:
    return words if len(words) <= _LONGEST else words[: _LONGEST - 3] + "..."
