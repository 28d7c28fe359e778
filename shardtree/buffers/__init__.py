"""ZeRO-1 buffers: parameters in contiguous memory, of which each data-parallel rank has an equal range; as shards."""

from ._pack import plan_buffers as plan_buffers
from ._plan import BufferPlace as BufferPlace
from ._plan import BufferPlan as BufferPlan
from ._plan import BufferRange as BufferRange
from ._shards import buffer_slices as buffer_slices
from ._shards import flat_shards as flat_shards
from ._shards import flat_targets as flat_targets
from ._shards import slice_views as slice_views

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
