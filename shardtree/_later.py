"""Import table of the root package's names: each name is imported from its module at its first use (PEP 562).

Importing all modules takes a few hundred milliseconds, and torch takes seconds. `import shardtree` does neither, so
that the command line can answer at once.
"""

import typing

NAMES = {
    "checkpoint": (
        "AsyncCallsQueue CheckpointSeries StrictHandling async_calls check_replicas compare convert explain "
        "explain_ranks fingerprint is_checkpoint load load_common_state_dict load_content_metadata "
        "load_plain_tensors load_sharded_metadata load_tensors_metadata open_checkpoint remove_sharded_tensors save "
        "verify"
    ),
    "core.lazy": "LazyTensor lazy_map",
    "core.mapping": (
        "CommonStateDict FactoryBuildFn FactoryMergeFn LocalNonpersistentObject ReplicaId ShardedBase "
        "ShardedObject ShardedStateDict ShardedTensor ShardedTensorFactory StateDict is_main_replica"
    ),
    "core.trees": (
        "apply_factories apply_factory_merges bind cast combine compose diff extract_metadata map_data map_shards "
        "merge narrow partition prefix rename select without_data"
    ),
    "display": "draw",
    "errors": "CheckpointingException",
    "interop.dtensor": "from_module module_tensors",
    "layouts": "Mesh P PartitionSpec abstract abstract_at coverage from_local layout_of shard shard_at unshard",
    "live": "redistribute",
    "plans": "ReshardPlan plan_reshard reshard",
    "strategies": (
        "AsyncRequest LoadOptions SaveOptions StrategyAction default_strategies get_default_strategy "
        "register_default_strategy"
    ),
    "traces": "Trace trace",
    "trees": "data_at map_by_pattern rebox tree_at unbox",
    "world": "World distributed simulate",
}
"""Names by module, separated by spaces."""

ROOMS = tuple(
    (
        "buffers checkpoint display errors fingerprints interop layouts lenses live mapping objects optim pictures "
        "plans quantised retention storage strategies testing traces transforms trees world"
    ).split()
)
"""The public modules; a name that isn't at the root is an attribute of one of them."""

# A type checker reads imports, not tables; tests/test_public_names.py compares the two.
if typing.TYPE_CHECKING:
    from . import buffers as buffers
    from . import checkpoint as checkpoint
    from . import display as display
    from . import errors as errors
    from . import fingerprints as fingerprints
    from . import interop as interop
    from . import layouts as layouts
    from . import lenses as lenses
    from . import live as live
    from . import mapping as mapping
    from . import objects as objects
    from . import optim as optim
    from . import pictures as pictures
    from . import plans as plans
    from . import quantised as quantised
    from . import retention as retention
    from . import storage as storage
    from . import strategies as strategies
    from . import testing as testing
    from . import traces as traces
    from . import transforms as transforms
    from . import trees as trees
    from . import world as world
    from .checkpoint import AsyncCallsQueue as AsyncCallsQueue
    from .checkpoint import CheckpointSeries as CheckpointSeries
    from .checkpoint import StrictHandling as StrictHandling
    from .checkpoint import async_calls as async_calls
    from .checkpoint import check_replicas as check_replicas
    from .checkpoint import compare as compare
    from .checkpoint import convert as convert
    from .checkpoint import explain as explain
    from .checkpoint import explain_ranks as explain_ranks
    from .checkpoint import fingerprint as fingerprint
    from .checkpoint import is_checkpoint as is_checkpoint
    from .checkpoint import load as load
    from .checkpoint import load_common_state_dict as load_common_state_dict
    from .checkpoint import load_content_metadata as load_content_metadata
    from .checkpoint import load_plain_tensors as load_plain_tensors
    from .checkpoint import load_sharded_metadata as load_sharded_metadata
    from .checkpoint import load_tensors_metadata as load_tensors_metadata
    from .checkpoint import open_checkpoint as open_checkpoint
    from .checkpoint import remove_sharded_tensors as remove_sharded_tensors
    from .checkpoint import save as save
    from .checkpoint import verify as verify
    from .core.lazy import LazyTensor as LazyTensor
    from .core.lazy import lazy_map as lazy_map
    from .display import draw as draw
    from .errors import CheckpointingException as CheckpointingException
    from .interop.dtensor import from_module as from_module
    from .interop.dtensor import module_tensors as module_tensors
    from .layouts import Mesh as Mesh
    from .layouts import P as P
    from .layouts import PartitionSpec as PartitionSpec
    from .layouts import abstract as abstract
    from .layouts import abstract_at as abstract_at
    from .layouts import coverage as coverage
    from .layouts import from_local as from_local
    from .layouts import layout_of as layout_of
    from .layouts import shard as shard
    from .layouts import shard_at as shard_at
    from .layouts import unshard as unshard
    from .live import redistribute as redistribute
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
    from .plans import ReshardPlan as ReshardPlan
    from .plans import plan_reshard as plan_reshard
    from .plans import reshard as reshard
    from .strategies import AsyncRequest as AsyncRequest
    from .strategies import LoadOptions as LoadOptions
    from .strategies import SaveOptions as SaveOptions
    from .strategies import StrategyAction as StrategyAction
    from .strategies import default_strategies as default_strategies
    from .strategies import get_default_strategy as get_default_strategy
    from .strategies import register_default_strategy as register_default_strategy
    from .traces import Trace as Trace
    from .traces import trace as trace
    from .trees import apply_factories as apply_factories
    from .trees import apply_factory_merges as apply_factory_merges
    from .trees import bind as bind
    from .trees import cast as cast
    from .trees import combine as combine
    from .trees import compose as compose
    from .trees import data_at as data_at
    from .trees import diff as diff
    from .trees import extract_metadata as extract_metadata
    from .trees import map_by_pattern as map_by_pattern
    from .trees import map_data as map_data
    from .trees import map_shards as map_shards
    from .trees import merge as merge
    from .trees import narrow as narrow
    from .trees import partition as partition
    from .trees import prefix as prefix
    from .trees import rebox as rebox
    from .trees import rename as rename
    from .trees import select as select
    from .trees import tree_at as tree_at
    from .trees import unbox as unbox
    from .trees import without_data as without_data
    from .world import World as World
    from .world import distributed as distributed
    from .world import simulate as simulate
