"""Hypothesis strategies for sharded states, and laws to check functions against.

For your own tests, with the extra ``testing``; ``import shardtree`` doesn't load it. Strategies draw plain
descriptions (a dtype, a tensor, a `Layout`), and functions make shards from them, so that drawing doesn't run code that
is under test. A law raises AssertionError and says what differs.
"""

from ._bits import assemble as assemble
from ._bits import bits as bits
from ._bits import first_difference as first_difference
from ._bits import outline as outline
from ._bits import refilled as refilled
from ._factories import factories as factories
from ._factories import glu as glu
from ._factories import lens_factories as lens_factories
from ._factories import stacked as stacked
from ._factories import transposed as transposed
from ._law_buffers import BufferOptions as BufferOptions
from ._law_buffers import buffer_options as buffer_options
from ._law_buffers import check_buffer_plan as check_buffer_plan
from ._law_buffers import check_flat_shards as check_flat_shards
from ._law_buffers import packed_slices as packed_slices
from ._law_factory import check_factory as check_factory
from ._law_lens import check_build_undoes_merge as check_build_undoes_merge
from ._law_lens import check_layouts_agree as check_layouts_agree
from ._law_lens import check_lens as check_lens
from ._law_plans import check_layout as check_layout
from ._law_plans import check_load_plan as check_load_plan
from ._law_plans import check_writes as check_writes
from ._law_purity import check_commutes as check_commutes
from ._law_purity import check_pure as check_pure
from ._law_reshard import check_filled as check_filled
from ._law_reshard import check_reshard as check_reshard
from ._law_reshard import check_reshard_plan as check_reshard_plan
from ._law_reshard import shard_elements as shard_elements
from ._law_schedules import check_moved as check_moved
from ._law_schedules import check_relayed as check_relayed
from ._law_schedules import check_schedule as check_schedule
from ._law_schedules import element_numbers as element_numbers
from ._law_schedules import moved as moved
from ._layout import Layout as Layout
from ._layout import Piece as Piece
from ._layout import cut as cut
from ._layouts import even_layout as even_layout
from ._layouts import flat_layouts as flat_layouts
from ._layouts import irregular_layouts as irregular_layouts
from ._layouts import layouts as layouts
from ._layouts import regular_layouts as regular_layouts
from ._layouts import replicas as replicas
from ._lens_cases import LENS_CASES as LENS_CASES
from ._lens_cases import LensCase as LensCase
from ._meshes import MeshCase as MeshCase
from ._meshes import mesh_cases as mesh_cases
from ._meshes import meshes as meshes
from ._meshes import partition_specs as partition_specs
from ._optimizer_states import OptimizerState as OptimizerState
from ._optimizer_states import check_held_once as check_held_once
from ._optimizer_states import check_optimizer_roundtrip as check_optimizer_roundtrip
from ._optimizer_states import even_optimizer_layout as even_optimizer_layout
from ._optimizer_states import optimizer_layouts as optimizer_layouts
from ._optimizer_states import optimizer_states as optimizer_states
from ._optimizer_states import rank_optimizer as rank_optimizer
from ._roundtrip import check_roundtrip as check_roundtrip
from ._states import GlobalState as GlobalState
from ._states import ShardedTrees as ShardedTrees
from ._states import common_states as common_states
from ._states import global_states as global_states
from ._states import rank_tree as rank_tree
from ._states import sharded_trees as sharded_trees
from ._states import state_layouts as state_layouts
from ._states import target_tree as target_tree
from ._tensors import PRINTABLE_DTYPES as PRINTABLE_DTYPES
from ._tensors import STORABLE_DTYPES as STORABLE_DTYPES
from ._tensors import dtypes as dtypes
from ._tensors import random_bits as random_bits
from ._tensors import shapes as shapes
from ._tensors import tensors as tensors
from ._watched import Call as Call
from ._watched import WatchedSibling as WatchedSibling
from ._watched import WatchedStorage as WatchedStorage
from .conformance import RefusedCase as RefusedCase
from .conformance import StrategyReport as StrategyReport
from .conformance import check_strategy as check_strategy
from .conformance._row_cases import check_rows as check_rows

__all__ = [
    "LENS_CASES",
    "PRINTABLE_DTYPES",
    "STORABLE_DTYPES",
    "BufferOptions",
    "Call",
    "GlobalState",
    "Layout",
    "LensCase",
    "MeshCase",
    "OptimizerState",
    "Piece",
    "RefusedCase",
    "ShardedTrees",
    "StrategyReport",
    "WatchedSibling",
    "WatchedStorage",
    "assemble",
    "bits",
    "buffer_options",
    "check_buffer_plan",
    "check_build_undoes_merge",
    "check_commutes",
    "check_factory",
    "check_filled",
    "check_flat_shards",
    "check_held_once",
    "check_layout",
    "check_layouts_agree",
    "check_lens",
    "check_load_plan",
    "check_moved",
    "check_optimizer_roundtrip",
    "check_pure",
    "check_relayed",
    "check_reshard",
    "check_reshard_plan",
    "check_roundtrip",
    "check_rows",
    "check_schedule",
    "check_strategy",
    "check_writes",
    "common_states",
    "cut",
    "dtypes",
    "element_numbers",
    "even_layout",
    "even_optimizer_layout",
    "factories",
    "first_difference",
    "flat_layouts",
    "global_states",
    "glu",
    "irregular_layouts",
    "layouts",
    "lens_factories",
    "mesh_cases",
    "meshes",
    "moved",
    "optimizer_layouts",
    "optimizer_states",
    "outline",
    "packed_slices",
    "partition_specs",
    "random_bits",
    "rank_optimizer",
    "rank_tree",
    "refilled",
    "regular_layouts",
    "replicas",
    "shapes",
    "shard_elements",
    "sharded_trees",
    "stacked",
    "state_layouts",
    "target_tree",
    "tensors",
    "transposed",
]
