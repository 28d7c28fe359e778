"""Conversion between DTensors, as in FSDP2 and tensor parallelism, and our shards; without communication.

torch.distributed.tensor is imported when a function is called, not before.
"""

from ._convert import dtensor_layout as dtensor_layout
from ._convert import from_dtensors as from_dtensors
from ._convert import to_dtensors as to_dtensors
from ._placed import mesh_of as mesh_of
from ._placed import spec_of as spec_of
