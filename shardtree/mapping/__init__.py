"""The leaves of a sharded state dict: what a rank holds of a global tensor or object, as immutable values.

Names and meaning are Megatron-Core's; every change is a new value. A shard is the box
[global_offset, global_offset + shape) of the global tensor named by its key, or one flat range of such a box.
"""

from ._aliases import CommonStateDict as CommonStateDict
from ._aliases import FactoryBuildFn as FactoryBuildFn
from ._aliases import FactoryMergeFn as FactoryMergeFn
from ._aliases import RankOffset as RankOffset
from ._aliases import ReplicaId as ReplicaId
from ._aliases import ShardedStateDict as ShardedStateDict
from ._aliases import StateDict as StateDict
from ._base import ShardedBase as ShardedBase
from ._factory import ShardedTensorFactory as ShardedTensorFactory
from ._local import LocalNonpersistentObject as LocalNonpersistentObject
from ._many import box_of as box_of
from ._many import whole_tensors as whole_tensors
from ._many import with_data as with_data
from ._object import ShardedObject as ShardedObject
from ._replica import is_main_replica as is_main_replica
from ._tensor import ShardedTensor as ShardedTensor
