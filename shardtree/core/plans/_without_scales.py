"""Quantised tensors that a load would convert to another dtype without applying the scales stored beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from ..layouts import TensorKind
from ..mapping import ShardedTensor
from ..offences import offence_text
from ..trees import BY_SCALES, scaled_values, scaled_what


@dataclass(frozen=True, slots=True)
class ScaledValues:
    """A quantised tensor that a load would convert to another dtype without applying its scales.

    Attributes:
        key: Key of the quantised tensor.
        dtype: Stored dtype.
        scales: Keys of the stored scales.
    """

    where: ClassVar[str] = ""
    fix: ClassVar[str] = BY_SCALES

    key: str
    dtype: torch.dtype
    scales: tuple[str, ...]

    __str__ = offence_text

    @property
    def what(self) -> str:
        """The dtype, and the scales that the values need, as text."""
        return scaled_what(self.dtype, self.scales)


def find_scaled(
    shards: Iterable[ShardedTensor],
    kinds: Mapping[str, TensorKind],
    stored: Callable[[Sequence[str]], Mapping[str, TensorKind]],
    is_plain: Callable[[str], bool],
) -> tuple[ScaledValues, ...]:
    """Return the requested tensors that a load would convert without applying the scales stored beside them.

    Args:
        shards: Requested shards.
        kinds: Stored dtype and global shape by key; some of the shards' keys may be missing.
        stored: Function from keys to stored dtypes and global shapes. It also knows keys that only other ranks request,
            so that all ranks get the same result.
        is_plain: Predicate of a key: whether its values need no scales.

    Examples:
        >>> import torch
        >>> there = {"w": TensorKind(torch.float8_e4m3fn, (2,), 0), "w_scale": TensorKind(torch.float32, (), 0)}
        >>> shard = ShardedTensor.from_rank_offsets("w", torch.zeros(2))
        >>> print(*find_scaled([shard], there, lambda keys: there, lambda key: False))
        'w': float8_e4m3fn values that need 'w_scale' beside them
    """
    pairs = ((shard, kinds[shard.key].dtype) for shard in shards if shard.key in kinds)
    changed = {shard.key: dtype for shard, dtype in pairs if shard.dtype != dtype and not is_plain(shard.key)}
    scales_of = scaled_values(changed, lambda keys: {key: kind.dtype for key, kind in stored(keys).items()})
    return tuple(ScaledValues(key, changed[key], scales) for key, scales in scales_of.items())
