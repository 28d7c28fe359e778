"""shardtree: a training job's sharded state as an immutable tree, saved in one layout and loaded in any other.

The data flows one way: **leaves** (`ShardedTensor`, `ShardedObject`, `ShardedTensorFactory`) are held in trees;
**tree maps** make new trees of them; a **plan** says which bytes go where; a **strategy** of the dispatch table runs
it; **bytes** land in a folder or in the target's memory. Everything before the strategy is pure.
"""

import inspect
import typing

from . import _old_names
from .errors import CheckpointingException as CheckpointingException
from .lazy import LazyTensor as LazyTensor
from .lazy import lazy_map as lazy_map
from .mapping import CommonStateDict as CommonStateDict
from .mapping import FactoryBuildFn as FactoryBuildFn
from .mapping import FactoryMergeFn as FactoryMergeFn
from .mapping import LocalNonpersistentObject as LocalNonpersistentObject
from .mapping import ReplicaId as ReplicaId
from .mapping import ShardedBase as ShardedBase
from .mapping import ShardedObject as ShardedObject
from .mapping import ShardedStateDict as ShardedStateDict
from .mapping import ShardedTensor as ShardedTensor
from .mapping import ShardedTensorFactory as ShardedTensorFactory
from .mapping import StateDict as StateDict
from .mapping import is_main_replica as is_main_replica
from .trees import apply_factories as apply_factories
from .trees import apply_factory_merges as apply_factory_merges
from .trees import bind as bind
from .trees import cast as cast
from .trees import combine as combine
from .trees import compose as compose
from .trees import diff as diff
from .trees import extract_metadata as extract_metadata
from .trees import map_data as map_data
from .trees import map_shards as map_shards
from .trees import merge as merge
from .trees import narrow as narrow
from .trees import partition as partition
from .trees import prefix as prefix
from .trees import rebox as rebox
from .trees import rename as rename
from .trees import select as select
from .trees import unbox as unbox
from .trees import without_data as without_data

__version__ = "0.1.0"

_old_names.install()

# A type checker sees plain names, and no __getattr__, which would hide misspelt ones from it.
if typing.TYPE_CHECKING:
    from ._later import *  # noqa: F403
else:

    def __getattr__(name: str) -> object:
        from ._deferred import import_quickly, later
        from ._later import ROOM_OF, ROOMS

        if name == "__all__":
            return _names()
        if name in ROOMS:
            return import_quickly(f".{name}", __name__)
        return later(__name__, {known: f".{room}" for known, room in ROOM_OF.items()})(name)

    def __dir__() -> list[str]:
        from ._later import ROOMS

        return sorted({*_names(), *ROOMS})

    def _names() -> list[str]:
        from ._later import ROOM_OF

        ours = (name for name, value in globals().items() if name[0] != "_" and not inspect.ismodule(value))
        return sorted({*ours, *ROOM_OF})
