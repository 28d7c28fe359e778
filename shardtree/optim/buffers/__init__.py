"""ZeRO-1 buffers: parameters in contiguous memory, of which each data-parallel rank has an equal range; as shards."""

from ._pack import plan_buffers
from ._plan import BufferPlace, BufferPlan, BufferRange
from ._shards import buffer_slices, flat_shards, flat_targets, slice_views
