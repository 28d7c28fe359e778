"""from_megatron: a tree with Megatron-Core's leaves becomes one with ours."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import MISSING, fields, replace
from functools import partial
from typing import Any, Final

from ..errors import CheckpointingException, MetadataError, TreePath, UnsupportedValue, error_text, render_path
from ..mapping import (
    FactoryBuildFn,
    FactoryMergeFn,
    LocalNonpersistentObject,
    ReplicaId,
    ShardedBase,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)
from ..trees import apply_factories, apply_factory_merges, map_shards, shard_leaves

# Which kind of Megatron-Core's leaves a value is, and what is said of a leaf that has no counterpart.

# Other libraries have a ShardedTensor too (torch.distributed has), so a name alone doesn't tell.
_TOLD_BY: Final = {
    "ShardedTensor": ("key", "data", "local_shape", "global_shape", "global_offset"),
    "ShardedObject": ("key", "data", "global_shape", "global_offset"),
    "ShardedTensorFactory": ("key", "data", "build_fn", "merge_fn"),
    "LocalNonpersistentObject": ("obj",),
}


def kind_of(leaf: Any) -> str | None:
    """Return the name of the Megatron-Core class that a leaf is of, or None: it's ours, or anything else.

    Examples:
        >>> kind_of(LocalNonpersistentObject(3)), kind_of(3.5)
        (None, None)
    """
    if isinstance(leaf, (ShardedBase, LocalNonpersistentObject, type)):
        return None
    names = (base.__name__ for base in type(leaf).__mro__)
    return next((name for name in names if name in _TOLD_BY and all(hasattr(leaf, a) for a in _TOLD_BY[name])), None)


def describe_failure(doing: str, kind: str, leaf: Any, path: TreePath, error: Exception, fix: str | None = None) -> str:
    """Return an error's text for a leaf that can't be turned into the other library's."""
    what = f"{doing}: {kind} {getattr(leaf, 'key', '')!r} at {render_path(path)}"
    return error_text(what, offenders=[line.strip() for line in str(error).splitlines()], fix=fix)


# The two functions of a factory for the other library: what they build is converted, what they merge is plain.
#
# Each is a `functools.partial` of a function of this module, so that the way back finds the function inside.

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


# to_megatron: a tree with our leaves becomes one with Megatron-Core's.

_FLAT = "Flat shards went with Megatron-Core 0.16: save the tree here, whose formats hold them, or unflatten it first."


def to_megatron(tree: Any, *, mapping: Any = None) -> Any:
    """Return the tree with Megatron-Core's shards, objects and factories in the place of ours.

    Containers are new; tensors are shared. The factories build with factories inside applied, and merge those too.

    Args:
        tree: dicts and lists of our leaves and plain values.
        mapping: the module with Megatron-Core's classes, of a fork for example; the installed
            `megatron.core.dist_checkpointing.mapping` by default, which only this function imports.

    Raises:
        UnsupportedValue: that version of Megatron-Core can't hold a shard: it is flat, or stands in a tuple, which
            Megatron-Core doesn't look into. Names its key and path.
        CheckpointingException: Megatron-Core isn't installed.

    Examples:
        >>> to_megatron({"step": 3}, mapping=object())
        {'step': 3}

    References:
        megatron.core.dist_checkpointing.mapping, megatron-core 0.16.1.
    """
    classes = _installed() if mapping is None else mapping
    pairs, rebuild = shard_leaves(tree)
    return rebuild([_to_leaf(classes, tree, path, leaf) for path, leaf in pairs])


def _installed() -> Any:
    try:
        from megatron.core.dist_checkpointing import mapping
    except ImportError as error:
        what, fix = "to_megatron: Megatron-Core can't be imported", "pip install megatron-core, or pass mapping=..."
        raise CheckpointingException(error_text(what, found=error, fix=fix)) from error
    return mapping


def _to_leaf(classes: Any, tree: Any, path: TreePath, leaf: Any) -> Any:
    if not isinstance(leaf, (ShardedBase, LocalNonpersistentObject)):
        return leaf
    kind = type(leaf).__name__
    try:
        _check_place(tree, path)
        return _like(getattr(classes, kind), leaf, partial(to_megatron, mapping=classes))
    except Exception as error:  # Megatron-Core's errors have no base in common with ours
        fix = _FLAT if getattr(leaf, "flattened_range", None) is not None else None
        raise UnsupportedValue(describe_failure("to_megatron", kind, leaf, path, error, fix)) from error


def _check_place(tree: Any, path: TreePath) -> None:
    for depth, entry in enumerate(path):
        if not isinstance(tree, (dict, list)):
            what = f"Megatron-Core looks for shards in dicts and lists alone: {render_path(path[:depth])}"
            raise UnsupportedValue(error_text(what, found=type(tree).__name__, fix="Use a list."))
        tree = tree[entry]


def _like(cls: type, ours: Any, convert: Any) -> Any:
    """Return Megatron-Core's leaf with the fields of one of ours."""
    if isinstance(ours, LocalNonpersistentObject):
        return cls(ours.obj)
    values = {field.name: getattr(ours, field.name) for field in fields(ours)}
    if isinstance(ours, ShardedTensorFactory):
        values |= {"build_fn": build_for_them(ours, convert), "merge_fn": merge_for_them(ours)}
    known = {field.name for field in fields(cls)}
    for field in fields(ours):
        if field.name not in known and (field.default is MISSING or values[field.name] != field.default):
            what = f"{cls.__module__}.{cls.__name__} has no field {field.name!r}"
            raise UnsupportedValue(error_text(what, found=values[field.name], expected="nothing to say there"))
    return cls(**{name: value for name, value in values.items() if name in known})
