"""Nodes of trees in which shards are leaves: reading and rebuilding nodes, and flattening trees to leaves with paths.

Nodes are dict, OrderedDict, defaultdict, list, tuple, namedtuple and deque, and the classes that users registered with
optree in the namespace ``"shardtree"`` (or for all namespaces). None is a leaf. Subclasses of dict, list and deque that
aren't registered are read as the type that they derive from. An entry is the key, position or field of a child.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from enum import Enum
from functools import wraps
from typing import Any, Final, ParamSpec, TypeVar

import optree
import torch

from ...errors import TreeError, TreePath, error_text, plural, render_path
from ..mapping import ShardedBase, ShardedTensor, ShardedTensorFactory

# Fields: entries of named tuples. They are positions, but keys contain their names.

NAMESPACE: Final = "shardtree"
"""The namespace in optree's registry in which our leaves and users' classes are nodes."""


class Field(int):
    """A field of a named tuple as an entry of a path: an int, the field's position, which prints as the field's name.

    Examples:
        >>> Field(1, "mu") == 1, f"opt.{Field(1, 'mu')}", [Field(1, "mu")]
        (True, 'opt.mu', [1])
    """

    name: str

    def __new__(cls, position: int, name: str) -> Field:
        field = super().__new__(cls, position)
        field.name = name
        return field

    def __getnewargs__(self) -> tuple[int, str]:  # type: ignore[override]  # paths go between ranks in pickles
        return int(self), self.name

    def __str__(self) -> str:
        return self.name


def fields_of(kind: type) -> tuple[Field, ...]:
    """Return the fields of a named tuple's class; empty for other classes, and for classes registered with optree.

    Examples:
        >>> from collections import namedtuple
        >>> [*map(str, fields_of(namedtuple("Moment", "mu nu")))], fields_of(tuple)
        (['mu', 'nu'], ())
    """
    if not optree.is_namedtuple_class(kind):
        return ()
    find: Any = optree.register_pytree_node
    is_registered = find.get(kind, namespace=NAMESPACE).type is kind
    return () if is_registered else tuple(Field(*pair) for pair in enumerate(kind._fields))  # type: ignore[attr-defined]


# A hole replaces a removed leaf. None can't, since it is a value.


class Hole(Enum):
    """The type of `HOLE`, the mark of a missing leaf.

    It is an Enum, so that copying or unpickling gives the same object, and type checkers know ``is HOLE``.

    Examples:
        >>> import copy, pickle
        >>> copy.deepcopy(HOLE) is HOLE and pickle.loads(pickle.dumps(HOLE)) is HOLE
        True
    """

    HOLE = "HOLE"

    def __repr__(self) -> str:
        return "HOLE"


HOLE: Final = Hole.HOLE
"""The only instance of `Hole`, the mark of a missing leaf."""

Tree = Any
P = ParamSpec("P")
R = TypeVar("R")
SameTree = TypeVar("SameTree")
"""A tree of the same containers and types of leaves as the function's argument."""

_OPEN_KINDS = (dict, list, deque)
_MAPPED_KINDS = (*_OPEN_KINDS, OrderedDict, defaultdict)
TOO_DEEP = "the tree is too deep, or contains itself"
_DEEP = 100  # levels; the codec stores no deeper values
_LEVELS = 4  # shown in an error

LEAVES = frozenset((ShardedTensor, ShardedTensorFactory, torch.Tensor, type(HOLE), type(None), bool, int, float, str))
"""Types that aren't looked up in optree's registry: plain values, and shards, which are nodes in the registry."""


def refusing_depth(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap a function of trees, so that it raises TreeError instead of RecursionError if a tree is too deep.

    If no tree is too deep, the RecursionError is raised unchanged: it comes from a function that the caller passed.

    Examples:
        >>> tree = []
        >>> tree.append(tree)
        >>> flatten(tree)
        Traceback (most recent call last):
        shardtree.errors.TreeError: the tree is too deep, or contains itself
          found tree[0][0][0][0]... of 100 levels or more
          Flatten the tree.
    """

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except RecursionError as error:
            path = next(filter(None, map(_deep_path, (*args, *kwargs.values()))), None)
            if path is None:
                raise error from None
        found = f"{render_path(path[:_LEVELS])}... of {_DEEP} levels or more"
        raise TreeError(error_text(TOO_DEEP, found=found, fix="Flatten the tree."))

    return call


def _deep_path(tree: Tree) -> TreePath | None:
    """Return the path of a node at the depth limit, or None; the search is iterative, as a tree may contain itself."""
    left: list[tuple[TreePath, Tree]] = [((), tree)]
    while left:
        path, node = left.pop()
        if len(path) == _DEEP:
            return path
        left += [((*path, entry), child) for entry, child in (entries(node) or {}).items()]
    return None


def entries(node: Tree) -> Mapping[Any, Tree] | None:
    """Return a container's children by entry (key, position or field) in its own order, or None for a leaf."""
    if type(node) in LEAVES:
        return None
    if is_dict(node):
        return node  # type: ignore[no-any-return]
    if _is_list(node) or type(node) is tuple:
        return dict(enumerate(node))
    if _is_leaf(node):
        return None
    children, _, names, _ = optree.tree_flatten_one_level(node, none_is_leaf=True, namespace=NAMESPACE)
    return dict(zip(fields_of(type(node)) or names, children, strict=True))


def like(node: Tree, new: Mapping[Any, Tree]) -> Tree:
    """Return a new container like `node`, but with other children, in their order."""
    if is_dict(node):
        if isinstance(node, defaultdict):
            return defaultdict(node.default_factory, new)
        return OrderedDict(new) if isinstance(node, OrderedDict) else dict(new)
    values = list(new.values())
    if _is_list(node):
        return deque(values, node.maxlen) if isinstance(node, deque) else values
    if type(node) is tuple:
        return tuple(values)
    _, metadata, _, rebuild = optree.tree_flatten_one_level(node, none_is_leaf=True, namespace=NAMESPACE)
    return rebuild(metadata, values)


def stored_like(node: Tree, new: Mapping[Any, Tree]) -> Tree:
    """Return the stored form of a container with new children: a dict for a registered class, else a similar container.

    A file names no class to import, so only a load's target knows a registered class. A dict, list or tuple with all
    children unchanged is returned itself. An instance of a subclass, such as a Counter, thereby keeps its class, which
    the codec either knows or refuses.
    """
    if not is_dict(node) and not is_sequence(node):
        return dict(new)
    unchanged = all(new.get(entry) is child for entry, child in (entries(node) or {}).items())
    return node if unchanged else like(node, new)


def is_subclass(node: Tree) -> bool:
    """Return whether a container is of a subclass of dict, list or deque; functions over trees read it as its base.

    Examples:
        >>> from collections import Counter
        >>> is_subclass(Counter("ab")), is_subclass(OrderedDict(a=1))
        (True, False)
    """
    return isinstance(node, _OPEN_KINDS) and type(node) not in _MAPPED_KINDS and _is_leaf(node)


def subclasses(tree: Tree) -> list[tuple[TreePath, Tree]]:
    """Return (path, container) of the outermost instances of unregistered subclasses of dict, list or deque.

    Examples:
        >>> from collections import Counter
        >>> subclasses({"seen": Counter("ab"), "step": 3})
        [(('seen',), Counter({'a': 1, 'b': 1}))]
    """
    leaves, spec = optree.tree_flatten(tree, is_leaf=is_known_leaf, none_is_leaf=True, namespace=NAMESPACE)
    if not _has_subclasses(set(map(type, leaves))):
        return []
    return [(path, leaf) for path, leaf in zip(spec.paths(), leaves, strict=True) if isinstance(leaf, _OPEN_KINDS)]


def _is_leaf(node: Tree) -> bool:
    return optree.tree_is_leaf(node, none_is_leaf=True, namespace=NAMESPACE)


def is_dict(node: Tree) -> bool:
    """Return whether functions over trees treat a container as a dict, with keys as entries.

    Examples:
        >>> is_dict(OrderedDict()), is_dict([])
        (True, False)
    """
    return isinstance(node, dict) and (type(node) in _MAPPED_KINDS or _is_leaf(node))


def _is_list(node: Tree) -> bool:
    return isinstance(node, (list, deque)) and (type(node) in _MAPPED_KINDS or _is_leaf(node))


def drop_holes(children: Mapping[Any, Tree]) -> dict[Any, Tree]:
    """Return the children, by entry, without those that are `HOLE`, the mark of a missing leaf."""
    return {entry: child for entry, child in children.items() if child is not HOLE}


def is_sequence(node: Tree) -> bool:
    """Return whether a container's entries are positions: it is a list, deque, tuple or namedtuple."""
    return _is_list(node) or type(node) is tuple or optree.is_namedtuple(node)


def same_kind(left: Tree, right: Tree) -> bool:
    """Return whether two containers are both dicts, both sequences, or of the same registered class."""
    if is_dict(left) or is_dict(right):
        return is_dict(left) and is_dict(right)
    return (is_sequence(left) and is_sequence(right)) or type(left) is type(right)


def namedtuple_types(tree: Tree) -> tuple[type, ...]:
    """Return the namedtuple classes among a tree's nodes, each once, in the order in which `flatten` visits them.

    Examples:
        >>> from collections import namedtuple
        >>> Moment, Pair = namedtuple("Moment", "mean step"), namedtuple("Pair", "left right")
        >>> [kind.__name__ for kind in namedtuple_types({"o": [Moment(Pair(1, 2), 3), Pair(4, 5)]})]
        ['Moment', 'Pair']
    """
    kinds: dict[type, None] = {}
    flatten(tree, lambda node: (kind := type(node)) in LEAVES or kinds.setdefault(kind))  # None: not a leaf
    return tuple(kind for kind in kinds if optree.is_namedtuple_class(kind))


def describe(node: Tree) -> str:
    """Return a node's type and size for errors, never its contents.

    Examples:
        >>> describe({"a": 1}), describe([]), describe(1.5)
        ('dict with 1 key', 'list of length 0', 'float')
    """
    name = type(node).__name__
    if isinstance(node, dict):
        return f"{name} with {plural(len(node), 'key')}"
    return f"{name} of length {len(node)}" if is_sequence(node) else name


def is_known_leaf(node: Any) -> bool:
    """Return whether a node has one of the usual types of leaves; this test is faster than a look-up in optree."""
    return type(node) in LEAVES


def flatten(tree: Tree, is_leaf: Callable[[Any], Any] = is_known_leaf) -> tuple[list[Any], optree.PyTreeSpec]:
    """Return a tree's leaves and its structure; shards are leaves."""
    return flatten_with_kinds(tree, is_leaf)[:2]


@refusing_depth
def flatten_with_kinds(
    tree: Tree, is_leaf: Callable[[Any], Any] = is_known_leaf
) -> tuple[list[Any], optree.PyTreeSpec, set[type]]:
    """Return a tree's leaves, its structure, and the types of its leaves; shards are leaves.

    Examples:
        >>> flatten_with_kinds({"a": [1, 2]})[2]
        {<class 'int'>}
    """
    # The spec sorts dict keys, so that ranks agree on the order of leaves whatever the order of their dicts.
    leaves, spec = optree.tree_flatten(tree, is_leaf=is_leaf, none_is_leaf=True, namespace=NAMESPACE)
    # For optree a subclass of dict, list or deque is a leaf. Instances of such classes are replaced by instances of the
    # base class, until none remains.
    while _has_subclasses(kinds := set(map(type, leaves))):
        again = spec.unflatten(map(_plain, leaves))
        leaves, spec = optree.tree_flatten(again, is_leaf=is_leaf, none_is_leaf=True, namespace=NAMESPACE)
    return leaves, spec, kinds


def _has_subclasses(kinds: Set[type]) -> bool:
    return any(issubclass(kind, _OPEN_KINDS) for kind in kinds)


def _plain(leaf: Any) -> Tree:
    """Convert an instance of a subclass of dict, list or deque to the base class; return other leaves unchanged."""
    return like(leaf, entries(leaf) or {}) if isinstance(leaf, _OPEN_KINDS) else leaf


# Leaves with paths.


def path_key(path: TreePath) -> str:
    """Return a path's entries joined by dots, the default key of its leaf; fields of named tuples appear by name.

    Examples:
        >>> path_key(("layers", 0, "weight"))
        'layers.0.weight'
        >>> from collections import namedtuple
        >>> [path_key(path) for path, _ in leaves_with_paths({"opt": namedtuple("Moment", "mu nu")(1, 2)})]
        ['opt.mu', 'opt.nu']
    """
    return ".".join(map(str, path))


def leaves_with_paths(tree: Tree) -> list[tuple[TreePath, Any]]:
    """Return a tree's leaves as (path, leaf) pairs; shards are leaves.

    Examples:
        >>> leaves_with_paths({"model": [1, None]})
        [(('model', 0), 1), (('model', 1), None)]
    """
    return flatten_with_paths(tree)[0]


def shard_leaves(tree: Tree) -> list[ShardedBase]:
    """Return a tree's tensor shards, factories and sharded objects, in the order of sorted dict keys.

    Factories are not applied; the shards that they build are leaves of `apply_factories(tree)`.

    Examples:
        >>> import torch
        >>> from shardtree.mapping import ShardedTensor
        >>> shard_leaves({"w": ShardedTensor.from_rank_offsets("w", torch.ones(2)), "step": 3})[0].key
        'w'
    """
    return [leaf for leaf in flatten(tree)[0] if isinstance(leaf, ShardedBase)]


def flatten_with_paths(tree: Tree) -> tuple[list[tuple[TreePath, Any]], Callable[[Sequence[Any]], Tree]]:
    """Return a tree's leaves with paths, and a function that rebuilds the structure with other leaves.

    Args:
        tree: Any tree. Shards, factories, objects and None are leaves.

    Returns:
        The pairs of path and leaf in the order of sorted dict keys, and `rebuild(leaves)`, which takes as many leaves
        in the same order and returns new containers that keep each dict's own order.

    Raises:
        TreeError: `rebuild` got another number of leaves.

    Examples:
        >>> pairs, rebuild = flatten_with_paths({"b": 1, "a": (2, 3)})
        >>> rebuild([leaf * 10 for _, leaf in pairs])
        {'b': 10, 'a': (20, 30)}

    References:
        jax.tree_util.tree_flatten_with_path.
    """
    kinds: set[type] = set()
    note = kinds.add  # returns None: not a leaf
    leaves, spec = flatten(tree, lambda node: (kind := type(node)) in LEAVES or note(kind))
    # optree makes all paths at once, with positions instead of fields; only trees with named tuples need another pass.
    classes = {kind for kind in kinds if issubclass(kind, tuple) and fields_of(kind)}
    paths = _with_fields(tree, classes) if classes else spec.paths()

    def rebuild(new: Sequence[Any]) -> Tree:
        if len(new) != spec.num_leaves:
            raise TreeError(error_text("rebuild: wrong number of leaves", found=len(new), expected=spec.num_leaves))
        return spec.unflatten(new)

    return list(zip(paths, leaves, strict=True)), rebuild


def _with_fields(tree: Tree, classes: Set[type]) -> Iterator[TreePath]:
    """Yield the paths of a tree's leaves, with `Field`s instead of positions in namedtuples of the given classes."""
    parts, spec = flatten(tree, lambda node: (kind := type(node)) in LEAVES or kind in classes)
    for path, part in zip(spec.paths(), parts, strict=True):
        if type(part) not in classes:
            yield path
            continue
        for entry, child in (entries(part) or {}).items():
            yield from ((*path, entry, *rest) for rest in _with_fields(child, classes))
