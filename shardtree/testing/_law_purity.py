"""The law of purity: a function leaves its arguments as they were, to the last container and bit."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from itertools import permutations
from typing import Any, TypeVar

import torch

from ..errors import CheckpointingException, render_path
from ..layouts import Mesh, PartitionSpec, shard
from ..mapping import LocalNonpersistentObject, ShardedTensor
from ..plans import reshard
from ..trees import apply_factories, leaves_with_paths, map_shards
from ._bits import first_difference, outline

T = TypeVar("T")


def check_pure(fn: Callable[..., T], *args: Any, **options: Any) -> T:
    """Return what a function returns, after checking that it changed none of its arguments.

    Containers must hold the very same objects in the same order; arrays and tensors must keep their bits, and tensors
    their version counter, which counts writes that change nothing too. So a container that the result shares with an
    argument is one that didn't change. Called again, the function must give the same.

    Args:
        fn: any function.
        args: its arguments.
        options: its keyword arguments.

    Raises:
        AssertionError: names the argument, the path in it and what changed.

    Examples:
        >>> check_pure(sorted, [3, 1, 2])
        [1, 2, 3]
        >>> check_pure(list.sort, [3, 1, 2])
        Traceback (most recent call last):
        AssertionError: sort changed its argument 0 at argument[0]
    """
    called = getattr(fn, "__name__", type(fn).__name__)
    given: dict[Any, Any] = dict([*enumerate(args), *options.items()])
    before = {name: (outline(value), _identities(value)) for name, value in given.items()}
    result = fn(*args, **options)
    for name, value in given.items():
        _check_unchanged(f"{called} changed its argument {name}", value, *before[name])
    assert _same(result, fn(*args, **options)), f"{called} returned another value when it was called again"
    return result


def _check_unchanged(what: str, value: Any, outline_before: Any, identities_before: Mapping[Any, Any]) -> None:
    place = _first_change(identities_before, _identities(value))
    assert place is None, f"{what} at {render_path(place or (), 'argument')}"
    assert outline(value) == outline_before, f"{what}: a value inside it"


def _same(left: Any, right: Any) -> bool:
    # Functions that make functions make new ones each time.
    return callable(left) or _without_functions(outline(left)) == _without_functions(outline(right))


def _without_functions(shape: Any) -> Any:
    if isinstance(shape, tuple) and len(shape) == 2 and isinstance(shape[0], type) and isinstance(shape[1], int):
        return shape[0]
    return type(shape)(map(_without_functions, shape)) if isinstance(shape, (list, tuple)) else shape


def _identities(value: Any, path: tuple[Any, ...] = ()) -> dict[tuple[Any, ...], Any]:
    """Return what stands at each path: which object, and a tensor's version."""
    version = value._version if isinstance(value, torch.Tensor) and not value.is_inference() else None
    found = {path: (id(value), version)}
    for entry, child in _children(value):
        found |= _identities(child, (*path, entry))
    return found


def _children(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, (list, tuple, deque)):
        return list(enumerate(value))
    if is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name)) for field in fields(value)]
    return []


def _first_change(before: Mapping[Any, Any], after: Mapping[Any, Any]) -> tuple[Any, ...] | None:
    changed = (path for path in [*before, *after] if before.get(path) != after.get(path))
    return next(iter(changed), None) if list(before.items()) != list(after.items()) else None


# The law of transforms: transforming commutes with resharding, so that no layout can be seen in what they give.


def check_commutes(
    transform: Callable[[Any], Any], state: Any, *, layouts: Sequence[tuple[Mesh, Any]] | None = None
) -> None:
    """Raise unless transforming what was resharded is resharding what was transformed, between any two of the layouts.

    So a transform that looks only at its own shard (that subtracts the local mean, or takes the first half of a shard
    for the first half of the tensor) is caught. Metadata, elements and plain values must be the same, to the last bit;
    and no argument may change. Everything is moved from each layout to each other one, so keep tensors small.

    Args:
        transform: from a rank's tree to its new tree.
        state: a tree of global tensors and plain values, as `shard` takes it.
        layouts: pairs of a mesh and specs, as `shard` takes them; by default all of it on one rank, and each tensor
            cut by rows, by columns and by both. Where the transform refuses some, give those that it takes.

    Raises:
        AssertionError: names the two layouts, the rank and the key, and how they differ.

    Examples:
        >>> import functools, torch, shardtree as st
        >>> state = {"w": torch.arange(24.0).view(6, 4), "step": 3}
        >>> check_commutes(st.bind(st.cast, torch.bfloat16), state)
        >>> check_commutes(functools.partial(st.map_data, lambda data: data - data.mean()), state)
        Traceback (most recent call last):
        AssertionError: from one rank to 2 ranks by rows: rank 0: 'w' at tree['w']: 12 of 12 elements differ, ...
    """
    named = _usual(state) if layouts is None else {f"{mesh} {specs}": (mesh, specs) for mesh, specs in layouts}
    held = {name: dict(zip(mesh.ranks, shard(state, mesh, spec), strict=True)) for name, (mesh, spec) in named.items()}
    for one, other in permutations(held, 2):
        _check_pair(f"from {one} to {other}", transform, held[one], held[other])


def _usual(state: Any) -> dict[str, tuple[Mesh, Any]]:
    """Return layouts of several kinds, by name."""
    rows, columns = (Mesh(**{name: 2}) for name in ("rows", "columns"))
    return {
        "one rank": (Mesh(), PartitionSpec()),
        "2 ranks by rows": (rows, _cut(state, "rows")),
        "3 ranks by rows": (Mesh(rows=3), _cut(state, "rows")),
        "2 ranks by columns": (columns, _cut(state, None, "columns")),
        "4 ranks by both": (Mesh(rows=2, columns=2), _cut(state, "rows", "columns")),
    }


def _cut(state: Any, *names: str | None) -> Any:
    """Return a spec for each tensor that cuts as many of its axes as it has."""
    return map_shards(lambda leaf: PartitionSpec(*names[: getattr(leaf, "ndim", 0)]), state)


def _check_pair(
    where: str, transform: Callable[[Any], Any], before: Mapping[int, Any], after: Mapping[int, Any]
) -> None:
    expected = {rank: check_pure(transform, tree) for rank, tree in reshard(before, after).items()}
    transformed = {rank: transform(tree) for rank, tree in before.items()}
    try:
        found = reshard(transformed, expected)
    except CheckpointingException as error:
        raise AssertionError(f"{where}: what was transformed can't be resharded: {error}") from error
    for rank, tree in expected.items():
        _check_same(f"{where}: rank {rank}", found[rank], tree)


def _check_same(where: str, found: Any, expected: Any) -> None:
    got, wanted = (dict(leaves_with_paths(apply_factories(tree))) for tree in (found, expected))
    assert got.keys() == wanted.keys(), f"{where}: found {list(got)}, expected {list(wanted)}"
    for path, leaf in wanted.items():
        if isinstance(leaf, ShardedTensor):
            place = f"{where}: {leaf.key!r} at {render_path(path)}"
            assert got[path].without_data() == leaf.without_data(), f"{place}: found {got[path]}, expected {leaf}"
            differ = first_difference(got[path].data, leaf.data)
            assert differ is None, f"{place}: {differ}"
        elif not isinstance(leaf, LocalNonpersistentObject):  # which is the rank's own
            same = outline(got[path]) == outline(leaf)
            assert same, f"{where}: {render_path(path)}: found {got[path]!r}, expected {leaf!r}"
