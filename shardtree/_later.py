"""Where the root's other names are: each is loaded from its room when it is first asked for (PEP 562).

Loading all takes a few hundred milliseconds, so `import shardtree` brings leaves and tree maps alone.
"""

import typing

_NAMES = {
    "checkpoint": (
        "AsyncCallsQueue CheckpointSeries StrictHandling async_calls check_replicas compare convert explain "
        "explain_ranks fingerprint is_checkpoint load load_common_state_dict load_content_metadata "
        "load_plain_tensors load_sharded_metadata load_tensors_metadata open_checkpoint remove_sharded_tensors save "
        "verify"
    ),
    "display": "draw",
    "layouts": "Mesh P PartitionSpec abstract abstract_at coverage from_local layout_of shard shard_at unshard",
    "live": "redistribute",
    "plans": "ReshardPlan plan_reshard reshard",
    "strategies": (
        "AsyncRequest LoadOptions SaveOptions StrategyAction default_strategies get_default_strategy "
        "register_default_strategy"
    ),
    "traces": "Trace trace",
    "world": "World distributed simulate",
}

ROOM_OF = {name: room for room, names in _NAMES.items() for name in names.split()}
"""The room of each name."""

ROOMS = tuple(
    (
        "buffers checkpoint display errors fingerprints interop layouts lenses live mapping objects optim pictures "
        "plans quantised retention storage strategies testing traces transforms trees world"
    ).split()
)
"""The rooms that users see: what isn't at the root is one dot further."""

# A type checker reads imports, not tables; tests/test_public_names.py holds the two against each other.
if typing.TYPE_CHECKING:
    from . import errors as errors
    from . import interop as interop
    from . import lenses as lenses
    from . import live as live
    from . import optim as optim
    from . import pictures as pictures
    from . import quantised as quantised
    from . import testing as testing
    from . import traces as traces
    from . import transforms as transforms
    from .conversion import convert as convert
    from .core import fingerprints as fingerprints
    from .core import layouts as layouts
    from .core import mapping as mapping
    from .core import plans as plans
    from .core import trees as trees
    from .core.layouts import Mesh as Mesh
    from .core.layouts import P as P
    from .core.layouts import PartitionSpec as PartitionSpec
    from .core.layouts import abstract as abstract
    from .core.layouts import abstract_at as abstract_at
    from .core.layouts import coverage as coverage
    from .core.layouts import from_local as from_local
    from .core.layouts import layout_of as layout_of
    from .core.layouts import shard as shard
    from .core.layouts import shard_at as shard_at
    from .inspection import check_replicas as check_replicas
    from .inspection import compare as compare
    from .inspection import explain as explain
    from .inspection import explain_ranks as explain_ranks
    from .inspection import fingerprint as fingerprint
    from .inspection import load_plain_tensors as load_plain_tensors
    from .inspection import open_checkpoint as open_checkpoint
    from .inspection import verify as verify
    from .live import redistribute as redistribute
    from .live.resharding import ReshardPlan as ReshardPlan
    from .live.resharding import plan_reshard as plan_reshard
    from .live.resharding import reshard as reshard
    from .live.resharding import unshard as unshard
    from .optim import buffers as buffers
    from .pictures import draw as draw
    from .series import CheckpointSeries as CheckpointSeries
    from .shell import checkpoint as checkpoint
    from .shell import storage as storage
    from .shell import world as world
    from .shell.checkpoint import AsyncCallsQueue as AsyncCallsQueue
    from .shell.checkpoint import StrictHandling as StrictHandling
    from .shell.checkpoint import async_calls as async_calls
    from .shell.checkpoint import is_checkpoint as is_checkpoint
    from .shell.checkpoint import load as load
    from .shell.checkpoint import load_common_state_dict as load_common_state_dict
    from .shell.checkpoint import load_content_metadata as load_content_metadata
    from .shell.checkpoint import load_sharded_metadata as load_sharded_metadata
    from .shell.checkpoint import load_tensors_metadata as load_tensors_metadata
    from .shell.checkpoint import remove_sharded_tensors as remove_sharded_tensors
    from .shell.checkpoint import save as save
    from .shell.table import AsyncRequest as AsyncRequest
    from .shell.table import LoadOptions as LoadOptions
    from .shell.table import SaveOptions as SaveOptions
    from .shell.table import StrategyAction as StrategyAction
    from .shell.table import default_strategies as default_strategies
    from .shell.table import get_default_strategy as get_default_strategy
    from .shell.table import register_default_strategy as register_default_strategy
    from .shell.world import World as World
    from .shell.world import distributed as distributed
    from .shell.world import simulate as simulate
    from .traces import Trace as Trace
    from .traces import trace as trace
