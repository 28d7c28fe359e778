"""Layouts that follow from a mesh of ranks and a partition spec for each tensor."""

from ._columns import Placement as Placement
from ._columns import mesh_columns as mesh_columns
from ._columns import placed_columns as placed_columns
from ._keyed import KeyFunction as KeyFunction
from ._mesh import Mesh as Mesh
from ._shard import abstract as abstract
from ._shard import abstract_at as abstract_at
from ._shard import from_local as from_local
from ._shard import layout_of as layout_of
from ._shard import shard as shard
from ._shard import shard_at as shard_at
from ._shards import RankBox as RankBox
from ._shards import RankShard as RankShard
from ._shards import mesh_shard as mesh_shard
from ._shards import mesh_shards as mesh_shards
from ._shards import rank_data as rank_data
from ._shards import rank_leaf as rank_leaf
from ._specs import AxisSplit as AxisSplit
from ._specs import P as P
from ._specs import PartitionSpec as PartitionSpec
from ._specs import SpecEntry as SpecEntry
from ._specs import SpecFunction as SpecFunction
from ._specs import Specs as Specs
from ._specs import check_spec as check_spec
from ._specs import specs_by_pattern as specs_by_pattern
