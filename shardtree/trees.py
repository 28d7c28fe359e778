"""Pure functions over trees: maps, paths, partitions and unions, differences, edits, factories.

Reductions over global trees are here, too; they are collective.

A tree is any nesting of dicts, lists, tuples, namedtuples, deques and classes that users registered. No function here
changes its argument; results have new containers where something changed, and share tensors.
"""

from __future__ import annotations

import typing

from .core.deferred import face

__all__ = [
    "HOLE",
    "Difference",
    "NumericDifference",
    "Record",
    "Transform",
    "WorstElement",
    "apply_factories",
    "apply_factory_merges",
    "bind",
    "broadcast_prefix",
    "cast",
    "combine",
    "compose",
    "data_at",
    "diff",
    "extract_metadata",
    "extract_nonpersistent",
    "extract_sharded",
    "flat",
    "flatten_with_paths",
    "leaves_with_paths",
    "map_by_pattern",
    "map_data",
    "map_params",
    "map_shards",
    "map_with_path",
    "merge",
    "narrow",
    "nested",
    "partition",
    "prefix",
    "rebox",
    "reduce_elements",
    "register_dataclass",
    "rename",
    "restrict",
    "select",
    "tree_at",
    "tree_norm",
    "tree_sum",
    "unbox",
    "unwrap",
    "without_data",
]

if typing.TYPE_CHECKING:
    from .core.trees import (
        HOLE,
        Difference,
        NumericDifference,
        Record,
        Transform,
        WorstElement,
        apply_factories,
        apply_factory_merges,
        bind,
        broadcast_prefix,
        cast,
        combine,
        compose,
        diff,
        extract_metadata,
        extract_nonpersistent,
        extract_sharded,
        flatten_with_paths,
        leaves_with_paths,
        map_data,
        map_shards,
        merge,
        narrow,
        partition,
        prefix,
        register_dataclass,
        rename,
        restrict,
        select,
        unwrap,
        without_data,
    )
    from .live import reduce_elements, tree_norm, tree_sum
    from .transforms import data_at, flat, map_by_pattern, map_params, map_with_path, nested, rebox, tree_at, unbox
else:
    __getattr__, __dir__ = face(
        __name__,
        __all__,
        "..core.trees",
        {
            "..live": "reduce_elements tree_norm tree_sum",
            "..transforms": "data_at flat map_by_pattern map_params map_with_path nested rebox tree_at unbox",
        },
    )
