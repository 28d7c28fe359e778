"""Layouts of global tensors over ranks: shards as columns, and whether they tile their tensors."""

from ._columns import BoxColumns as BoxColumns
from ._columns import ShardColumns as ShardColumns
from ._columns import TensorKind as TensorKind
from ._columns import check_columns as check_columns
from ._columns import select_rows as select_rows
from ._columns import shard_boxes as shard_boxes
from ._columns import shard_columns as shard_columns
from ._coverage import Coverage as Coverage
from ._coverage import RankTrees as RankTrees
from ._coverage import coverage as coverage
from ._coverage import tensor_shards as tensor_shards
from ._coverage import tree_columns as tree_columns
from ._coverage import trees_by_rank as trees_by_rank
from ._grid import Grid as Grid
from ._grid import chunk_grids as chunk_grids
from ._unshard import unshard as unshard
from .integrity import Faults as Faults
from .integrity import ObjectColumns as ObjectColumns
from .integrity import Problem as Problem
from .integrity import access_problems as access_problems
from .integrity import check_access as check_access
from .integrity import common_problems as common_problems
from .integrity import doubled_faults as doubled_faults
from .integrity import join_agreed as join_agreed
from .integrity import join_checked as join_checked
from .integrity import join_columns as join_columns
from .integrity import join_objects as join_objects
from .integrity import kind_problems as kind_problems
from .integrity import object_columns as object_columns
from .integrity import object_problems as object_problems
from .integrity import place_text as place_text
from .integrity import problem_lines as problem_lines
from .integrity import raise_problems as raise_problems
from .integrity import select_faults as select_faults
from .integrity import sharding_faults as sharding_faults
from .integrity import sharding_problems as sharding_problems
from .integrity import write_problems as write_problems
from .meshes import AxisSplit as AxisSplit
from .meshes import KeyFunction as KeyFunction
from .meshes import Mesh as Mesh
from .meshes import P as P
from .meshes import PartitionSpec as PartitionSpec
from .meshes import RankBox as RankBox
from .meshes import RankShard as RankShard
from .meshes import SpecEntry as SpecEntry
from .meshes import SpecFunction as SpecFunction
from .meshes import Specs as Specs
from .meshes import abstract as abstract
from .meshes import abstract_at as abstract_at
from .meshes import check_spec as check_spec
from .meshes import from_local as from_local
from .meshes import layout_of as layout_of
from .meshes import mesh_columns as mesh_columns
from .meshes import mesh_shard as mesh_shard
from .meshes import mesh_shards as mesh_shards
from .meshes import rank_data as rank_data
from .meshes import rank_leaf as rank_leaf
from .meshes import shard as shard
from .meshes import shard_at as shard_at
from .meshes import specs_by_pattern as specs_by_pattern

__all__ = [
    "AxisSplit",
    "BoxColumns",
    "Coverage",
    "Grid",
    "KeyFunction",
    "Mesh",
    "ObjectColumns",
    "P",
    "PartitionSpec",
    "Problem",
    "RankBox",
    "RankShard",
    "RankTrees",
    "ShardColumns",
    "SpecEntry",
    "SpecFunction",
    "Specs",
    "TensorKind",
    "abstract",
    "abstract_at",
    "access_problems",
    "check_access",
    "common_problems",
    "coverage",
    "from_local",
    "join_columns",
    "layout_of",
    "mesh_columns",
    "mesh_shards",
    "object_columns",
    "rank_leaf",
    "shard",
    "shard_at",
    "shard_columns",
    "sharding_problems",
    "specs_by_pattern",
    "tree_columns",
    "unshard",
]
