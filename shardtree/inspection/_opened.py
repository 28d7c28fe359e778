"""An open checkpoint as a read-only mapping of lazy shards, of which nothing is read until it is asked for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
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
from ..errors import KeyMismatch, StrategyError, error_text
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
"""As few as metadata makes at a time, so that a caller who drops shards as he goes doesn't trigger the garbage
collector."""


@dataclass(frozen=True, slots=True, eq=False)
class OpenCheckpoint(PairsMapping[ShardedTensor | ShardedObject]):
    """A checkpoint as a mapping: shard key → whole tensor with lazy data, unique key → object.

    Values are made when asked for; a tensor's elements are read by ``tree[key].data[...].read()``, and only those.
    What is recorded on lazy data, by hand or by a factory or a tree map, costs no read.

    Attributes:
        checkpoint: where the bytes are.
        metadata: the stored tensors and objects, without data.
        strategies: the dispatch table; None for the process's.
    """

    checkpoint: Checkpoint
    metadata: Mapping[str, ShardedTensor | ShardedObject]
    strategies: Strategies | None

    def __getitem__(self, key: str) -> ShardedTensor | ShardedObject:
        """Return the tensor of a key, with lazy data, or the object of a unique key, with its data.

        Raises:
            KeyMismatch: nothing of that name is stored.
            UnsupportedValue: it is stored in a way that can't be read, as in a dtype that torch lacks.
        """
        shard = self.metadata.get(key)
        if shard is None:
            check_taken(untaken_of(self.metadata), [key], "open")
            what, fix = "open: no such key in the checkpoint", "list(tree) has all keys."
            raise KeyMismatch(error_text(what, found=repr(key), fix=fix))
        if isinstance(shard, ShardedObject):
            return self._read(shard)
        return self._lazy(self._load_sharded(), [shard])[0]

    def __contains__(self, key: object) -> bool:
        """Return whether a tensor or object of that name is stored and can be read."""
        return key in self.metadata

    def get(self, key: str, default: Any = None) -> Any:
        """Return the tensor or object of a key, lazily, or the default if none can be read."""
        return self[key] if key in self.metadata else default

    def __iter__(self) -> Iterator[str]:
        """Return the keys, tensors' first, each kind sorted."""
        return iter(self.metadata)

    def __len__(self) -> int:
        """Return how many tensors and objects are stored."""
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
        """Return stored tensors with what reads them as their data."""
        keys, dtypes, shapes, local_shapes, flat = (list(map(attrgetter(name), shards)) for name in _SHARD_FIELDS)
        columns: dict[str, Iterable[Any]] = {"tree": repeat(self), "load_sharded": repeat(load_sharded)}
        columns |= {"key": keys, "dtype": dtypes, "global_shape": shapes}
        data = stored_each(frozen_values(StoredBoxes, len(keys), columns), shapes, dtypes, keys)
        # Without the constructor: the index was checked as columns, and checking each shard again took nearly all of
        # the time for 100,000 tensors.
        if local_shapes == shapes and not any(flat):
            return with_data(shards, data)
        # Metadata from a caller's strategy that isn't of whole tensors: the slower constructor raises what is wrong.
        return [replace(shard, data=lazy) for shard, lazy in zip(shards, data, strict=True)]

    def _load_sharded(self) -> Strategy:
        # The row is looked up here, once for all reads of a tensor: it takes a tenth of a small one.
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
        """Return where the checkpoint is and how much is in it."""
        return f"OpenCheckpoint({self.checkpoint.storage.where()!r}, {len(self)} keys)"

    def _repr_html_(self) -> str:
        return notebook_html(self)

    def stored_layout(self, *keys: str) -> StoredLayout:
        """Return which files hold which parts of tensors: of those named, or of all. No element is read.

        Raises:
            KeyMismatch: one of them isn't stored.
            UnsupportedValue: one is stored in a way that can't be read.
            StrategyError: the format doesn't say where its chunks are.
        """
        tensors = (key for key, shard in self.metadata.items() if isinstance(shard, ShardedTensor))
        return layout_in(self.checkpoint, self.strategies, keys or tuple(tensors))

    def common(self) -> Any:
        """Return what is stored outside the shards."""
        return without_holes(load_common(self.checkpoint, None, self.strategies))

    def nested(self, separator: str = ".") -> dict[str, Any]:
        """Return the shards as nested dicts, taken apart at the dots of their keys.

        Raises:
            TreeError: a key is also the beginning of another one.
        """
        # Keys are all there is: places in the saved tree differ between ranks and layouts, and aren't stored.
        return nested(dict(self.items()), separator=separator)


class TransformedCheckpoint(OpenCheckpoint):
    """A checkpoint seen through a trace: its metadata are the trace's outputs, lazily made of what is stored."""

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
        checkpoint_dir: where the checkpoint is.
        strategies: the dispatch table; None for the process's.
        options: how elements, objects and the common state are read.
        parameter_names: of `options`, which is passed so often that it has a keyword of its own.
        transform: a trace of what is to be seen instead of the stored tensors: its outputs, lazily made of them.

    Raises:
        NotACheckpoint: there is none.
        KeyMismatch, ShapeError, TraceError: the transform isn't of what is stored, or leaves elements unwritten.
        CheckpointReplaced: later, on a read, when a save has replaced the files meanwhile.

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
    """Return what is stored in a checkpoint as a mapping of lazy shards."""
    return OpenCheckpoint(checkpoint, sharded_metadata(checkpoint, None, None, strategies), strategies)


def index_of(checkpoint: Checkpoint, strategies: Strategies | None, names: Iterable[str] = ()) -> IndexMetadata | None:
    """Return the metadata of a checkpoint's shards with its index; None where its format keeps none.

    Args:
        checkpoint: what is meant.
        strategies: the dispatch table; None for the process's.
        names: that it must have. Some formats have names that only reading finds out, which is done for these alone;
            otherwise it has the names in the files.
    """
    # From the format: where two formats are joined, what they have together is a plain dict without the index.
    backend = sharded_backend(checkpoint.fields)
    metadata = unreplaced(checkpoint, strategy_of(StrategyAction.LOAD_METADATA, None, backend, strategies))
    if isinstance(metadata, DeferredMetadata):
        return metadata.of(names)
    return metadata if isinstance(metadata, IndexMetadata) else None


def layout_in(checkpoint: Checkpoint, strategies: Strategies | None, keys: Sequence[str]) -> StoredLayout:
    """Return which files hold which parts of tensors.

    Raises:
        KeyMismatch: one of them isn't stored.
        UnsupportedValue: one is stored in a way that can't be read.
        StrategyError: the format doesn't say where its chunks are.
    """
    metadata = index_of(checkpoint, strategies, keys)
    if metadata is None:
        backend = ":".join(map(str, sharded_backend(checkpoint.fields)))
        raise StrategyError(error_text("stored layout: the format doesn't say which file holds what", found=backend))
    index, sorted_keys = metadata.shown, sorted(keys)
    numbers = index.find_keys(sorted_keys)
    absent = [key for key, number in zip(sorted_keys, numbers, strict=True) if number < 0]
    if absent:
        near = near_names(absent, index.keys())
        fix = "list(tree) has all keys." if not near else f"Did you mean {near[min(near)]!r}?"
        check_taken(untaken_of(metadata), absent, "stored layout")
        lines = map(repr, absent)
        raise KeyMismatch(error_text("stored layout: no such tensor in the checkpoint", offenders=lines, fix=fix))
    chunks = chunks_of(index, np.array(numbers, dtype=np.int64))
    kinds = {key: index.kind(number) for key, number in zip(sorted_keys, numbers, strict=True)}
    columns = stored_columns(kinds, chunks.key, chunks.offset, chunks.shape, chunks.start, chunks.stop)
    return StoredLayout(replace(columns, rank=chunks.file), tuple(index.file_names()))


def largest_tensors(index: Index, count: int) -> tuple[str, ...]:
    """Return the keys of the largest tensors, by their stored bytes."""
    nbytes = np.bincount(index.chunk_key, weights=index.chunk_length, minlength=index.key_axes.size)
    numbers = np.argsort(-nbytes, kind="stable")[:count].tolist()
    keys = index.keys()
    return tuple(keys[number] for number in numbers)


@dataclass(frozen=True, slots=True, eq=False)
class StoredBoxes:
    """Reads boxes of a stored tensor, as the source of its lazy data.

    Attributes:
        tree: where it is stored.
        load_sharded: reads it.
        key: the tensor's.
        dtype: the tensor's.
        global_shape: the tensor's.
    """

    tree: OpenCheckpoint
    load_sharded: Strategy
    key: str
    dtype: torch.dtype
    global_shape: tuple[int, ...]

    def __call__(self, offset: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
        """Return a box's elements."""
        # New memory for each read: the caller may keep the result, and change it.
        data = new_memory(self.key, shape, self.dtype)
        box = box_of(self.key, data, self.dtype, self.global_shape, offset, shape)
        unreplaced(self.tree.checkpoint, self.load_sharded, [box])
        return data
