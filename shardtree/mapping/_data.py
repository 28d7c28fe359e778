"""Whether a shard's data is what its metadata says."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.parameter import is_lazy

from ..errors import MetadataError, ShapeError
from ..geometry import refuse
from ..lazy import LazyTensor

SHAPE_FIX = "Give each part of a nested tensor a shard of its own; run a module with lazy parameters once before."
_RECAST = "Change a dtype with `cast`, and a shape together with its metadata with `map_shards`."


def data_kind(subject: str, data: Any) -> tuple[torch.dtype, tuple[int, ...]]:
    """Return the dtype and shape of a tensor, or of what describes itself like one; anything else is refused."""
    check_has_shape(subject, data)
    if not isinstance(getattr(data, "dtype", None), torch.dtype) or not hasattr(data, "shape"):
        fix = "Describe a shard without data with `ShardedTensor(...)` itself."
        refuse(subject, "data", type(data).__name__, "a tensor", fix, error=MetadataError)
    return data.dtype, tuple(data.shape)


def check_data(subject: str, data: object, dtype: torch.dtype, shape: tuple[int, ...], source: str) -> None:
    """Raise ShapeError where a tensor hasn't the dtype, or the shape that the field `source` says.

    Only tensors are looked at, lazy ones too: tree maps also put None and shapes in their place.
    """
    if not isinstance(data, (torch.Tensor, LazyTensor)):
        return
    check_has_shape(subject, data)
    if data.dtype != dtype:
        refuse(subject, "data's dtype", data.dtype, str(dtype), _RECAST, error=ShapeError)
    if tuple(data.shape) != shape:
        refuse(subject, "data's shape", tuple(data.shape), f"{shape} by {source}", _RECAST, error=ShapeError)


def without_shape(data: object) -> str:
    """Return what kind of tensor this is, if it has no one shape; nothing for any other data.

    Examples:
        >>> without_shape(torch.zeros(2)), without_shape(torch.nn.UninitializedParameter())
        ('', 'an uninitialised parameter')
    """
    if not isinstance(data, torch.Tensor):
        return ""
    if is_lazy(data):
        return "an uninitialised parameter"
    return "a nested tensor" if data.is_nested else ""


def check_has_shape(subject: str, data: object) -> None:
    """Raise MetadataError for a tensor that has no one shape: nested, or not initialised yet."""
    if found := without_shape(data):
        refuse(subject, "data", found, "a tensor of one shape", SHAPE_FIX, error=MetadataError)
