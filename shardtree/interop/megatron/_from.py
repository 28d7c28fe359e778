"""from_megatron: a tree with Megatron-Core's leaves becomes one with ours."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ...errors import CheckpointingException, MetadataError, TreePath
from ...mapping import LocalNonpersistentObject, ShardedObject, ShardedTensor, ShardedTensorFactory
from ...trees import shard_leaves
from ._functions import build_for_us, merge_for_us
from ._kinds import describe_failure, kind_of


def from_megatron(tree: Any) -> Any:
    """Return a tree like Megatron-Core's `sharded_state_dict()`, with shards, objects and factories of ours.

    Containers are new, subclasses of dict and list are plain ones; tensors are shared. Leaves that aren't
    Megatron-Core's stay as they are. The leaves may be of any version: what a version hasn't takes its default.

    Args:
        tree: dicts, lists and tuples of Megatron-Core's leaves and plain values.

    Returns:
        A tree for `save` and `load`. Its factories let Megatron-Core's build and merge.

    Raises:
        MetadataError: a leaf's fields contradict each other or its data; names its key and path.

    Examples:
        >>> from dataclasses import dataclass
        >>> @dataclass
        ... class ShardedObject:  # Megatron-Core's looks like this one
        ...     key: str
        ...     data: object
        ...     global_shape: tuple
        ...     global_offset: tuple
        ...     replica_id: int = 0
        >>> from_megatron({"rng": ShardedObject("rng", [1], (1, 2), (0, 1)), "step": 3})
        {'rng': ShardedObject(key='rng', data=<list>, global_shape=(1, 2), global_offset=(0, 1)), 'step': 3}

    References:
        megatron.core.dist_checkpointing.mapping, megatron-core 0.6 to 0.16.1.
    """
    pairs, rebuild = shard_leaves(tree)
    return rebuild([_from_leaf(leaf, path) for path, leaf in pairs])


def _from_leaf(leaf: Any, path: TreePath) -> Any:
    kind = kind_of(leaf)
    if kind is None:
        return leaf
    try:
        return _FROM[kind](leaf)
    except CheckpointingException as error:
        raise MetadataError(describe_failure("from_megatron", kind, leaf, path, error)) from error


def _tensor(theirs: Any) -> ShardedTensor:
    has_prepended = hasattr(theirs, "prepend_axis_num")
    prepended = theirs.prepend_axis_num if has_prepended else len(theirs.global_shape) - len(theirs.local_shape)
    return ShardedTensor(
        key=theirs.key,
        data=theirs.data,
        dtype=getattr(theirs, "dtype", getattr(theirs.data, "dtype", None)),  # type: ignore[arg-type]
        local_shape=_numbers(theirs, "local_shape"),
        global_shape=_numbers(theirs, "global_shape"),
        global_offset=_numbers(theirs, "global_offset"),
        axis_fragmentations=_numbers(theirs, "axis_fragmentations", None),
        replica_id=_numbers(theirs, "replica_id", 0),
        prepend_axis_num=prepended,
        allow_shape_mismatch=getattr(theirs, "allow_shape_mismatch", False),
        flattened_range=getattr(theirs, "flattened_range", None),
    )


def _object(theirs: Any) -> ShardedObject:
    place = (_numbers(theirs, field, 0) for field in ("global_shape", "global_offset", "replica_id"))
    return ShardedObject(theirs.key, theirs.data, *place)


def _factory(theirs: Any) -> ShardedTensorFactory:
    replica_id, flat = _numbers(theirs, "replica_id", 0), getattr(theirs, "flattened_range", None)
    # Checked before its functions are wrapped: what wraps them can be called in any case.
    ours = ShardedTensorFactory(theirs.key, theirs.data, theirs.build_fn, theirs.merge_fn, replica_id, flat)
    return replace(ours, build_fn=build_for_us(theirs, from_megatron), merge_fn=merge_for_us(theirs))


def _numbers(theirs: Any, field: str, default: Any = None) -> Any:
    """Return a field that may be a list there, and is a tuple here."""
    value = getattr(theirs, field, default)
    return tuple(value) if isinstance(value, list) else value


_FROM: dict[str, Callable[[Any], Any]] = {
    "ShardedTensor": _tensor,
    "ShardedObject": _object,
    "ShardedTensorFactory": _factory,
    "LocalNonpersistentObject": lambda theirs: LocalNonpersistentObject(theirs.obj),
}
