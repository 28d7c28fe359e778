"""Layouts that follow from a mesh of ranks and partition specs; counts of the elements that ranks' trees cover."""

from ._coverage import Coverage, coverage
from ._mesh import Mesh
from ._placement import KeyFunction, Placement, mesh_columns, placed_columns
from ._shard import abstract, abstract_at, from_local, layout_of, shard, shard_at
from ._shards import RankBox, RankShard, mesh_shard, mesh_shards, rank_data, rank_leaf
from ._specs import AxisSplit, P, PartitionSpec, SpecEntry, SpecFunction, Specs, check_spec, specs_by_pattern, splits
