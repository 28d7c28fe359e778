"""Maps over trees, with shards or the tensors in them as leaves, and pipelines of functions of trees."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import suppress
from functools import reduce
from operator import attrgetter
from typing import Any, Concatenate, Final, ParamSpec, TypeAlias, TypeVar, cast, overload

import optree
import torch

from ...errors import MetadataError, ShapeError, TreeError, TreePath, error_text, render_path
from ..geometry import refuse
from ..lazy import LazyTensor
from ..mapping import LocalNonpersistentObject, ShardedBase, ShardedTensor, ShardedTensorFactory, check_has_shape
from ._hidden import flatten_visible, hides_shards
from ._nodes import LEAVES, NAMESPACE, SameTree, Tree, entries, flatten, like, refusing_depth

# Shards and factories as nodes of optree, whose only child is their data.
#
# They are registered only in the namespace "shardtree", for users' own tree maps; functions of shardtree treat them as
# leaves. This registration is the only side effect of importing shardtree.

Boxed: TypeAlias = ShardedTensor | ShardedTensorFactory

Leaf = TypeVar("Leaf", bound=Boxed)

_KINDS: Final = (ShardedTensor, ShardedTensorFactory)

_Access: TypeAlias = tuple[Callable[[Any], tuple[Any, ...]], list[Callable[[Any, Any], None]]]


def _access(kind: type[Boxed]) -> _Access:
    """Return a getter of all fields of a leaf's class except `data`, and setters of all fields, that of `data` last."""
    names = [name for name in kind.__dataclass_fields__ if name != "data"]
    return attrgetter(*names), [getattr(kind, name).__set__ for name in [*names, "data"]]


_ACCESS: Final[dict[type, _Access]] = {kind: _access(kind) for kind in _KINDS}


def with_data(leaf: Leaf, data: Any, doing: str = "map_data") -> Leaf:
    """Return the leaf with other data, after checking that the data fits the metadata.

    The metadata was validated when the leaf was built, so only the data is checked: the constructor would take three
    times as long as all else in a tree map.

    Args:
        leaf: A shard or factory.
        data: Its new data.
        doing: Name of the public function, for errors.

    Raises:
        ShapeError: The dtype or shape of a tensor isn't that of the leaf.

    Examples:
        >>> shard = ShardedTensor.from_rank_offsets("w", torch.zeros(2))
        >>> with_data(shard, torch.ones(2)).data
        tensor([1., 1.])
    """
    if isinstance(data, (torch.Tensor, LazyTensor)):
        _check_data(leaf, data, doing)
    kind = type(leaf)
    read, writes = _ACCESS[kind]
    new = object.__new__(kind)
    for write, value in zip(writes, (*read(leaf), data), strict=False):
        write(new, value)
    return new


def described_kind(leaf: Boxed) -> tuple[torch.dtype, tuple[int, ...]] | None:
    """Return the expected dtype and shape of a leaf's data; None for a factory without a tensor."""
    if isinstance(leaf, ShardedTensor):
        return leaf.dtype, leaf.data_shape
    data = leaf.data
    return (data.dtype, tuple(data.shape)) if isinstance(data, (torch.Tensor, LazyTensor)) else None


def _check_data(leaf: Boxed, data: torch.Tensor | LazyTensor, doing: str) -> None:
    kind = described_kind(leaf)
    if kind is None:
        return
    with suppress(RuntimeError):  # nested tensors have no shape; the check below names them
        if (data.dtype, tuple(data.shape)) == kind:
            return
    check_has_shape(f"{doing}: the new data of {leaf.key!r}", data)
    heading = f"{doing}: the dtype or shape of {leaf.key!r} would change, so that its metadata would be wrong"
    found, expected = f"{tuple(data.shape)} {data.dtype}", f"{kind[1]} {kind[0]}"
    fix = "Use `cast` to change the dtype, or `map_shards` to make another shard."
    raise ShapeError(error_text(heading, found=found, expected=expected, fix=fix))


def _flatten_leaf(leaf: Boxed) -> tuple[tuple[Any, ...], Boxed, tuple[str, ...]]:
    """Return a leaf's children, metadata and child names for optree: its data, the leaf without data, and "data"."""
    return (leaf.data,), with_data(leaf, None), ("data",)


def _unflatten_leaf(empty: Boxed, children: tuple[Any, ...]) -> Boxed:
    return with_data(empty, children[0])


def register_nodes() -> None:
    """Register ShardedTensor and ShardedTensorFactory with optree; importing `shardtree.trees` does it once."""
    register: Any = optree.register_pytree_node  # its annotations ask for collections, and a leaf isn't one
    for kind in _KINDS:
        register(kind, _flatten_leaf, _unflatten_leaf, path_entry_type=optree.GetAttrEntry, namespace=NAMESPACE)


# Maps.

_Key = TypeVar("_Key")


@overload
def map_shards(f: Callable[..., Any], tree: dict[_Key, Any], *rest: Tree) -> dict[_Key, Any]: ...
@overload
def map_shards(f: Callable[..., Any], tree: list[Any], *rest: Tree) -> list[Any]: ...
@overload
def map_shards(f: Callable[..., Any], tree: Tree, *rest: Tree) -> Tree: ...
def map_shards(f: Callable[..., Any], tree: Tree, *rest: Tree) -> Tree:
    """Return the tree with each leaf replaced by a function's result; a shard is one leaf.

    `f` is called in the order of sorted dict keys; the result keeps each dict's own order. Every container is new.

    Args:
        f: Function of one leaf of each tree. Its result replaces the leaf.
        tree: Any tree; None is a leaf.
        rest: Trees with the first one's structure; where the first has a leaf, these may have a subtree.

    Raises:
        TreeError: A tree of `rest` doesn't have the first one's structure.
        UnsupportedValue: Shards lie in values that aren't nodes, as in an instance of a class that isn't registered.
        MetadataError: `f` isn't a function.
        Exception: An error of f, with a note that names the leaf's path.

    Examples:
        >>> map_shards(lambda leaf: leaf is None, {"b": None, "a": [1, 2]})
        {'b': True, 'a': [False, False]}
        >>> map_shards(lambda x, y: x + y, {"a": 1}, {"a": 10})
        {'a': 11}
    """
    check_function("map_shards", "f", f)
    leaves, spec = flatten_visible(tree)
    columns = [leaves, *(_column("map_shards", spec, other, number) for number, other in enumerate(rest, 2))]
    return spec.unflatten(call_on_leaves(f, spec, *columns))


def _column(doing: str, spec: optree.PyTreeSpec, other: Tree, number: int) -> list[Any]:
    """Return the subtrees of another tree at the leaves of a structure, in the order of these leaves.

    Args:
        doing: Name of the public function, for the error.
        spec: Structure of the first tree.
        other: Another tree.
        number: Number of the other tree, for the error; the first tree is number 1.
    """
    leaves, other_spec = flatten(other)
    if other_spec == spec:
        return leaves
    try:
        return spec.flatten_up_to(other_spec.unflatten(leaves))
    except ValueError as error:
        heading = f"{doing}: tree {number} does not have the structure of the first tree"
        fix = "Give trees of one structure, or join them first with `merge` or `combine`."
        offenders = [str(error).splitlines()[0][:200]]
        raise TreeError(error_text(heading, fix=fix, offenders=offenders)) from None


def map_data(f: Callable[..., Any], tree: SameTree, *rest: Tree) -> SameTree:
    """Return the tree with a function's results as the data of its shards and factories; their metadata stays.

    `f` isn't called for leaves of the first tree without data (None). `ShardedObject`, `LocalNonpersistentObject` and
    plain values, such as step counters and generators' states, stay unchanged. A tree of plain tensors without shards
    raises, since `f` would never be called.

    Args:
        f: Function of a shard's or factory's data, and of each other tree's value there: a shard's data, or a plain
            value. It returns a tensor of the same dtype and shape, or a value that isn't a tensor (None, a shape, a
            lazy tensor).
        tree: Any tree.
        rest: Trees with the first one's structure, as for `map_shards`; the metadata of their shards is ignored.

    Raises:
        ShapeError: `f` returned a tensor of another dtype or shape.
        TreeError: A tree of `rest` doesn't have the first one's structure; or the first one has tensors and no shards.
        UnsupportedValue: Shards lie in values that aren't nodes, as in an instance of a class that isn't registered.
        Exception: An error of f, with a note that names the leaf's path.

    Examples:
        >>> import torch
        >>> from shardtree.mapping import ShardedTensor
        >>> w = ShardedTensor.from_rank_offsets("w", torch.ones(2))
        >>> map_data(torch.neg, {"w": w, "step": 3})["w"].data
        tensor([-1., -1.])
        >>> map_data(torch.add, {"w": w}, {"w": torch.ones(2)})["w"].data
        tensor([2., 2.])
    """
    check_function("map_data", "f", f)
    leaves, spec = flatten_visible(tree)

    if not any(isinstance(leaf, (ShardedBase, LocalNonpersistentObject)) for leaf in leaves):
        _refuse_plain(spec, leaves)

    def on_leaf(leaf: Any, *others: Any) -> Any:
        if not isinstance(leaf, _KINDS) or leaf.data is None:
            return leaf
        data = f(leaf.data, *(other.data if isinstance(other, _KINDS) else other for other in others))
        return leaf if data is leaf.data else with_data(leaf, data)

    columns = (_column("map_data", spec, other, number) for number, other in enumerate(rest, 2))
    return cast("SameTree", spec.unflatten(call_on_leaves(on_leaf, spec, leaves, *columns)))


def _refuse_plain(spec: optree.PyTreeSpec, leaves: list[Any]) -> None:
    tensors = [
        path for path, leaf in zip(spec.paths(), leaves, strict=True) if isinstance(leaf, (torch.Tensor, LazyTensor))
    ]
    if tensors:
        heading, found = "map_data: a tree of plain tensors, without shards", ", ".join(map(render_path, tensors[:3]))
        fix = "Use `map_shards(f, tree)`, which calls f for each leaf, also for numbers and strings."
        raise TreeError(error_text(heading, found=found, expected="shards", fix=fix))


@refusing_depth
def map_sharing(f: Callable[[Any], Any], tree: SameTree) -> SameTree:
    """Return the tree with each leaf replaced by a function's result; subtrees with unchanged leaves are shared.

    Raises:
        UnsupportedValue: Shards are hidden in leaves, as in an instance of a class that isn't registered.

    Examples:
        >>> tree = {"a": [1], "b": 2}
        >>> map_sharing(lambda leaf: 3 if leaf == 2 else leaf, tree)["a"] is tree["a"]
        True
    """

    def at(path: TreePath, node: Tree) -> Tree:
        if type(node) in LEAVES:
            return call_at(path, f, node)
        children = entries(node)
        if children is None:
            if hides_shards(node):
                flatten_visible(tree)  # raises, and names all such leaves
            return call_at(path, f, node)
        new = {entry: at((*path, entry), child) for entry, child in children.items()}
        return node if all(new[entry] is child for entry, child in children.items()) else like(node, new)

    new: SameTree = at((), tree)
    return new


def check_function(doing: str, field: str, value: object, expected: str = "a function") -> None:
    """Raise MetadataError if an argument isn't callable, such as a tree passed in place of the function.

    Args:
        doing: Name of the public function, for the error.
        field: Name of the argument.
        value: Value of the argument.
        expected: Description of a right value, for the error.

    Examples:
        >>> check_function("map_shards", "f", len)
    """
    if not callable(value):
        fix = f"See help(shardtree.{doing}) for the order of its arguments."
        refuse(doing, field, type(value).__name__, expected, fix, error=MetadataError)


def call_at(path: TreePath, f: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function and return its result; an exception gets a note that names the path.

    Examples:
        >>> call_at(("layers", 0), max, [1, 2])
        2
    """
    try:
        return f(*arguments)
    except Exception as error:
        error.add_note(f"at {render_path(path)}")
        raise


def call_on_leaves(f: Callable[..., Any], spec: optree.PyTreeSpec, *columns: list[Any]) -> list[Any]:
    """Return a function's results for the leaves of a structure; an exception gets a note that names the leaf's path.

    Args:
        f: Function with an argument for each column.
        spec: Structure of the tree.
        columns: Lists of arguments, each with an item for each leaf.
    """
    done: list[Any] = []
    try:
        done.extend(map(f, *columns))  # `extend` keeps the results before an exception; their number is the index
    except Exception as error:
        error.add_note(f"at {render_path(spec.paths()[len(done)])}")
        raise
    return done


# Pipelines of tree functions: `compose` chains them, `bind` sets a function's options. All functions take the tree
# first, so that `bind` works for all, users' functions included; only maps take a function first, like `jax.tree.map`.

_Options = ParamSpec("_Options")
_Result = TypeVar("_Result")

_TREE_NAMES = ("tree", "pytree", "sharded_state_dict", "state_dict")
"""Names of parameters for a tree: here, in Megatron-Core, in JAX and optree."""


def compose(*functions: Callable[[Any], Any]) -> Callable[[Tree], Any]:
    """Return the composition of functions, which are called from left to right.

    Examples:
        >>> compose(bind(sorted, reverse=True), tuple)([1, 3, 2])
        (3, 2, 1)
    """
    return lambda tree: reduce(lambda value, function: function(value), functions, tree)


def bind(
    function: Callable[Concatenate[Tree, _Options], _Result], *args: _Options.args, **options: _Options.kwargs
) -> Callable[[Tree], _Result]:
    """Return a function of only a tree, which calls `function` with the tree and then the given arguments.

    Args:
        function: Function that takes the tree first, under any name.
        args: Further positional arguments.
        options: Keyword arguments.

    Raises:
        TreeError: A later parameter of the function is called `tree` (or `pytree`, `state_dict`,
            `sharded_state_dict`) and isn't among `options`, as in `map_shards(f, tree)` and `map_data(f, tree)`: the
            tree would be passed as `f`. Use `functools.partial` to bind `f`.

    Examples:
        >>> import torch
        >>> from shardtree.mapping import ShardedTensor
        >>> from shardtree.trees import cast, prefix
        >>> for_serving = compose(bind(prefix, "model."), bind(cast, torch.bfloat16))
        >>> for_serving({"w": ShardedTensor.from_rank_offsets("w", torch.ones(1))})["w"]
        ShardedTensor(key='model.w', data=<bfloat16 (1,) cpu>, dtype=torch.bfloat16, ...)
    """
    # `bind` checks, since the call may come much later in a pipeline, and would pass the tree as the function.
    _refuse_tree_second(function, options)
    return lambda tree: function(tree, *args, **options)


def _refuse_tree_second(function: Callable[..., Any], options: dict[str, Any]) -> None:
    try:
        first, *later = inspect.signature(function).parameters
    except ValueError:  # a builtin without a signature, or a function without parameters, which will fail anyway
        return
    # The check uses the names of parameters, which works for users' functions too.
    late = [name for name in later if name in _TREE_NAMES and name not in options]
    if first in _TREE_NAMES or not late:
        return
    name = getattr(function, "__name__", repr(function))
    heading = f"bind: {name} takes {first!r} first, and the tree as {late[0]!r} after it"
    fix = f"Write `functools.partial({name}, {first})`, or a lambda that passes the tree second."
    raise TreeError(error_text(heading, expected="a function that takes the tree first", fix=fix))
