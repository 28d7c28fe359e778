"""Reads of a conversion's source: each element is read once, in large windows, and fingerprinted."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from threading import Lock

import torch

from ..core.fingerprints import PartialFingerprint, add_fingerprints, box_part
from ..core.geometry import Box, box_shape, slices
from ..core.layouts import TensorKind
from ..core.lazy import Fetch, LazyTensor, of_source
from ..core.mapping import ShardedTensor
from ..inspection import in_usual_threads


@dataclass(slots=True, eq=False)
class Passage:
    """Fingerprints of the elements that are read from shards returned by `watch`, and options of these reads.

    A format's save functions get such shards, so that the elements that they write are fingerprinted.

    Attributes:
        window_bytes: Number of bytes to read at a time around a small request; 0 to read only what is requested.
        has_sums: Whether elements are fingerprinted.
    """

    window_bytes: int
    has_sums: bool
    # Sums are kept by box: an element that a format reads twice counts once.
    _parts: dict[str, dict[Box, PartialFingerprint]] = field(default_factory=lambda: defaultdict(dict))

    def watch(self, shard: ShardedTensor, turn: ReadTurn | None = None) -> ShardedTensor:
        """Return a lazy shard whose reads wait for the batch's turn and are fingerprinted; others are unchanged."""
        if not isinstance(shard.data, LazyTensor):
            return shard
        return replace(shard, data=of_source(_WatchedSource(self, shard, turn)))

    def sums(self) -> dict[str, PartialFingerprint]:
        """Return the partial fingerprint of each tensor, by key, from the elements read so far."""
        return {key: _sum(list(parts.values())) for key, parts in self._parts.items() if parts}

    def add(self, shard: ShardedTensor, offset: tuple[int, ...], data: torch.Tensor) -> None:
        """Add a box of a shard to the tensor's fingerprint; `offset` is the box's offset within the shard."""
        if not self.has_sums:
            return
        axes = shard.prepend_axis_num
        inside = zip(shard.global_offset[axes:], offset, strict=True)
        begin = (*shard.global_offset[:axes], *(first + start for first, start in inside))
        box = (1,) * axes + tuple(data.shape)
        kind = TensorKind(data.dtype, shard.global_shape, 0)
        self._parts[shard.key][begin, box] = box_part(kind, data.reshape(box), begin, in_usual_threads)


def passed_fingerprints(sums_by_rank: Sequence[Mapping[str, PartialFingerprint]]) -> dict[str, int]:
    """Return the fingerprints of tensors whose elements were all read, from each rank's partial fingerprints by key."""
    counts = Counter[str]()
    for sums in sums_by_rank:
        counts.update({key: part.elements for key, part in sums.items()})
    whole = {key for sums in sums_by_rank for key, part in sums.items() if counts[key] == prod(part.kind.global_shape)}
    return add_fingerprints([{key: part for key, part in sums.items() if key in whole} for sums in sums_by_rank])


def _sum(parts: Sequence[PartialFingerprint]) -> PartialFingerprint:
    elements, total = sum(part.elements for part in parts), sum(part.total for part in parts)
    return replace(parts[0], elements=elements, total=total % 2**64)


@dataclass(slots=True, eq=False)
class ReadTurn:
    """The turn of a batch to be read from the source.

    Batches are read one at a time, while earlier batches may still be sent to the destination.

    Attributes:
        gate: Lock of the conversion, held while a batch is read.
        begin: Callback at the beginning of the turn.
        rest: Number of elements of the batch still to be read.
    """

    gate: Lock
    begin: Callable[[], None]
    rest: int
    _lock: Lock = field(default_factory=Lock)
    _has_begun: bool = False

    def wait(self) -> None:
        """Wait until the batch may be read; return at once if its turn has begun before, even if that has ended."""
        with self._lock:
            if not self._has_begun:
                self.gate.acquire()
                self._has_begun = True
                self.begin()

    def count(self, elements: int) -> None:
        """Count elements of the batch that were read; with its last element, the turn of the batch ends."""
        with self._lock:
            if self._has_begun and self.rest > 0 and self.rest <= elements:
                self.gate.release()
            self.rest -= elements

    def end(self) -> None:
        """End the batch's turn to be read from the source, even if some of its elements weren't read."""
        self.count(self.rest)


@dataclass(slots=True, eq=False)
class _WatchedSource:
    """Source of a shard's lazy data that keeps a window of it in memory, since the next request usually lies there."""

    passage: Passage
    shard: ShardedTensor
    turn: ReadTurn | None
    low: tuple[int, ...] = ()
    window: torch.Tensor | None = None

    @property
    def name(self) -> str:
        return str(self.shard.data.name)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.shard.data.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.shard.dtype

    def box_fetches(self, offset: tuple[int, ...], shape: tuple[int, ...]) -> Iterator[Fetch]:
        yield from self.shard.data.box_fetches(offset, shape)

    def read_box(self, offset: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
        if self.turn is not None:
            self.turn.wait()
        data = self._read(offset, shape)
        if self.turn is not None:
            self.turn.count(data.numel())
        self.passage.add(self.shard, offset, data)
        return data

    def _read(self, offset: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
        data: LazyTensor = self.shard.data
        sizes, most_bytes = self.shape, self.passage.window_bytes
        if most_bytes < 2 * prod(shape) * data.itemsize or shape == sizes:
            return data.read_box(offset, shape)
        steps = zip(box_shape(sizes, most_bytes // data.itemsize), shape, strict=True)
        # The window is a multiple of the request, so that the next box lies in the same window or in the next one.
        cell = [max(step // length * length, length) for step, length in steps]
        low = tuple(start // step * step for start, step in zip(offset, cell, strict=True))
        room = tuple(min(step, size - start) for step, size, start in zip(cell, sizes, low, strict=True))
        within = tuple(start - first for start, first in zip(offset, low, strict=True))
        if any(start + length > size for start, length, size in zip(within, shape, room, strict=True)):
            return data.read_box(offset, shape)
        window = self.window
        if window is None or low != self.low or window.shape != room:
            self.window = None  # before the next window is read: two would take twice the memory
            self.low, self.window = low, (window := data.read_box(low, room))
        if all(start + length == size for start, length, size in zip(offset, shape, sizes, strict=True)):
            self.window = None  # boxes come in order: this was the last request, and the batch has more tensors
        return window[slices(within, shape)]
