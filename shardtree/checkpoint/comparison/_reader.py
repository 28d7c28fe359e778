"""Boxes of a checkpoint's tensors, read when asked for: small ones many at a time, where they were announced."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from ...lazy import Fetch, LazyTensor, stored
from ...mapping import ShardedTensor
from ...plans import grouped
from ...strategies import StrategyAction
from .._dispatch import sharded_backend, strategy_of
from .._lazy_tree import OpenCheckpoint
from ..loading._targets import new_memory

Box = tuple[str, tuple[int, ...], tuple[int, ...]]
"""A tensor's key, and offset and shape of a box of it."""

GROUP_BYTES = 8 * 1024 * 1024
_SMALL_BYTES = GROUP_BYTES // 32  # larger ones gain nothing from being read together


@dataclass(frozen=True, slots=True, eq=False)
class BoxReader:
    """Reads boxes of a checkpoint. Planning a read takes longer than a small read, so small ones are planned together.

    Attributes:
        opened: the checkpoint.
    """

    opened: OpenCheckpoint
    _group_of: dict[Box, tuple[Box, ...]] = field(default_factory=dict)
    _ready: dict[Box, torch.Tensor] = field(default_factory=dict)

    def expect(self, fetches: Iterable[Fetch]) -> None:
        """Announce boxes that will be read, and forget what was announced before; nothing is read yet."""
        self._group_of.clear()
        self._ready.clear()
        small = dict.fromkeys(fetch for fetch in fetches if fetch.nbytes <= _SMALL_BYTES)
        for group in grouped(small, lambda fetch: fetch.nbytes, GROUP_BYTES):
            boxes = tuple((str(fetch.name), fetch.offset, fetch.shape) for fetch in group)
            self._group_of.update(dict.fromkeys(boxes, boxes))

    def read(self, key: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
        """Return a box's elements, in memory that is the caller's."""
        box = (str(key), offset, shape)
        group = self._group_of.get(box)
        if group is not None:
            for each, data in zip(group, read_boxes(self.opened, group), strict=True):
                self._ready[each] = data
                del self._group_of[each]
        found = self._ready.pop(box, None)
        return read_boxes(self.opened, [box])[0] if found is None else found

    def whole(self, key: str) -> LazyTensor:
        """Return a tensor whose elements are read through this."""
        known: Any = self.opened.metadata[key]
        return stored(partial(self.read, key), known.global_shape, known.dtype, name=key)


def read_boxes(opened: OpenCheckpoint, boxes: Sequence[Box]) -> list[torch.Tensor]:
    """Return the elements of boxes of a checkpoint's tensors, planned in one go.

    Args:
        opened: the checkpoint.
        boxes: key, offset and shape of each; every one has elements and lies inside its tensor.
    """
    shards = []
    for key, offset, shape in boxes:
        known: Any = opened.metadata[key]
        data = new_memory(key, shape, known.dtype)
        shards.append(ShardedTensor(key, data, known.dtype, shape, known.global_shape, offset, None))
    checkpoint = opened.checkpoint
    load = strategy_of(StrategyAction.LOAD_SHARDED, None, sharded_backend(checkpoint.fields), opened.strategies)
    load(checkpoint, shards)
    return [shard.data for shard in shards]
