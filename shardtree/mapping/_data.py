"""Whether a shard's data is what its metadata says."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import MetadataError, ShapeError
from ..geometry import refuse
from ..lazy import LazyTensor

_RECAST = "Change a dtype with `cast`, and a shape together with its metadata with `map_shards`."


def data_kind(subject: str, data: Any) -> tuple[torch.dtype, tuple[int, ...]]:
    """Return the dtype and shape of a tensor, or of what describes itself like one; anything else is refused."""
    if not isinstance(getattr(data, "dtype", None), torch.dtype) or not hasattr(data, "shape"):
        fix = "Describe a shard without data with `ShardedTensor(...)` itself."
        refuse(subject, "data", type(data).__name__, "a tensor", fix, error=MetadataError)
    return data.dtype, tuple(data.shape)


def check_kind(subject: str, field: str, value: object, kind: type, fix: str) -> None:
    """Raise MetadataError unless a field's value is of its kind."""
    if not isinstance(value, kind):
        refuse(subject, field, type(value).__name__, f"a {kind.__name__}", fix, error=MetadataError)


def check_data(subject: str, data: object, dtype: torch.dtype, shape: tuple[int, ...], source: str) -> None:
    """Raise ShapeError where a tensor hasn't the dtype, or the shape that the field `source` says.

    Only tensors are looked at, lazy ones too: tree maps also put None and shapes in their place.
    """
    if not isinstance(data, (torch.Tensor, LazyTensor)):
        return
    if data.dtype != dtype:
        refuse(subject, "data's dtype", data.dtype, str(dtype), _RECAST, error=ShapeError)
    if tuple(data.shape) != shape:
        refuse(subject, "data's shape", tuple(data.shape), f"{shape} by {source}", _RECAST, error=ShapeError)
