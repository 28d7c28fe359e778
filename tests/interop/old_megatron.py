"""Leaves as early versions of Megatron-Core had them: flat shards, factories that know no ranges, fewer fields.

Stands where `megatron.core.dist_checkpointing.mapping` stands: the classes have the names and fields, nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class ShardedTensor:
    key: str
    data: Any
    dtype: Any
    local_shape: Any
    global_shape: Any
    global_offset: Any
    axis_fragmentations: Any
    replica_id: Any = 0
    prepend_axis_num: int = 0
    allow_shape_mismatch: bool = False
    flattened_range: Any = None


@dataclass
class ShardedObject:
    key: str
    data: Any
    global_shape: Any
    global_offset: Any
    replica_id: Any = 0


@dataclass
class ShardedTensorFactory:
    key: str
    data: Any
    build_fn: Any
    merge_fn: Any
    replica_id: Any = 0

    def build(self) -> Any:
        return self.build_fn(self.key, self.data, self.replica_id)


class LocalNonpersistentObject:
    def __init__(self, obj: Any) -> None:
        self.obj = obj
