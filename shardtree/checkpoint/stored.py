"""Where stored tensors lie, from a checkpoint's index: which file holds which part; and what reads boxes of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from ..errors import KeyMismatch, StrategyError, error_text
from ..layouts import ShardColumns, StoredLayout
from ..mapping import box_of
from ..plans import near_names
from ..strategies import Checkpoint, Strategies, Strategy, StrategyAction, unreplaced
from ..strategies.index import (
    DeferredMetadata,
    Index,
    IndexMetadata,
    chunks_of,
    find_texts,
    kind_at,
    reasoned,
    texts,
    untaken_of,
)
from ._dispatch import sharded_backend, strategy_of
from .loading._targets import new_memory

if TYPE_CHECKING:
    from ._lazy_tree import OpenCheckpoint


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
        StrategyError: the format doesn't say where its chunks are.
    """
    metadata = index_of(checkpoint, strategies, keys)
    if metadata is None:
        found = ":".join(map(str, sharded_backend(checkpoint.fields)))
        raise StrategyError(error_text("stored layout: the format doesn't say which file holds what", found=found))
    index, ordered = metadata.shown, sorted(keys)
    numbers = find_texts(index.key_text, index.key_start, ordered)
    absent = [key for key, number in zip(ordered, numbers, strict=True) if number < 0]
    if absent:
        near = near_names(absent, texts(index.key_text, index.key_start))
        fix = "list(tree) has all keys." if not near else f"Did you mean {near[min(near)]!r}?"
        lines = [reasoned(untaken_of(metadata), key) for key in absent]
        raise KeyMismatch(error_text("stored layout: no such tensor in the checkpoint", offenders=lines, fix=fix))
    chunks = chunks_of(index, np.array(numbers, dtype=np.int64))
    columns = ShardColumns(
        keys=tuple(ordered),
        kinds=tuple(kind_at(index, number) for number in numbers),
        key=chunks.key,
        offset=chunks.offset,
        shape=chunks.shape,
        start=chunks.start,
        stop=chunks.stop,
        rank=chunks.file,
        main=np.ones(len(chunks.key), dtype=np.bool_),
    )
    return StoredLayout(columns, tuple(texts(index.file_text, index.file_start)))


def largest_tensors(index: Index, count: int) -> tuple[str, ...]:
    """Return the keys of the largest tensors, by their stored bytes."""
    held = np.bincount(index.chunk_key, weights=index.chunk_length, minlength=index.key_axes.size)
    chosen = np.argsort(-held, kind="stable")[:count].tolist()
    keys = texts(index.key_text, index.key_start)
    return tuple(keys[number] for number in chosen)


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
