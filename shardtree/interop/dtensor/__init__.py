"""Conversion between DTensors, as in FSDP2 and tensor parallelism, and our shards; without communication.

torch.distributed.tensor is imported when a function is called, not before.
"""

from ._convert import dtensor_layout, from_dtensors, to_dtensors
from ._module import ModuleKeys, load_module
from ._module_trees import from_module, module_tensors
from ._placed import mesh_of, spec_of

__all__ = [
    "ModuleKeys",
    "dtensor_layout",
    "from_dtensors",
    "from_module",
    "load_module",
    "mesh_of",
    "module_tensors",
    "spec_of",
    "to_dtensors",
]
