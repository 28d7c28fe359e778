"""shardtree: a training job's sharded state as an immutable tree, saved in one layout and loaded in any other.

The data flows one way: **leaves** (`ShardedTensor`, `ShardedObject`, `ShardedTensorFactory`) are held in trees;
**tree maps** make new trees of them; a **plan** says which bytes go where; a **strategy** of the dispatch table runs
it; **bytes** land in a folder or in the target's memory. Everything before the strategy is pure.
"""

import inspect
import typing

from . import _old_names
from .core.lazy import LazyTensor as LazyTensor
from .core.lazy import lazy_map as lazy_map
from .core.mapping import CommonStateDict as CommonStateDict
from .core.mapping import FactoryBuildFn as FactoryBuildFn
from .core.mapping import FactoryMergeFn as FactoryMergeFn
from .core.mapping import LocalNonpersistentObject as LocalNonpersistentObject
from .core.mapping import ReplicaId as ReplicaId
from .core.mapping import ShardedBase as ShardedBase
from .core.mapping import ShardedObject as ShardedObject
from .core.mapping import ShardedStateDict as ShardedStateDict
from .core.mapping import ShardedTensor as ShardedTensor
from .core.mapping import ShardedTensorFactory as ShardedTensorFactory
from .core.mapping import StateDict as StateDict
from .core.mapping import is_main_replica as is_main_replica
from .core.trees import apply_factories as apply_factories
from .core.trees import apply_factory_merges as apply_factory_merges
from .core.trees import bind as bind
from .core.trees import cast as cast
from .core.trees import combine as combine
from .core.trees import compose as compose
from .core.trees import diff as diff
from .core.trees import extract_metadata as extract_metadata
from .core.trees import map_data as map_data
from .core.trees import map_shards as map_shards
from .core.trees import merge as merge
from .core.trees import narrow as narrow
from .core.trees import partition as partition
from .core.trees import prefix as prefix
from .core.trees import rebox as rebox
from .core.trees import rename as rename
from .core.trees import select as select
from .core.trees import unbox as unbox
from .core.trees import without_data as without_data
from .errors import CheckpointingException as CheckpointingException

__version__ = "0.1.0"

_old_names.install()

# A type checker sees plain names, and no __getattr__, which would hide misspelt ones from it.
if typing.TYPE_CHECKING:
    from ._later import *  # noqa: F403
else:

    def __getattr__(name: str) -> object:
        from ._later import NAMES, ROOMS
        from .core.deferred import import_quickly, later

        if name == "__all__":
            return _names()
        if name in ROOMS:
            return import_quickly(f".{name}", __name__)
        return later(__name__, {f".{room}": names for room, names in NAMES.items()})(name)

    def __dir__() -> list[str]:
        from ._later import ROOMS

        return sorted({*_names(), *ROOMS})

    def _names() -> list[str]:
        from ._later import NAMES

        ours = (name for name, value in globals().items() if name[0] != "_" and not inspect.ismodule(value))
        return sorted({*ours, *" ".join(NAMES.values()).split()})
