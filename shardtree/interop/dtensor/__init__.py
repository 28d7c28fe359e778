"""DTensors as our shards, and back: what FSDP2 and tensor parallelism hold, without communication.

torch.distributed.tensor is imported when a function is called, not before.
"""

from ._from import from_dtensors as from_dtensors
from ._layout import dtensor_layout as dtensor_layout
from ._meshes import mesh_of as mesh_of
from ._specs import spec_of as spec_of
from ._to import to_dtensors as to_dtensors
