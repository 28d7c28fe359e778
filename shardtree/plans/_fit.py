"""Whether a target fits what is stored: what doesn't, as data, in the words that errors and explanations share."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from ..geometry import Column
from ..layouts import Reshaped, TensorKind
from ..mapping import ShardedTensor
from ._convertible import convertible
from ._near import near_names
from ._overlap import stored_elements


@dataclass(frozen=True, slots=True)
class Unexpected:
    """Something that is asked for and not stored.

    Attributes:
        key: the tensor's, or the object's unique key.
        near: a stored key that looks like it, None if there is none.
        is_object: whether it is a sharded object.
    """

    key: str
    near: str | None = None
    is_object: bool = False

    def __str__(self) -> str:
        return f"not stored: {self.key!r}" + (f" (did you mean {self.near!r}?)" if self.near else "")


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A tensor that is stored with another global shape or dtype than is asked for."""

    key: str
    stored: TensorKind
    asked: TensorKind

    def __str__(self) -> str:
        return f"{self.key!r}: checkpoint has {self.stored}, target asks for {self.asked}"


@dataclass(frozen=True, slots=True)
class Gap:
    """A shard of which not all elements are stored.

    Attributes:
        key: the tensor.
        offset: of the shard in it.
        stored: how many of its elements are.
        wanted: how many should be.
    """

    key: str
    offset: tuple[int, ...]
    stored: int
    wanted: int

    def __str__(self) -> str:
        return f"{self.key!r} at {self.offset}: {self.stored} of {self.wanted} elements are stored"


@dataclass(frozen=True, slots=True)
class Refused:
    """A tensor that is stored in a way that can't be read here, and why."""

    key: str
    why: str

    def __str__(self) -> str:
        return f"{self.key!r}: {self.why}"


Misfit = Unexpected | Mismatch | Gap | Refused | Reshaped
"""Why something that a target asks for can't be loaded; its text is one line."""


def find_unexpected(keys: Iterable[str], stored: Collection[str], *, is_object: bool = False) -> tuple[Unexpected, ...]:
    """Return the keys that aren't stored, sorted, with names that look like theirs and that nobody else asks for.

    Args:
        keys: what is asked for.
        stored: what is stored.
        is_object: whether these are unique keys of objects.

    Examples:
        >>> print(*find_unexpected(["decoder.bais"], ["decoder.bias"]))
        not stored: 'decoder.bais' (did you mean 'decoder.bias'?)
    """
    asked = set(keys)
    absent = sorted(asked.difference(stored))
    if not absent:
        return ()
    near = near_names(absent, [name for name in stored if name not in asked])
    return tuple(Unexpected(key, near.get(key), is_object) for key in absent)


def find_mismatches(
    shards: Iterable[ShardedTensor], stored: Mapping[str, TensorKind], *, cast: bool = False
) -> tuple[Mismatch, ...]:
    """Return, of each tensor of which a shard doesn't fit what is stored, how it differs.

    Another global shape fits where the shard has `allow_shape_mismatch` and as many axes; another dtype where it is to
    be converted and can be.

    Args:
        shards: what is asked for.
        stored: for each of their keys, what is stored.
        cast: whether dtypes are converted.

    Examples:
        >>> import torch
        >>> shard = ShardedTensor.from_rank_offsets("w", torch.zeros(2))
        >>> print(*find_mismatches([shard], {"w": TensorKind(torch.float32, (3,), 0)}))
        'w': checkpoint has (3,) float32, target asks for (2,) float32
    """
    found: dict[str, Mismatch] = {}
    for shard in shards:
        kind = stored[shard.key]
        same_dtype = shard.dtype == kind.dtype or (cast and convertible(kind.dtype, shard.dtype))
        if not (same_dtype and _shape_fits(shard, kind.global_shape)):
            asked = TensorKind(shard.dtype, shard.global_shape, 0)
            found.setdefault(shard.key, Mismatch(shard.key, TensorKind(kind.dtype, kind.global_shape, 0), asked))
    return tuple(found.values())


def _shape_fits(shard: ShardedTensor, stored: tuple[int, ...]) -> bool:
    return shard.global_shape == stored or (shard.allow_shape_mismatch and len(shard.global_shape) == len(stored))


def find_gaps(shards: Sequence[ShardedTensor], covered: Column, stored: Mapping[str, TensorKind]) -> tuple[Gap, ...]:
    """Return the shards of which not all elements are stored; those beyond the stored global shape don't count.

    Args:
        shards: what is asked for; they fit what is stored.
        covered: how many elements of each are stored, int64 (shards,).
        stored: for each of their keys, what is stored.

    Examples:
        >>> import numpy as np, torch
        >>> shard = ShardedTensor.from_rank_offsets("w", torch.zeros(4))
        >>> print(*find_gaps([shard], np.array([3]), {"w": TensorKind(torch.float32, (4,), 0)}))
        'w' at (0,): 3 of 4 elements are stored
    """
    gaps = []
    for shard, found in zip(shards, covered.tolist(), strict=True):
        wanted = prod(shard.data_shape)
        if found != wanted and shard.allow_shape_mismatch:
            wanted = stored_elements(shard, stored[shard.key].global_shape)
        if found != wanted:
            gaps.append(Gap(shard.key, shard.global_offset, found, wanted))
    return tuple(gaps)
