"""Layouts: columns that list all ranks' shards, checks that shards tile their tensors, and arrays of objects."""

import typing

from ._columns import (
    ROWS,
    BoxColumns,
    ShardColumns,
    TensorKind,
    check_columns,
    join_agreed,
    packed_kinds,
    select_rows,
    shard_boxes,
    shard_columns,
    unpacked_kinds,
)
from ._integrity import (
    access_problems,
    check_access,
    check_stored_shards,
    common_problems,
    join_checked,
    join_columns,
    raise_problems,
    sharding_problems,
    write_problems,
)
from ._object_array import ObjectArray, ObjectRule, Shape, apply_rule, cell_count, held_arrays, own_copy
from ._objects import ObjectColumns, join_objects, kind_problems, object_columns, object_problems
from ._problems import (
    Faults,
    Problem,
    doubled_faults,
    fault_problems,
    place_text,
    sharding_faults,
)

if typing.TYPE_CHECKING:
    from ._object_reshard import (
        OBJECT_RULES,
        ShapeChange,
        check_ruled,
        objects_by_rule,
        reshaped_arrays,
        reshard_objects,
        rules_by_key,
    )
    from ._rank_trees import RankTrees, tensor_shards, tree_columns, trees_by_rank
    from ._stored import Grid, StoredLayout, chunk_grids
else:
    from ..deferred import later

    __getattr__ = later(
        __name__,
        {
            "._object_reshard": (
                "OBJECT_RULES ShapeChange check_ruled objects_by_rule reshaped_arrays reshard_objects rules_by_key"
            ),
            "._rank_trees": "RankTrees tensor_shards tree_columns trees_by_rank",
            "._stored": "Grid StoredLayout chunk_grids",
        },
    )
