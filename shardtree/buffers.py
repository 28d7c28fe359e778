"""ZeRO-1 buffers: parameters in contiguous memory, of which each data-parallel rank has an equal range; as shards."""

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
