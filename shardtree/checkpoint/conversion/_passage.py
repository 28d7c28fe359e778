"""What passes from a conversion's source to its destination: read once, in large windows, and fingerprinted then."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod

import torch

from ...fingerprints import PartialFingerprint, add_fingerprints, box_part
from ...geometry import slices
from ...layouts import TensorKind
from ...lazy import LazyTensor, stored
from ...mapping import ShardedTensor
from .._differences import Box, box_shape
from .._fingerprint import in_usual_threads
from ..comparison._values import BoxReader, group_bytes


@dataclass(slots=True, eq=False)
class Passage:
    """What the elements that are written pass through when the format's own functions read them.

    Attributes:
        window_bytes: how much of a large tensor is read at a time; 0 for as much as is asked for.
        has_sums: whether elements are fingerprinted at all.
    """

    window_bytes: int
    has_sums: bool
    # By box: what a format reads twice counts once.
    _parts: dict[str, dict[Box, PartialFingerprint]] = field(default_factory=lambda: defaultdict(dict))

    def watched(self, shard: ShardedTensor) -> ShardedTensor:
        """Return a shard whose lazy data is fingerprinted when it is read; other shards unchanged."""
        if not isinstance(shard.data, LazyTensor):
            return shard
        read = partial(self._read, shard, _Window(shard.data, self.window_bytes))
        return replace(shard, data=stored(read, shard.data.shape, shard.data.dtype, name=shard.data.name))

    def sums(self) -> dict[str, PartialFingerprint]:
        """Return the fingerprints of what has passed here, by key."""
        return {key: _sum(list(parts.values())) for key, parts in self._parts.items() if parts}

    def _read(
        self, shard: ShardedTensor, window: _Window, offset: tuple[int, ...], shape: tuple[int, ...]
    ) -> torch.Tensor:
        data = window.read(offset, shape)
        if not self.has_sums:
            return data
        prepended = shard.prepend_axis_num
        inside = zip(shard.global_offset[prepended:], offset, strict=True)
        begin = (*shard.global_offset[:prepended], *(first + start for first, start in inside))
        box = (1,) * prepended + shape
        kind = TensorKind(data.dtype, shard.global_shape, 0)
        self._parts[shard.key][begin, box] = box_part(kind, data.reshape(box), begin, in_usual_threads)
        return data


def passed_fingerprints(passed: Sequence[Mapping[str, PartialFingerprint]]) -> dict[str, int]:
    """Return the fingerprints of those tensors all of whose elements have passed, given the sums of all ranks."""
    counts = Counter[str]()
    for sums in passed:
        counts.update({key: part.elements for key, part in sums.items()})
    whole = {key for sums in passed for key, part in sums.items() if counts[key] == prod(part.kind.global_shape)}
    return add_fingerprints([{key: part for key, part in sums.items() if key in whole} for sums in passed])


def _sum(parts: Sequence[PartialFingerprint]) -> PartialFingerprint:
    elements, total = sum(part.elements for part in parts), sum(part.total for part in parts)
    return replace(parts[0], elements=elements, total=total % 2**64)


def passage_from(reader: BoxReader, *, fingerprints: bool) -> Passage:
    """Return what elements of a source pass through, and whether they are fingerprinted there."""
    # Formats ask for a few MiB at a time; where each read is a request, many of these are fetched at once.
    return Passage(group_bytes(reader), fingerprints)


@dataclass(slots=True, eq=False)
class _Window:
    """A part of a tensor that is in memory, since what is asked for next mostly lies there."""

    data: LazyTensor
    most_bytes: int
    low: tuple[int, ...] = ()
    held: torch.Tensor | None = None

    def read(self, offset: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
        sizes = tuple(self.data.shape)
        if self.most_bytes < 2 * prod(shape) * self.data.itemsize or shape == sizes:
            return self.data.read_box(offset, shape)
        steps = zip(box_shape(sizes, self.most_bytes // self.data.itemsize), shape, strict=True)
        # A multiple of what is asked for, so that the next box lies in the same window or in the next one.
        cell = [max(step // asked * asked, asked) for step, asked in steps]
        low = tuple(start // step * step for start, step in zip(offset, cell, strict=True))
        room = tuple(min(step, size - start) for step, size, start in zip(cell, sizes, low, strict=True))
        within = tuple(start - first for start, first in zip(offset, low, strict=True))
        if any(start + length > size for start, length, size in zip(within, shape, room, strict=True)):
            return self.data.read_box(offset, shape)
        held = self.held
        if held is None or low != self.low or held.shape != room:
            self.held = None  # before more is read: two windows would take twice the memory
            self.low, self.held = low, (held := self.data.read_box(low, room))
        if all(start + length == size for start, length, size in zip(offset, shape, sizes, strict=True)):
            self.held = None  # boxes come in order: nothing else is asked for, and the batch has more tensors
        return held[slices(within, shape)]
