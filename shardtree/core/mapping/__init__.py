"""The leaves of a sharded state dict: a rank's parts of global tensors and objects, as immutable values.

Names and meanings are those of Megatron-Core. A shard is the box [global_offset, global_offset + shape) of the global
tensor that its key names, or one flat range of such a box.
"""

from ._elements import given_tensor, has_elements, is_wrapper, lacks_memory
from ._functions import same_value
from ._leaves import (
    CommonStateDict,
    FactoryBuildFn,
    FactoryMergeFn,
    LocalNonpersistentObject,
    RankOffset,
    ReplicaId,
    ShardedBase,
    ShardedObject,
    ShardedStateDict,
    ShardedTensorFactory,
    StateDict,
    is_main_replica,
    refuse_subclass,
)
from ._many import box_of, whole_tensors, with_data, with_keys
from ._tensor import SHAPE_FIX, ShardedTensor, check_has_shape, without_shape
