"""Layouts of global tensors over ranks: tables of shards, and checks that shards cover each tensor exactly once."""

from __future__ import annotations

import typing

from .core.deferred import face

__all__ = [
    "AxisSplit",
    "Coverage",
    "Mesh",
    "ObjectColumns",
    "P",
    "PartitionSpec",
    "Problem",
    "RankShard",
    "ShardColumns",
    "SpecFunction",
    "Specs",
    "StoredLayout",
    "TensorKind",
    "abstract",
    "abstract_at",
    "check_access",
    "coverage",
    "from_local",
    "join_columns",
    "layout_of",
    "mesh_columns",
    "mesh_shards",
    "object_columns",
    "shard",
    "shard_at",
    "shard_columns",
    "sharding_problems",
    "specs_by_pattern",
    "unshard",
]

if typing.TYPE_CHECKING:
    from .core.layouts import (
        ObjectColumns,
        Problem,
        ShardColumns,
        StoredLayout,
        TensorKind,
        check_access,
        join_columns,
        object_columns,
        shard_columns,
        sharding_problems,
    )
    from .live.resharding import unshard
    from .meshes import (
        AxisSplit,
        Coverage,
        Mesh,
        P,
        PartitionSpec,
        RankShard,
        SpecFunction,
        Specs,
        abstract,
        abstract_at,
        coverage,
        from_local,
        layout_of,
        mesh_columns,
        mesh_shards,
        shard,
        shard_at,
        specs_by_pattern,
    )
else:
    __getattr__, __dir__ = face(
        __name__,
        __all__,
        "..core.layouts",
        {
            "..live.resharding": "unshard",
            "..meshes": (
                "AxisSplit Coverage Mesh P PartitionSpec RankShard SpecFunction Specs abstract abstract_at coverage "
                "from_local layout_of mesh_columns mesh_shards shard shard_at specs_by_pattern"
            ),
        },
    )
