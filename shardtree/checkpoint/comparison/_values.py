"""Reading boxes of a checkpoint's tensors, small ones many at a time; and comparing them with another's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from threading import Lock
from typing import Any

import torch

from ...lazy import LazyTensor, stored
from ...mapping import ShardedTensor, box_of
from ...plans import grouped
from ...storage import HostMemory, can
from ...strategies import StrategyAction, traits_of, unreplaced
from .._differences import ValueDifference, value_difference
from .._dispatch import sharded_backend, strategy_of
from ..loading._targets import new_memory
from ..opened import OpenCheckpoint

# Reading boxes of a checkpoint's tensors: small ones many at a time, if they were announced

TensorBox = tuple[str, tuple[int, ...], tuple[int, ...]]
"""A tensor's key, and offset and shape of a box of it."""

_GROUP_BYTES = 4 * 1024 * 1024  # in the processor's cache, with what is done to them
_DECODED_GROUP_BYTES = 8 * _GROUP_BYTES
_REMOTE_GROUP_BYTES = 32 * _GROUP_BYTES


def is_remote(reader: BoxReader) -> bool:
    """Return whether each read is a request."""
    return can(reader.opened.checkpoint.storage).read_range is not None


def group_bytes(reader: BoxReader) -> int:
    """Return how many bytes are read together: more where each read is a request, or decodes whole chunks."""
    if is_remote(reader):
        return _REMOTE_GROUP_BYTES
    opened = reader.opened
    traits = traits_of(*sharded_backend(opened.checkpoint.fields), opened.strategies)
    return _DECODED_GROUP_BYTES if traits.cuts_chunks == "never" else _GROUP_BYTES


_LEAST_LENT, _MOST_LENT = 1024 * 1024, 256 * 1024 * 1024  # allocators keep less by themselves; more is rare


@dataclass(slots=True, eq=False)
class BoxReader:
    """Reads boxes of a checkpoint. Planning takes longer than a small read, so small reads are planned together.

    Attributes:
        opened: the checkpoint.
        named: the class of its keys where lazy tensors of other checkpoints may come along.
        memory: for large boxes: new memory for each would cost about as much as reading it.
    """

    opened: OpenCheckpoint
    named: type[str] = str
    memory: HostMemory = field(default_factory=HostMemory)
    _lock: Lock = field(default_factory=Lock)
    _group_of: dict[TensorBox, tuple[TensorBox, ...]] = field(default_factory=dict)
    _read_ahead: dict[TensorBox, torch.Tensor] = field(default_factory=dict)
    _newest: Any = None

    def expect(self, tensors: Iterable[Any]) -> None:
        """Announce tensors that will be read, and forget what was announced before; nothing is read yet."""
        most = group_bytes(self) // (8 if is_remote(self) else 32)  # larger ones gain nothing from it
        fetches = (fetch for each in tensors if isinstance(each, LazyTensor) for fetch in each.fetches)
        small = dict.fromkeys(fetch for fetch in fetches if fetch.nbytes <= most and self._has(fetch.name))
        with self._lock:
            self._group_of.clear()
            self._read_ahead.clear()
            for group in grouped(small, lambda fetch: fetch.nbytes, group_bytes(self)):
                boxes = tuple((str(fetch.name), fetch.offset, fetch.shape) for fetch in group)
                self._group_of.update(dict.fromkeys(boxes, boxes))

    def _has(self, name: str) -> bool:
        return isinstance(name, self.named) and name in self.opened.metadata

    def read(self, key: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
        """Return a box's elements, in memory that is the caller's."""
        # A box that is asked for twice is read again: nothing is kept once it was handed out.
        box = (str(key), offset, shape)
        with self._lock:  # a format may write several files at a time
            group = self._group_of.get(box)
            if group is not None:
                for each, data in zip(group, self._read(group), strict=True):
                    self._read_ahead[each] = data
                    del self._group_of[each]
            found = self._read_ahead.pop(box, None)
        return self._read([box])[0] if found is None else found

    def _read(self, boxes: Sequence[TensorBox]) -> list[torch.Tensor]:
        """Return the elements of boxes, with one plan for all; each has elements and lies inside its tensor."""
        shards = [self._target(*box) for box in boxes]
        checkpoint = self.opened.checkpoint
        backend = sharded_backend(checkpoint.fields)
        unreplaced(checkpoint, strategy_of(StrategyAction.LOAD_SHARDED, None, backend, self.opened.strategies), shards)
        return [shard.data for shard in shards]

    def _target(self, key: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> ShardedTensor:
        if self._newest is None or self._newest.key != key:
            self._newest = self.opened.metadata[key]  # what is read next is mostly of the same tensor
        known = self._newest
        nbytes = prod(shape) * known.dtype.itemsize
        if _LEAST_LENT <= nbytes <= _MOST_LENT:
            data = self.memory.lend(nbytes).view(known.dtype).view(shape)
        else:
            data = new_memory(key, shape, known.dtype)
        return box_of(key, data, known.dtype, known.global_shape, offset, shape)

    def whole(self, key: str) -> LazyTensor:
        """Return a tensor whose elements are read through this."""
        known: Any = self.opened.metadata[key]
        return stored(partial(self.read, key), known.global_shape, known.dtype, name=key)


Pair = tuple[str, Any, Any]
"""A tensor's key, and the two that are compared, lazy or in memory."""


def value_differences(
    pairs: Iterable[Pair], left: BoxReader, right: BoxReader, most_bytes: int, progress: Callable[[int], None]
) -> Iterator[ValueDifference | None]:
    """Yield how each pair of tensors differs, None where they are equal, reading piece by piece.

    Args:
        pairs: of one dtype and shape each.
        left: reads the left ones.
        right: reads the right ones.
        most_bytes: about how much memory that may take.
        progress: called with the bytes of each side that were compared since the last call.
    """
    most_together = min(most_bytes, max(group_bytes(left), group_bytes(right)))
    for group in grouped(pairs, lambda pair: int(pair[1].nbytes), most_together):
        # Small tensors are read together: planning each read by itself would take longer than the reads.
        left.expect(mine for _, mine, _ in group)
        right.expect(theirs for *_, theirs in group)
        yield from (value_difference(*pair, most_bytes, progress) for pair in group)
