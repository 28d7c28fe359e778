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
from ._shards import Part as Part
from ._shards import PartBox as PartBox
from ._shards import mesh_part as mesh_part
from ._shards import mesh_parts as mesh_parts
from ._shards import part_data as part_data
from ._shards import part_shard as part_shard
from ._specs import PartitionSpec as PartitionSpec
from ._specs import SpecEntry as SpecEntry
from ._specs import SpecFunction as SpecFunction
from ._specs import Specs as Specs
from ._specs import Split as Split
from ._specs import check_spec as check_spec
from ._specs import specs_by_pattern as specs_by_pattern
