"""Pure functions over trees: maps, paths, partitions and unions, differences, edits, factories.

A tree is any nesting of dicts, lists, tuples, namedtuples, deques and classes that users registered. No function here
changes its argument; results have new containers where something changed, and share tensors.
"""

from ._checks import check_is_tree as check_is_tree
from ._checks import refuse_dtensors as refuse_dtensors
from ._checks import refuse_hidden as refuse_hidden
from ._checks import refuse_too_deep as refuse_too_deep
from ._compose import bind as bind
from ._compose import compose as compose
from ._difference import Difference as Difference
from ._difference import diff as diff
from ._difference import value_at as value_at
from ._edit import as_integers as as_integers
from ._edit import cast as cast
from ._edit import empty_data as empty_data
from ._edit import join_data as join_data
from ._edit import narrow as narrow
from ._edit import prefix as prefix
from ._edit import rename as rename
from ._edit import without_data as without_data
from ._factories import apply_factories as apply_factories
from ._factories import apply_factory_merges as apply_factory_merges
from ._factories import build_factories as build_factories
from ._factories import extract_metadata as extract_metadata
from ._join import Record as Record
from ._join import common_with_holes as common_with_holes
from ._join import comparable as comparable
from ._join import is_hollow as is_hollow
from ._join import join as join
from ._join import left_out as left_out
from ._join import without_holes as without_holes
from ._key_patterns import check_stars as check_stars
from ._key_patterns import fill_key as fill_key
from ._key_patterns import key_expression as key_expression
from ._key_patterns import match_key as match_key
from ._key_patterns import match_keys as match_keys
from ._key_patterns import stars as stars
from ._maps import leaves_with_paths as leaves_with_paths
from ._maps import map_data as map_data
from ._maps import map_shards as map_shards
from ._maps import path_key as path_key
from ._maps import shard_leaves as shard_leaves
from ._nodes import HOLE as HOLE
from ._nodes import NAMESPACE as NAMESPACE
from ._nodes import Hole as Hole
from ._nodes import call_at as call_at
from ._nodes import namedtuple_types as namedtuple_types
from ._partition import combine as combine
from ._partition import extract_nonpersistent as extract_nonpersistent
from ._partition import extract_sharded as extract_sharded
from ._partition import merge as merge
from ._partition import partition as partition
from ._partition import prune as prune
from ._partition import select as select
from ._registry import register_nodes
from ._registry import with_data as with_data
from ._unbox import rebox as rebox
from ._unbox import unbox as unbox

register_nodes()

__all__ = [
    "HOLE",
    "Difference",
    "Hole",
    "Record",
    "apply_factories",
    "apply_factory_merges",
    "bind",
    "cast",
    "combine",
    "common_with_holes",
    "compose",
    "diff",
    "extract_metadata",
    "extract_nonpersistent",
    "extract_sharded",
    "leaves_with_paths",
    "map_data",
    "map_shards",
    "merge",
    "narrow",
    "partition",
    "prefix",
    "rebox",
    "rename",
    "select",
    "shard_leaves",
    "unbox",
    "without_data",
    "without_holes",
]
