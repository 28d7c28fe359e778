"""shardtree: a training job's sharded state as an immutable tree, saved in one layout and loaded in any other.

The data flows one way: **leaves** (`ShardedTensor`, `ShardedObject`, `ShardedTensorFactory`) are held in trees;
**tree maps** make new trees of them; a **plan** says which bytes go where; a **strategy** of the dispatch table runs
it; **bytes** land in a folder or in the target's memory. Everything before the strategy is pure.
"""

import importlib
import inspect
import sys
import typing

from .errors import AlreadyACheckpoint as AlreadyACheckpoint
from .errors import CheckpointingException as CheckpointingException
from .errors import CheckpointReplaced as CheckpointReplaced
from .errors import CorruptCheckpoint as CorruptCheckpoint
from .errors import IntegrityError as IntegrityError
from .errors import KeyMismatch as KeyMismatch
from .errors import MetadataError as MetadataError
from .errors import NotACheckpoint as NotACheckpoint
from .errors import RemoteError as RemoteError
from .errors import ShapeError as ShapeError
from .errors import StorageError as StorageError
from .errors import StrategyError as StrategyError
from .errors import TreeError as TreeError
from .errors import UnsafeFile as UnsafeFile
from .errors import UnsupportedValue as UnsupportedValue
from .errors import WorldError as WorldError
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
from .trees import HOLE as HOLE
from .trees import Difference as Difference
from .trees import Hole as Hole
from .trees import Record as Record
from .trees import apply_factories as apply_factories
from .trees import apply_factory_merges as apply_factory_merges
from .trees import bind as bind
from .trees import cast as cast
from .trees import combine as combine
from .trees import common_with_holes as common_with_holes
from .trees import compose as compose
from .trees import diff as diff
from .trees import extract_metadata as extract_metadata
from .trees import extract_nonpersistent as extract_nonpersistent
from .trees import extract_sharded as extract_sharded
from .trees import join as join
from .trees import leaves_with_paths as leaves_with_paths
from .trees import map_data as map_data
from .trees import map_shards as map_shards
from .trees import merge as merge
from .trees import narrow as narrow
from .trees import partition as partition
from .trees import prefix as prefix
from .trees import rebox as rebox
from .trees import rename as rename
from .trees import select as select
from .trees import shard_leaves as shard_leaves
from .trees import unbox as unbox
from .trees import without_data as without_data
from .trees import without_holes as without_holes

__version__ = "0.1.0"

# Loading the rest takes a few hundred milliseconds, so it waits until one of its names is asked for. Type checkers see
# plain names, and no __getattr__, which would hide misspelt ones from them.
if typing.TYPE_CHECKING:
    from ._later import *  # noqa: F403
else:

    def __getattr__(name: str) -> object:
        if name == "__all__":
            return __dir__()
        if name[:1] != "_" and name in (loaded := _loaded()):
            return loaded[name]
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name, obj=sys.modules[__name__])

    def __dir__() -> list[str]:
        return sorted(name for name, value in _loaded().items() if name[0] != "_" and not inspect.ismodule(value))

    def _loaded() -> dict[str, object]:
        """Return this module's attributes, after those of `_later` have become some of them."""
        later = vars(importlib.import_module("._later", __name__))
        # What the caller has put in the place of one stays.
        missing = {name: value for name, value in later.items() if name[0] != "_" and name not in globals()}
        globals().update(missing)
        return dict(globals())  # a copy: another thread's import may add to these
