"""The leaves of a sharded state dict: what a rank holds of a global tensor or object, as immutable values.

Names and meaning are Megatron-Core's; every change is a new value. A shard is the box
[global_offset, global_offset + shape) of the global tensor named by its key, or one flat range of such a box.
"""

from ._base import CommonStateDict as CommonStateDict
from ._base import FactoryBuildFn as FactoryBuildFn
from ._base import FactoryMergeFn as FactoryMergeFn
from ._base import RankOffset as RankOffset
from ._base import ReplicaId as ReplicaId
from ._base import ShardedBase as ShardedBase
from ._base import ShardedStateDict as ShardedStateDict
from ._base import StateDict as StateDict
from ._base import is_main_replica as is_main_replica
from ._many import box_of as box_of
from ._many import whole_tensors as whole_tensors
from ._many import with_data as with_data
from ._object import LocalNonpersistentObject as LocalNonpersistentObject
from ._object import ShardedObject as ShardedObject
from ._object import ShardedTensorFactory as ShardedTensorFactory
from ._tensor import ShardedTensor as ShardedTensor

__all__ = [
    "CommonStateDict",
    "FactoryBuildFn",
    "FactoryMergeFn",
    "LocalNonpersistentObject",
    "ReplicaId",
    "ShardedBase",
    "ShardedObject",
    "ShardedStateDict",
    "ShardedTensor",
    "ShardedTensorFactory",
    "StateDict",
    "is_main_replica",
]
