"""Fast construction of many tensor shards, without the checks of a shard's constructor."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import repeat
from operator import attrgetter
from typing import Any

import torch

from ..lazy import frozen_values
from ._tensor import ShardedTensor

Shape = tuple[int, ...]

_NAMES = tuple(ShardedTensor.__dataclass_fields__)
_DEFAULTS = {name: field.default for name, field in ShardedTensor.__dataclass_fields__.items()}
_PUTS = tuple(getattr(ShardedTensor, name).__set__ for name in _NAMES)
_PUT_KEY, _PUT_DATA, _PUT_DTYPE, _PUT_LOCAL_SHAPE, _PUT_GLOBAL_SHAPE, _PUT_OFFSET, _PUT_FRAGMENTATIONS = _PUTS[:7]
_PUT_REPLICA, _PUT_PREPENDED, _PUT_MAY_MISMATCH, _PUT_FLAT_RANGE = _PUTS[7:]
_KEPT = tuple(name for name in _NAMES if name != "data")


def whole_tensors(keys: Sequence[str], dtypes: Iterable[torch.dtype], shapes: Sequence[Shape]) -> list[ShardedTensor]:
    """Return one shard for each tensor; it covers the whole tensor and has no data.

    Nothing is checked. The arguments may come from untrusted files, so the caller must have checked them as strictly
    as the constructor would.

    Args:
        keys: Key of each tensor: a string that isn't empty and that UTF-8 can encode.
        dtypes: Dtype of each tensor.
        shapes: Shape of each tensor, a tuple of ints of at least 0.

    Examples:
        >>> whole_tensors(["w"], [torch.int8], [(2, 3)])
        [ShardedTensor(key='w', data=None, dtype=torch.int8, local_shape=(2, 3), global_shape=(2, 3), \
global_offset=(0, 0), axis_fragmentations=(1, 1))]
    """
    axes = [*map(len, shapes)]
    zeros, ones = ({count: (number,) * count for count in {*axes}} for number in (0, 1))
    columns = {
        "key": keys,
        "data": repeat(None),
        "dtype": dtypes,
        "local_shape": shapes,
        "global_shape": shapes,
        "global_offset": map(zeros.__getitem__, axes),
        "axis_fragmentations": map(ones.__getitem__, axes),
    }
    defaults = {name: repeat(_DEFAULTS[name]) for name in _NAMES if name not in columns}
    return frozen_values(ShardedTensor, len(keys), columns | defaults)


def box_of(key: str, data: Any, dtype: torch.dtype, whole: Shape, offset: Shape, shape: Shape) -> ShardedTensor:
    """Return the shard of one box of a tensor, as part of an irregular grid.

    Nothing is checked, as in `whole_tensors`.

    Args:
        key: The tensor's key.
        data: The box's elements, a tensor of `dtype` and `shape`, or None.
        dtype: The tensor's dtype.
        whole: The tensor's shape.
        offset: The box's first index along each axis, ints.
        shape: The box's shape, ints of at least 0. The box must lie inside the tensor.

    Examples:
        >>> box_of("w", None, torch.int8, (4, 3), (2, 0), (1, 3)).global_slice()
        (slice(2, 3, None), slice(0, 3, None))
    """
    # The constructor would normalise and check each field again, for every box.
    shard = object.__new__(ShardedTensor)
    _PUT_KEY(shard, key)
    _PUT_DATA(shard, data)
    _PUT_DTYPE(shard, dtype)
    _PUT_LOCAL_SHAPE(shard, shape)
    _PUT_GLOBAL_SHAPE(shard, whole)
    _PUT_OFFSET(shard, offset)
    _PUT_FRAGMENTATIONS(shard, None)
    _PUT_REPLICA(shard, 0)
    _PUT_PREPENDED(shard, 0)
    _PUT_MAY_MISMATCH(shard, False)
    _PUT_FLAT_RANGE(shard, None)
    return shard


def with_data(shards: Sequence[ShardedTensor], data: Iterable[Any]) -> list[ShardedTensor]:
    """Return copies of shards with other data, without checks.

    Args:
        shards: Shards to copy.
        data: New data of each shard: a tensor of the shard's dtype and shape, or None.

    Examples:
        >>> [shard] = with_data(whole_tensors(["w"], [torch.int8], [(2,)]), [torch.zeros(2, dtype=torch.int8)])
        >>> shard.data
        tensor([0, 0], dtype=torch.int8)
    """
    columns = {name: map(attrgetter(name), shards) for name in _KEPT}
    return frozen_values(ShardedTensor, len(shards), columns | {"data": data})


def with_keys(shards: Sequence[ShardedTensor], keys: Sequence[str]) -> list[ShardedTensor]:
    """Return copies of shards with other keys, without checks.

    Args:
        shards: Shards to copy.
        keys: New key of each shard. They must be keys that a shard's constructor has accepted before.

    Examples:
        >>> [shard] = with_keys(whole_tensors(["w"], [torch.int8], [(2,)]), ["v"])
        >>> shard.key, shard.global_shape
        ('v', (2,))
    """
    columns = {name: map(attrgetter(name), shards) for name in _NAMES if name != "key"}
    return frozen_values(ShardedTensor, len(shards), columns | {"key": keys})
