"""ZeRO-1 buffers as shards: parameters in contiguous memory, with an equal range for each data-parallel rank."""

from ._pack import plan_buffers
from ._plan import BufferPlace, BufferPlan, BufferRange
from ._shards import buffer_slices, flat_shards, flat_targets, slice_views
