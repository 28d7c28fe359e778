"""The two functions of a factory for the other library: what they build is converted, what they merge is plain.

Each is a `functools.partial` of a function of this module, so that the way back finds the function inside.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from functools import partial
from typing import Any

from ...errors import UnsupportedValue, error_text
from ...mapping import FactoryBuildFn, FactoryMergeFn, ReplicaId, ShardedTensorFactory
from ...trees import apply_factories, apply_factory_merges, map_shards

Convert = Callable[[Any], Any]


def build_for_us(theirs: Any, convert: Convert) -> FactoryBuildFn:
    """Return the build function of a Megatron-Core factory, for one of ours."""
    function: Any = theirs.build_fn
    if _is(function, _build_ours):
        return function.args[0]  # type: ignore[no-any-return]
    empty = copy(theirs)
    empty.data = None  # a function shouldn't keep a tensor alive
    return partial(_build_theirs, empty, convert)


def merge_for_us(theirs: Any) -> FactoryMergeFn:
    """Return the merge function of a Megatron-Core factory, for one of ours."""
    function = theirs.merge_fn
    return function.args[0].merge_fn if _is(function, _merge_ours) else partial(_merge_theirs, function)


def build_for_them(ours: ShardedTensorFactory, convert: Convert) -> Callable[..., Any]:
    """Return the build function of one of our factories, for Megatron-Core's."""
    function: Any = ours.build_fn
    return function.args[0].build_fn if _is(function, _build_theirs) else partial(_build_ours, function, convert)


def merge_for_them(ours: ShardedTensorFactory) -> Callable[..., Any]:
    """Return the merge function of one of our factories, for Megatron-Core's."""
    function: Any = ours.merge_fn
    return function.args[0] if _is(function, _merge_theirs) else partial(_merge_ours, ours)


def _is(function: Any, inner: Callable[..., Any]) -> bool:
    return isinstance(function, partial) and function.func is inner


def _build_theirs(
    empty: Any, convert: Convert, key: str, data: Any, replica_id: ReplicaId, flattened_range: slice | None
) -> Any:
    """Let a factory like theirs, with these fields, build: versions differ in what they hand to their function."""
    theirs = copy(empty)
    theirs.key, theirs.data, theirs.replica_id = key, data, replica_id
    if flattened_range is not None and not hasattr(empty, "flattened_range"):
        fix = "Build from the whole tensor."
        raise UnsupportedValue(error_text(f"build {key!r}: this Megatron-Core has no flat factories", fix=fix))
    if hasattr(empty, "flattened_range"):
        theirs.flattened_range = flattened_range
    return convert(theirs.build())


def _merge_theirs(merge_fn: FactoryMergeFn, loaded: Any) -> Any:
    """Merge new containers: Megatron-Core's functions may change what they are given."""
    return merge_fn(map_shards(lambda leaf: leaf, loaded))


def _build_ours(
    build_fn: FactoryBuildFn,
    convert: Convert,
    key: str,
    data: Any,
    replica_id: ReplicaId = 0,
    flattened_range: slice | None = None,
) -> Any:
    """Build with the factories inside applied: Megatron-Core doesn't look for any."""
    return convert(apply_factories(build_fn(key, data, replica_id, flattened_range)))


def _merge_ours(ours: ShardedTensorFactory, loaded: Any) -> Any:
    """Merge the factories inside too, which the factory is asked to build again for."""
    return apply_factory_merges(loaded, ours)
