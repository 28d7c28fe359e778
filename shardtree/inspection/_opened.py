"""An open checkpoint as an immutable mapping of lazy shards, whose elements are read on request."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, repeat
from operator import attrgetter
from typing import Any

import numpy as np
import torch

from ..core.ambient import shielded
from ..core.deferred import notebook_html
from ..core.layouts import StoredLayout
from ..core.lazy import frozen_values, stored_each
from ..core.mapping import ShardedObject, ShardedTensor, box_of, with_data
from ..core.trees import near_names, without_holes
from ..errors import KeyMismatch, ShapeError, StrategyError, error_text
from ..maintenance import check_taken
from ..shell.checkpoint import (
    common_backend,
    given_options,
    load_common,
    open_at,
    sharded_backend,
    sharded_metadata,
    strategy_of,
)
from ..shell.checkpoint.loading import new_memory
from ..shell.storage import Directory
from ..shell.table import (
    Checkpoint,
    LoadOptions,
    PairsMapping,
    Strategies,
    Strategy,
    StrategyAction,
    find_strategy,
    unreplaced,
)
from ..shell.table.index import (
    DeferredMetadata,
    Index,
    IndexMetadata,
    chunks_of,
    stored_columns,
    untaken_of,
)
from ..shell.world import one_process
from ..traces import Trace, transformed
from ..transforms import nested

_SHARD_FIELDS = ("key", "dtype", "global_shape", "local_shape", "flattened_range")

_BATCH = 64
"""Number of values that metadata makes at a time; it is small, so that a caller who drops shards while iterating
doesn't trigger the garbage collector."""


@dataclass(frozen=True, slots=True, eq=False)
class OpenCheckpoint(PairsMapping[ShardedTensor | ShardedObject]):
    """A checkpoint as a mapping: shard key → whole tensor with lazy data, unique key → object.

    Values are made on request; a tensor's elements are read by ``tree[key].data[...].read()``, and only those.
    Operations recorded on lazy data, by hand or by a factory or a tree map, cost no read.

    Attributes:
        checkpoint: The open checkpoint.
        metadata: Stored tensors and objects, without data.
        strategies: Dispatch table of strategies; None for the process-wide table.
    """

    checkpoint: Checkpoint
    metadata: Mapping[str, ShardedTensor | ShardedObject]
    strategies: Strategies | None

    def __getitem__(self, key: str) -> ShardedTensor | ShardedObject:
        """Return the tensor with a key, with lazy data, or the object with a unique key, with its data.

        Raises:
            KeyMismatch: No tensor or object of that name is stored.
            UnsupportedValue: It is stored in a way that can't be read, for example in a dtype that torch lacks.
        """
        shard = self.metadata.get(key)
        if shard is None:
            check_taken(untaken_of(self.metadata), [key], "open")
            heading, fix = f"open: the checkpoint has no key {key!r}", "list(open_checkpoint(...)) has all keys."
            raise KeyMismatch(error_text(heading, fix=fix))
        if isinstance(shard, ShardedObject):
            return self._read(shard)
        return self._lazy(self._load_sharded(), [shard])[0]

    def __contains__(self, key: object) -> bool:
        """Return whether a tensor or object of that name is stored and can be read."""
        return key in self.metadata

    def get(self, key: str, default: Any = None) -> Any:
        """Return the tensor or object with a key, as ``self[key]`` does, or the default if there is none to read."""
        return self[key] if key in self.metadata else default

    def __iter__(self) -> Iterator[str]:
        """Return an iterator over the keys, tensors' first, each kind sorted."""
        return iter(self.metadata)

    def __len__(self) -> int:
        """Return the number of stored tensors and objects."""
        return len(self.metadata)

    def pairs(self) -> Iterator[tuple[str, ShardedTensor | ShardedObject]]:
        """Yield each key with its value, in order."""
        metadata, load_sharded = iter(self.metadata.items()), self._load_sharded()
        while some := list(islice(metadata, _BATCH)):
            shards = [shard for _, shard in some if isinstance(shard, ShardedTensor)]
            tensors = iter(self._lazy(load_sharded, shards))
            for key, shard in some:
                yield key, self._read(shard) if isinstance(shard, ShardedObject) else next(tensors)

    def _lazy(self, load_sharded: Strategy, shards: Sequence[ShardedTensor]) -> list[ShardedTensor]:
        """Return stored tensors with lazy data, which reads elements on request."""
        keys, dtypes, shapes, local_shapes, flat = (list(map(attrgetter(name), shards)) for name in _SHARD_FIELDS)
        columns: dict[str, Iterable[Any]] = {"tree": repeat(self), "load_sharded": repeat(load_sharded)}
        columns |= {"key": keys, "dtype": dtypes, "global_shape": shapes}
        data = stored_each(frozen_values(StoredBoxes, len(keys), columns), shapes, dtypes, keys)
        # The constructor is skipped: the index was checked as columns, and checking each shard again took nearly all of
        # the time for 100,000 tensors.
        if local_shapes == shapes and not any(flat):
            return with_data(shards, data)
        # Metadata from a caller's strategy may not be of whole tensors: the slower constructor raises the error.
        return [replace(shard, data=lazy) for shard, lazy in zip(shards, data, strict=True)]

    def _load_sharded(self) -> Strategy:
        # The row is looked up once for all reads of a tensor: the lookup takes a tenth of a small read.
        backend = sharded_backend(self.checkpoint.fields)
        return strategy_of(StrategyAction.LOAD_SHARDED, None, backend, self.strategies)

    def _read(self, item: ShardedObject) -> ShardedObject:
        """Return a stored object with its data."""
        backend = sharded_backend(self.checkpoint.fields)
        if find_strategy(StrategyAction.LOAD_OBJECTS, *backend, strategies=self.strategies) is None:
            # The sharded format may hold tensors alone; objects are then with the common state.
            backend = common_backend(self.checkpoint.fields)
        load_objects = strategy_of(StrategyAction.LOAD_OBJECTS, None, backend, self.strategies)
        return replace(item, data=unreplaced(self.checkpoint, load_objects, [item])[0])

    def __repr__(self) -> str:
        """Return the path and the size of the checkpoint."""
        return f"OpenCheckpoint({self.checkpoint.storage.where()!r}, {len(self)} keys)"

    def _repr_html_(self) -> str:
        return notebook_html(self)

    def stored_layout(self, *keys: str) -> StoredLayout:
        """Return the boxes in which the named tensors are stored, and the file of each box. No element is read.

        Args:
            *keys: Keys of tensors; all tensors if none are given.

        Raises:
            KeyMismatch: One of the tensors isn't stored.
            UnsupportedValue: One of them is stored in a way that can't be read.
            StrategyError: The format doesn't record the files of its chunks.
        """
        tensors = (key for key, shard in self.metadata.items() if isinstance(shard, ShardedTensor))
        return layout_in(self.checkpoint, self.strategies, keys or tuple(tensors))

    def common(self) -> Any:
        """Return the common state: the plain values stored outside the shards."""
        return without_holes(load_common(self.checkpoint, None, self.strategies))

    def nested(self, separator: str = ".") -> dict[str, Any]:
        """Return the mapping as nested dicts: each key is split at the separators in it.

        Raises:
            TreeError: A key is also the prefix of another one, such as "a" and "a.b".
        """
        # Only keys are used: places in the saved tree differ between ranks and layouts, and aren't stored.
        return nested(dict(self.items()), separator=separator)


class TransformedCheckpoint(OpenCheckpoint):
    """A checkpoint seen through a trace: a mapping of the trace's outputs, lazily computed from stored tensors."""

    __slots__ = ()

    def _lazy(self, load_sharded: Strategy, shards: Sequence[ShardedTensor]) -> list[ShardedTensor]:
        return list(shards)


@shielded
def open_checkpoint(
    checkpoint_dir: Directory,
    *,
    strategies: Strategies | None = None,
    options: LoadOptions | None = None,
    parameter_names: Sequence[str] | Sequence[Sequence[str]] | None = None,
    transform: Trace | None = None,
) -> OpenCheckpoint:
    """Return a checkpoint as a read-only mapping of lazy shards; not collective.

    Args:
        checkpoint_dir: Path, URL or storage of the checkpoint.
        strategies: Dispatch table of strategies; None for the process-wide table.
        options: Options for reading elements, objects and the common state.
        parameter_names: Names of an optimizer's parameters, in its order, for checkpoints that don't name them; takes
            the place of `LoadOptions.parameter_names`.
        transform: Trace whose outputs are in the mapping instead of the stored tensors, lazily computed from them.

    Raises:
        NotACheckpoint: There is no checkpoint.
        KeyMismatch, ShapeError, TraceError: The transform doesn't fit the stored tensors, or leaves elements unwritten.
        CheckpointReplaced: A save has replaced the files meanwhile; raised by a later read.

    Examples:
        >>> import tempfile, torch, shardtree as st
        >>> folder = tempfile.mkdtemp()
        >>> st.save({"w": st.ShardedTensor.from_rank_offsets("w", torch.arange(12).reshape(4, 3))}, folder)
        >>> tree = st.open_checkpoint(folder)
        >>> tree["w"].data[1:3, :2].read()
        tensor([[3, 4],
                [6, 7]])
    """
    how = given_options("open", options, LoadOptions)
    if parameter_names is not None:
        how = replace(how, parameter_names=parameter_names)
    tree = tree_of(open_at(checkpoint_dir, one_process(), how, strategies), strategies)
    if transform is None:
        return tree
    tensors = [shard for shard in tree.metadata.values() if isinstance(shard, ShardedTensor)]
    shards = {shard.key: shard for shard in tree._lazy(tree._load_sharded(), tensors)}
    outputs = transformed(transform, dict(tree.metadata.items()) | shards, "open")
    return TransformedCheckpoint(tree.checkpoint, outputs, strategies)


def tree_of(checkpoint: Checkpoint, strategies: Strategies | None) -> OpenCheckpoint:
    """Return the contents of a checkpoint as a mapping of lazy shards."""
    return OpenCheckpoint(checkpoint, sharded_metadata(checkpoint, None, None, strategies), strategies)


def index_of(checkpoint: Checkpoint, strategies: Strategies | None, names: Iterable[str] = ()) -> IndexMetadata | None:
    """Return the metadata of a checkpoint's shards with its index; None if its format keeps no index.

    Args:
        checkpoint: The checkpoint.
        strategies: Dispatch table of strategies; None for the process-wide table.
        names: Keys that the caller needs in the index. A format that must read further files to know all keys reads
            them only if it doesn't know these keys yet.
    """
    # The format itself is asked, since two joined formats return a plain dict, without the index.
    backend = sharded_backend(checkpoint.fields)
    metadata = unreplaced(checkpoint, strategy_of(StrategyAction.LOAD_METADATA, None, backend, strategies))
    if isinstance(metadata, DeferredMetadata):
        return metadata.of(names)
    return metadata if isinstance(metadata, IndexMetadata) else None


def layout_in(checkpoint: Checkpoint, strategies: Strategies | None, keys: Sequence[str]) -> StoredLayout:
    """Return the boxes in which tensors are stored, and the file of each box.

    Raises:
        KeyMismatch: One of the tensors isn't stored.
        UnsupportedValue: One of them is stored in a way that can't be read.
        StrategyError: The format doesn't record the files of its chunks.
    """
    metadata = index_of(checkpoint, strategies, keys)
    if metadata is None:
        backend = ":".join(map(str, sharded_backend(checkpoint.fields)))
        raise StrategyError(
            error_text("stored layout: the checkpoint's format does not record which file has which box", found=backend)
        )
    index, sorted_keys = metadata.shown, sorted(keys)
    numbers = index.find_keys(sorted_keys)
    absent = [key for key, number in zip(sorted_keys, numbers, strict=True) if number < 0]
    if absent:
        near = near_names(absent, index.keys())
        fix = "list(open_checkpoint(...)) has all keys." if not near else f"Did you mean {near[min(near)]!r}?"
        check_taken(untaken_of(metadata), absent, "stored layout")
        lines = map(repr, absent)
        raise KeyMismatch(error_text("stored layout: no such tensor in the checkpoint", offenders=lines, fix=fix))
    chunks = chunks_of(index, np.array(numbers, dtype=np.int64))
    kinds = {key: index.kind(number) for key, number in zip(sorted_keys, numbers, strict=True)}
    columns = stored_columns(kinds, chunks.key, chunks.offset, chunks.shape, chunks.start, chunks.stop)
    return StoredLayout(replace(columns, rank=chunks.file), tuple(index.file_names()))


def largest_tensors(index: Index, count: int) -> tuple[str, ...]:
    """Return the keys of the `count` tensors with the most stored bytes, largest first."""
    nbytes = np.bincount(index.chunk_key, weights=index.chunk_length, minlength=index.key_axes.size)
    numbers = np.argsort(-nbytes, kind="stable")[:count].tolist()
    keys = index.keys()
    return tuple(keys[number] for number in numbers)


@dataclass(frozen=True, slots=True, eq=False)
class StoredBoxes:
    """A function that reads boxes of a stored tensor; the tensor's lazy data calls it.

    Attributes:
        tree: The open checkpoint.
        load_sharded: Strategy that reads the tensor.
        key: Key of the tensor.
        dtype: Dtype of the tensor.
        global_shape: Global shape of the tensor.
    """

    tree: OpenCheckpoint
    load_sharded: Strategy
    key: str
    dtype: torch.dtype
    global_shape: tuple[int, ...]

    def __call__(self, offset: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
        """Return the elements of the box with this offset and shape, in new memory."""
        refuse_unproven("read", self.tree.metadata, [self.key])
        # Each read gets new memory: the caller may keep the result, and change it.
        data = new_memory(self.key, shape, self.dtype)
        box = box_of(self.key, data, self.dtype, self.global_shape, offset, shape)
        unreplaced(self.tree.checkpoint, self.load_sharded, [box])
        return data


def unproven_of(metadata: object) -> Mapping[str, str]:
    """Return the reasons why tensors may be larger than a checkpoint's metadata says, by key.

    In formats that store no shapes, a tensor seems smaller if a rank's file is missing.
    """
    return metadata.unproven if isinstance(metadata, IndexMetadata) else {}


def refuse_unproven(doing: str, metadata: object, keys: Collection[str]) -> None:
    """Raise if a tensor that is read whole, without a target, may be larger than the existing files show.

    Args:
        doing: Name of the action, for the message.
        metadata: A checkpoint's metadata; nothing is raised unless it is an `IndexMetadata`.
        keys: Keys of the tensors that are read.

    Raises:
        ShapeError: A tensor may be larger; the error names all such keys, with the reasons.
    """
    reasons = unproven_of(metadata)
    if wrong := [key for key in keys if key in reasons]:
        why = "; ".join(dict.fromkeys(reasons[key] for key in wrong))
        fix = f"In this format {why}. Pass the saved shapes with LoadOptions(shapes=...), or load into a target."
        heading = f"{doing}: these tensors may be larger than they seem, since their shapes are not stored"
        raise ShapeError(error_text(heading, offenders=map(repr, wrong), fix=fix))
