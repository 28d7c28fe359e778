"""ZeRO-1 buffers as shards: parameters in contiguous memory, split into equal ranges over the data-parallel ranks."""

from __future__ import annotations

import typing

from .core.deferred import face

__all__ = [
    "BufferPlace",
    "BufferPlan",
    "BufferRange",
    "buffer_slices",
    "flat_shards",
    "flat_targets",
    "plan_buffers",
    "slice_views",
]

if typing.TYPE_CHECKING:
    from .optim.buffers import (
        BufferPlace,
        BufferPlan,
        BufferRange,
        buffer_slices,
        flat_shards,
        flat_targets,
        plan_buffers,
        slice_views,
    )
else:
    __getattr__, __dir__ = face(
        __name__,
        __all__,
        "..optim.buffers",
    )
