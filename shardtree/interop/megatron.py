"""`from_megatron` and `to_megatron`: conversion of trees of Megatron-Core's leaves to trees of ours, and back."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import MISSING, dataclass, fields, replace
from functools import partial
from typing import Any

from ..core.mapping import (
    FactoryBuildFn,
    FactoryMergeFn,
    LocalNonpersistentObject,
    ReplicaId,
    ShardedBase,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)
from ..core.trees import apply_factories, apply_factory_merges, flatten_with_paths, map_shards, megatron_kind
from ..errors import CheckpointingException, MetadataError, TreePath, UnsupportedValue, error_text, render_path

__all__ = ["from_megatron", "to_megatron"]


def describe_failure(doing: str, kind: str, leaf: Any, path: TreePath, error: Exception, fix: str | None = None) -> str:
    """Return the error text for a leaf that can't be converted."""
    heading = f"{doing}: {kind} {getattr(leaf, 'key', '')!r} at {render_path(path)} cannot be converted"
    return error_text(heading, offenders=[line.strip() for line in str(error).splitlines()], fix=fix)


# A factory's two functions are wrapped for the other library: the result of `build_fn` is converted; `merge_fn` gets
# plain tensors, and needs no conversion. Each wrapper keeps the function that it wraps, so that converting back unwraps
# it, and factories that go back and forth don't collect layers.

Convert = Callable[[Any], Any]


def build_from_theirs(theirs: Any, convert: Convert) -> FactoryBuildFn:
    """Return the build function for our version of a Megatron-Core factory.

    The function builds with Megatron-Core's factory and converts the result. If `theirs` was itself made from one of
    our factories, the original build function is returned.

    Args:
        theirs: Factory of Megatron-Core.
        convert: Function that replaces Megatron-Core's leaves in a tree by ours.
    """
    function: Any = theirs.build_fn
    if isinstance(function, _BuildOurs):
        return function.build_fn
    empty = copy(theirs)
    empty.data = None  # otherwise the function would keep the tensor alive
    return _BuildTheirs(empty, convert)


def merge_from_theirs(theirs: Any) -> FactoryMergeFn:
    """Return the merge function for our version of a Megatron-Core factory; see `build_from_theirs`."""
    function = theirs.merge_fn
    return function.ours.merge_fn if isinstance(function, _MergeOurs) else _MergeTheirs(function)


def build_from_ours(ours: ShardedTensorFactory, convert: Convert) -> Callable[..., Any]:
    """Return the build function for Megatron-Core's version of our factory.

    The function builds with our factory and converts the result. If `ours` was itself made from one of Megatron-Core's
    factories, the original build function is returned.

    Args:
        ours: Factory of shardtree.
        convert: Function that replaces our leaves in a tree by Megatron-Core's.
    """
    function: Any = ours.build_fn
    return function.empty.build_fn if isinstance(function, _BuildTheirs) else _BuildOurs(function, convert)


def merge_from_ours(ours: ShardedTensorFactory) -> Callable[..., Any]:
    """Return the merge function for Megatron-Core's version of our factory; see `build_from_ours`."""
    function: Any = ours.merge_fn
    return function.merge_fn if isinstance(function, _MergeTheirs) else _MergeOurs(ours)


@dataclass(frozen=True, slots=True, eq=False)
class _BuildTheirs:
    """Build function for our version of a Megatron-Core factory: it builds with that factory and converts the result.

    Attributes:
        empty: The Megatron-Core factory without its tensor.
        convert: Function that replaces Megatron-Core's leaves in a tree by ours.
    """

    empty: Any
    convert: Convert

    def __call__(self, key: str, data: Any, replica_id: ReplicaId, flattened_range: slice | None) -> Any:
        # Their build() is called rather than build_fn, since versions pass different arguments to build_fn.
        theirs = copy(self.empty)
        theirs.key, theirs.data, theirs.replica_id = key, data, replica_id
        if flattened_range is not None and not hasattr(self.empty, "flattened_range"):
            heading = f"the factory of {key!r}: the installed Megatron-Core cannot build a flat range"
            fix = "Give the factory the whole tensor as data, and no flattened_range."
            raise UnsupportedValue(error_text(heading, found=f"flattened_range={flattened_range}", fix=fix))
        if hasattr(self.empty, "flattened_range"):
            theirs.flattened_range = flattened_range
        return self.convert(theirs.build())


@dataclass(frozen=True, slots=True, eq=False)
class _MergeTheirs:
    """Merge function for our version of a Megatron-Core factory: it calls Megatron-Core's merge function."""

    merge_fn: FactoryMergeFn

    def __call__(self, parts: Any) -> Any:
        # It gets new containers, since Megatron-Core's functions may change their argument.
        return self.merge_fn(map_shards(lambda leaf: leaf, parts))


@dataclass(frozen=True, slots=True, eq=False)
class _BuildOurs:
    """Build function for Megatron-Core's version of our factory: it builds with our function and converts the result.

    Attributes:
        build_fn: Build function of our factory.
        convert: Function that replaces our leaves in a tree by Megatron-Core's.
    """

    build_fn: FactoryBuildFn
    convert: Convert

    def __call__(self, key: str, data: Any, replica_id: ReplicaId = 0, flattened_range: slice | None = None) -> Any:
        # Nested factories are applied here, since Megatron-Core doesn't look for them in what a factory builds.
        return self.convert(apply_factories(self.build_fn(key, data, replica_id, flattened_range)))


@dataclass(frozen=True, slots=True, eq=False)
class _MergeOurs:
    """Merge function for Megatron-Core's version of our factory: it calls the merge function of our factory.

    The factories nested in ours are merged first.
    """

    ours: ShardedTensorFactory

    def __call__(self, parts: Any) -> Any:
        # Nested factories are merged first; the factory builds again to find them.
        return apply_factory_merges(parts, self.ours)


def from_megatron(tree: Any) -> Any:
    """Convert a tree such as Megatron-Core's `sharded_state_dict()` to one with our shards, objects and factories.

    Containers are new (subclasses of dict and list become plain ones); tensors are shared. Other leaves are unchanged.
    Leaves of any version are accepted: fields that a version lacks get their defaults.

    Args:
        tree: Dicts, lists and tuples of Megatron-Core's leaves and plain values.

    Returns:
        A tree for `save` and `load`. Its factories call those of Megatron-Core to build and merge.

    Raises:
        MetadataError: A leaf's fields contradict each other or its data; the error names its key and path.

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
    pairs, rebuild = flatten_with_paths(tree)
    return rebuild([_from_leaf(leaf, path) for path, leaf in pairs])


def _from_leaf(leaf: Any, path: TreePath) -> Any:
    kind = megatron_kind(leaf)
    if kind is None:
        return leaf
    try:
        return _FROM[kind](leaf)
    except CheckpointingException as error:
        raise MetadataError(describe_failure("from_megatron", kind, leaf, path, error)) from error


def _tensor(theirs: Any) -> ShardedTensor:
    has_field = hasattr(theirs, "prepend_axis_num")
    front = theirs.prepend_axis_num if has_field else len(theirs.global_shape) - len(theirs.local_shape)
    return ShardedTensor(
        key=theirs.key,
        data=theirs.data,
        dtype=getattr(theirs, "dtype", getattr(theirs.data, "dtype", None)),  # type: ignore[arg-type]
        local_shape=_numbers(theirs, "local_shape"),
        global_shape=_numbers(theirs, "global_shape"),
        global_offset=_numbers(theirs, "global_offset"),
        axis_fragmentations=_numbers(theirs, "axis_fragmentations", None),
        replica_id=_numbers(theirs, "replica_id", 0),
        prepend_axis_num=front,
        allow_shape_mismatch=getattr(theirs, "allow_shape_mismatch", False),
        flattened_range=getattr(theirs, "flattened_range", None),
    )


def _object(theirs: Any) -> ShardedObject:
    place = (_numbers(theirs, field, 0) for field in ("global_shape", "global_offset", "replica_id"))
    return ShardedObject(theirs.key, theirs.data, *place)


def _factory(theirs: Any) -> ShardedTensorFactory:
    replica_id, flat = _numbers(theirs, "replica_id", 0), getattr(theirs, "flattened_range", None)
    # The factory is built with their functions first, so that these are checked: a wrapper is always callable.
    ours = ShardedTensorFactory(theirs.key, theirs.data, theirs.build_fn, theirs.merge_fn, replica_id, flat)
    return replace(ours, build_fn=build_from_theirs(theirs, from_megatron), merge_fn=merge_from_theirs(theirs))


def _numbers(theirs: Any, field: str, default: Any = None) -> Any:
    """Return a field of a Megatron-Core leaf; a list, which some versions use, becomes a tuple."""
    value = getattr(theirs, field, default)
    return tuple(value) if isinstance(value, list) else value


_FROM: dict[str, Callable[[Any], Any]] = {
    "ShardedTensor": _tensor,
    "ShardedObject": _object,
    "ShardedTensorFactory": _factory,
    "LocalNonpersistentObject": lambda theirs: LocalNonpersistentObject(theirs.obj),
}


# Converting our leaves to Megatron-Core's.


def to_megatron(tree: Any, *, mapping: Any = None) -> Any:
    """Convert a tree with our shards, objects and factories to one with Megatron-Core's.

    Containers are new; tensors are shared. A converted factory also builds and merges the factories nested in it.

    To save in another format, call `st.save(tree, ...)` rather than Megatron-Core's `save` with a custom strategy:
    Megatron-Core's main branch silently replaces custom strategies by its own.

    Args:
        tree: Dicts and lists of our leaves and plain values.
        mapping: Module with Megatron-Core's classes, such as a fork's; by default the installed
            `megatron.core.dist_checkpointing.mapping`, which only this function imports.

    Raises:
        UnsupportedValue: A shard is flat, which this version of Megatron-Core doesn't support, or it is in a tuple,
            where Megatron-Core doesn't look for shards; the error names its key and path.
        CheckpointingException: Megatron-Core isn't installed.

    Examples:
        >>> to_megatron({"step": 3}, mapping=object())
        {'step': 3}

    References:
        megatron.core.dist_checkpointing.mapping, megatron-core 0.16.1.
    """
    classes = _mapping_module() if mapping is None else mapping
    pairs, rebuild = flatten_with_paths(tree)
    return rebuild([_to_leaf(classes, tree, path, leaf) for path, leaf in pairs])


def _mapping_module() -> Any:
    try:
        from megatron.core.dist_checkpointing import mapping
    except ImportError as error:
        heading = "to_megatron: Megatron-Core cannot be imported"
        fix = "pip install megatron-core, or pass a module with its classes, such as a fork's, as mapping=."
        raise CheckpointingException(error_text(heading, found=error, fix=fix)) from error
    return mapping


def _to_leaf(classes: Any, tree: Any, path: TreePath, leaf: Any) -> Any:
    if not isinstance(leaf, (ShardedBase, LocalNonpersistentObject)):
        return leaf
    kind = type(leaf).__name__
    try:
        _check_containers(tree, path)
        return _make_theirs(getattr(classes, kind), leaf, partial(to_megatron, mapping=classes))
    except Exception as error:  # Megatron-Core's own checks raise errors of many classes
        is_flat = getattr(leaf, "flattened_range", None) is not None
        fix = "Megatron-Core 0.16 removed flat shards: save the tree with shardtree, or unflatten it first."
        raise UnsupportedValue(
            describe_failure("to_megatron", kind, leaf, path, error, fix if is_flat else None)
        ) from error


def _check_containers(tree: Any, path: TreePath) -> None:
    for depth, entry in enumerate(path):
        if not isinstance(tree, (dict, list)):
            heading = f"Megatron-Core finds shards only in dicts and lists, but {render_path(path[:depth])} is neither"
            raise UnsupportedValue(error_text(heading, found=type(tree).__name__, fix="Use a list in its place."))
        tree = tree[entry]


def _make_theirs(cls: type, ours: Any, convert: Any) -> Any:
    """Return a leaf of Megatron-Core with the fields of one of our leaves.

    Args:
        cls: Class of the Megatron-Core leaf.
        ours: Our leaf.
        convert: Function that replaces our leaves in a tree by Megatron-Core's.

    Raises:
        UnsupportedValue: Our leaf has a value other than the default in a field that the class lacks.
    """
    if isinstance(ours, LocalNonpersistentObject):
        return cls(ours.obj)
    values = {field.name: getattr(ours, field.name) for field in fields(ours)}
    if isinstance(ours, ShardedTensorFactory):
        values |= {"build_fn": build_from_ours(ours, convert), "merge_fn": merge_from_ours(ours)}
    # A field that their version lacks may be left out only if it has its default; otherwise it would be lost silently.
    names = {field.name for field in fields(cls)}
    for field in fields(ours):
        if field.name not in names and (field.default is MISSING or values[field.name] != field.default):
            heading = f"{cls.__module__}.{cls.__name__} has no field {field.name!r}, so the leaf's value would be lost"
            expected = None if field.default is MISSING else f"the default, {field.default!r}"
            raise UnsupportedValue(error_text(heading, found=values[field.name], expected=expected))
    return cls(**{name: value for name, value in values.items() if name in names})
