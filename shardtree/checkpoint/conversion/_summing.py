"""Boxes of a destination, and the fingerprints that its tensors have by what was read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from ...fingerprints import FingerprintPart, add_fingerprints, shard_parts
from ...layouts import TensorKind
from ...lazy import LazyTensor, stored
from ...mapping import ShardedTensor
from .._fingerprint import in_usual_threads
from ..comparison._reader import BoxReader


@dataclass(frozen=True, slots=True, eq=False)
class Summing:
    """Reads boxes of a checkpoint, each element once, and adds up their tensors' fingerprints.

    Attributes:
        reader: of the checkpoint.
    """

    reader: BoxReader
    _parts: dict[str, FingerprintPart] = field(default_factory=dict)

    def whole(self, key: str) -> LazyTensor:
        """Return a tensor whose elements are read through this."""
        known: Any = self.reader.opened.metadata[key]
        return stored(partial(self._read, key), known.global_shape, known.dtype, name=key)

    def fingerprints(self, tensors: Sequence[ShardedTensor]) -> dict[str, int]:
        """Return the fingerprints of tensors of which every element was read."""
        kinds = {shard.key: TensorKind(shard.dtype, shard.global_shape, 0) for shard in tensors}
        none = {key: FingerprintPart(kind, 0, 0) for key, kind in kinds.items()}  # for those without elements
        return add_fingerprints([none, self._parts])

    def _read(self, key: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
        data = self.reader.read(key, offset, shape)
        whole: Any = self.reader.opened.metadata[key]
        box = ShardedTensor(key, data, data.dtype, shape, whole.global_shape, offset, None)
        part = shard_parts([box], in_usual_threads)[key]
        before = self._parts.get(key, replace(part, elements=0, total=0))
        total = (before.total + part.total) % 2**64
        self._parts[key] = replace(part, elements=before.elements + part.elements, total=total)
        return data
