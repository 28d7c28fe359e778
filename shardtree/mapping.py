"""The leaves of a sharded state dict: a rank's part of a global tensor or object, as immutable values.

Names and meanings are Megatron-Core's, but a change returns a new value. A shard is the box
[global_offset, global_offset + shape) of the global tensor named by its key, or one flat range of such a box.
"""

from __future__ import annotations

import typing

from .core.deferred import face

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

if typing.TYPE_CHECKING:
    from .core.mapping import (
        CommonStateDict,
        FactoryBuildFn,
        FactoryMergeFn,
        LocalNonpersistentObject,
        ReplicaId,
        ShardedBase,
        ShardedObject,
        ShardedStateDict,
        ShardedTensor,
        ShardedTensorFactory,
        StateDict,
        is_main_replica,
    )
else:
    __getattr__, __dir__ = face(
        __name__,
        __all__,
        "..core.mapping",
    )
