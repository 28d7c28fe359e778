"""How a global tensor lies over the ranks: shards in columns, and whether they tile it."""

from ._columns import BoxColumns as BoxColumns
from ._columns import ShardColumns as ShardColumns
from ._columns import TensorKind as TensorKind
from ._columns import join_columns as join_columns
from ._columns import select_rows as select_rows
from ._columns import shard_boxes as shard_boxes
from ._columns import shard_columns as shard_columns
from ._grid import Grid as Grid
from ._grid import chunk_grids as chunk_grids
from ._integrity import Problem as Problem
from ._integrity import access_problems as access_problems
from ._integrity import check_access as check_access
from ._integrity import first_gap as first_gap
from ._integrity import write_problems as write_problems
