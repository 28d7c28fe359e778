"""The laws of purity and of commuting: a function keeps its arguments; a transform doesn't depend on the layout."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from itertools import permutations
from typing import Any, TypeVar

import torch

from ..core.mapping import LocalNonpersistentObject, ShardedTensor
from ..core.trees import apply_factories, entries, leaves_with_paths, map_shards, node_data
from ..errors import CheckpointingException, TreePath, render_path
from ..live.resharding import reshard
from ..meshes import Mesh, PartitionSpec, shard
from ._bits import CallableOutline, outline, shards_of
from ._tolerances import Deviation, Tolerances, deviation, largest_element

T = TypeVar("T")


def check_pure(fn: Callable[..., T], *args: Any, **options: Any) -> T:
    """Call a function, check that it changed none of its arguments, and return its result.

    Containers must contain the same objects in the same order; arrays and tensors must keep their bits, and tensors
    their version counter, which also counts writes that change nothing. Called again, the function must return an equal
    result.

    Args:
        fn: The function under test.
        args: Positional arguments for the function.
        options: Keyword arguments for the function.

    Raises:
        AssertionError: An argument or the result changes; the error names the argument and the path in it.

    Examples:
        >>> check_pure(sorted, [3, 1, 2])
        [1, 2, 3]
        >>> check_pure(list.sort, [3, 1, 2])
        Traceback (most recent call last):
        AssertionError: sort changed its argument 0 at argument[0]
    """
    fn_name = getattr(fn, "__name__", type(fn).__name__)
    arguments: dict[Any, Any] = dict([*enumerate(args), *options.items()])
    # Identities are compared too: a container that was replaced by an equal copy has changed for its other owners.
    before = {name: (outline(value), _identities(value)) for name, value in arguments.items()}
    result = fn(*args, **options)
    for name, value in arguments.items():
        (content, old), new = before[name], _identities(value)
        paths = [path for path in [*old, *new] if old.get(path) != new.get(path)] or [()]
        what = f"{fn_name} changed its argument {name}"
        assert list(old.items()) == list(new.items()), f"{what} at {render_path(paths[0], 'argument')}"
        assert outline(value) == content, f"{what}: a value inside it"
    again = fn(*args, **options)
    # Functions are left out: a function that returns functions makes new ones each time.
    same = callable(result) or _without_functions(outline(result)) == _without_functions(outline(again))
    assert same, f"{fn_name} returned another value when it was called again"
    return result


def _without_functions(shape: Any) -> Any:
    if isinstance(shape, CallableOutline):
        return CallableOutline
    return type(shape)(map(_without_functions, shape)) if isinstance(shape, (list, tuple)) else shape


def _identities(value: Any, path: tuple[Any, ...] = ()) -> dict[tuple[Any, ...], Any]:
    """Return the id and the version counter (None if there is none) of each object in a value, by path."""
    # Inference tensors have no version counter, and raise when asked for it.
    version = value._version if isinstance(value, torch.Tensor) and not value.is_inference() else None
    identities = {path: (id(value), version)}
    for entry, child in _children(value):
        identities |= _identities(child, (*path, entry))
    return identities


def _children(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, (list, tuple, deque)):
        return list(enumerate(value))
    if is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name)) for field in fields(value)]
    return list((entries(value) or {}).items())


# The law of transforms: they commute with resharding, so that results don't depend on the layout.


def check_commutes(
    transform: Callable[[Any], Any],
    state: Any,
    *,
    layouts: Sequence[tuple[Mesh, Any]] | None = None,
    rtol: float | None = None,
    atol: float | None = None,
) -> None:
    """Raise unless a transform commutes with resharding, between any two of the layouts.

    This catches a transform that looks only at its own shard (one that subtracts the local mean, or takes the first
    half of a shard for the first half of the tensor). Metadata, plain values and the static fields of registered
    classes must be equal, and elements within the tolerances, since the order of sums depends on the layout. The
    transform must not change its argument. The state is moved from each layout to every other one, so keep tensors
    small.

    Args:
        transform: Function from a rank's tree to its new tree.
        state: A tree of global tensors and plain values, as for `shard`.
        layouts: Pairs of a mesh and specs, as for `shard`; by default one rank, and each tensor cut by rows, by columns
            and by both. If the transform refuses some of them, pass those that it supports.
        rtol: Relative tolerance for floating-point and complex elements; by default the dtype's tolerance in
            `torch.testing.assert_close`, such as 1.3e-6 for float32. Integers and bools must be equal.
        atol: Absolute tolerance; by default also the dtype's, such as 1e-5 for float32, but at most the relative
            tolerance times the tensor's largest element, so that tensors of small elements are checked too. Pass
            ``rtol=0, atol=0`` for transforms that only move or convert elements: the results must then be equal bit for
            bit.

    Raises:
        AssertionError: The results differ, or an argument changes; the error names both layouts, the rank, the key and
            the difference, for the worst tensor if several differ.
        MetadataError: A tolerance isn't a finite number of at least 0.

    Examples:
        >>> import functools, torch, shardtree as st
        >>> state = {"w": torch.arange(24.0).view(6, 4), "step": 3}
        >>> check_commutes(st.bind(st.cast, torch.bfloat16), state, rtol=0, atol=0)
        >>> check_commutes(functools.partial(st.map_data, lambda data: data - data.mean()), state)
        Traceback (most recent call last):
        AssertionError: from one rank to 2 ranks by rows: rank 0: 'w' at tree['w']: 12 of 12 elements differ ...
    """
    tolerances = Tolerances(rtol, atol)
    cuts = _default_layouts(state) if layouts is None else {f"{mesh} {specs}": (mesh, specs) for mesh, specs in layouts}
    trees = {name: dict(zip(mesh.ranks, shard(state, mesh, spec), strict=True)) for name, (mesh, spec) in cuts.items()}
    for before, after in permutations(trees, 2):
        _check_pair(f"from {before} to {after}", transform, trees[before], trees[after], tolerances)


def _default_layouts(state: Any) -> dict[str, tuple[Mesh, Any]]:
    """Return the default layouts of `check_commutes`, as (mesh, specs) pairs by name."""
    rows, columns = (Mesh(**{name: 2}) for name in ("rows", "columns"))
    return {
        "one rank": (Mesh(), PartitionSpec()),
        "2 ranks by rows": (rows, _cut(state, "rows")),
        "3 ranks by rows": (Mesh(rows=3), _cut(state, "rows")),
        "2 ranks by columns": (columns, _cut(state, None, "columns")),
        "4 ranks by both": (Mesh(rows=2, columns=2), _cut(state, "rows", "columns")),
    }


def _cut(state: Any, *names: str | None) -> Any:
    """Return the specs that cut each tensor of a state in the same way.

    Args:
        state: Tree of tensors.
        names: Mesh axis that cuts each leading tensor axis; None for an axis that is not cut.
    """
    return map_shards(lambda leaf: PartitionSpec(*names[: getattr(leaf, "ndim", 0)]), state)


def _check_pair(
    where: str,
    transform: Callable[[Any], Any],
    before: Mapping[int, Any],
    after: Mapping[int, Any],
    tolerances: Tolerances,
) -> None:
    expected = {rank: check_pure(transform, tree) for rank, tree in reshard(before, after).items()}
    results = {rank: transform(tree) for rank, tree in before.items()}
    _check_nodes(where, results.values(), expected.values())
    try:
        resharded = reshard(results, expected)
    except CheckpointingException as error:
        raise AssertionError(f"{where}: the transformed trees cannot be resharded: {error}") from error
    largest: dict[str, float] = {}  # of whole tensors, by key: a shard's largest element depends on the layout
    for tree in expected.values():
        for leaf in shards_of(apply_factories(tree)).values():
            largest[leaf.key] = max(largest.get(leaf.key, 0.0), largest_element(leaf.data))
    wrong = [
        fault
        for rank, tree in expected.items()
        for fault in _deviations(f"{where}: rank {rank}", resharded[rank], tree, tolerances, largest)
    ]
    if wrong:
        # The worst deviation shows which tolerance would suffice, if any.
        worst = max(wrong, key=lambda fault: fault.excess)
        raise AssertionError(worst.text + f" ({len(wrong)} shards differ, this one most)" * (len(wrong) > 1))


def _check_nodes(where: str, results: Iterable[Any], expected: Iterable[Any]) -> None:
    """Raise unless containers with the same path and entries have the same type and metadata on all ranks."""
    # Resharding takes the containers of its target, so they are compared before.
    seen: dict[Any, Any] = {}
    for tree in [*results, *expected]:
        for path, node, children in _nodes(tree):
            kind = type(node).__name__, {} if isinstance(node, (dict, list, tuple, deque)) else node_data(node)
            # Pipeline stages have other entries, which a class may list in its data.
            first = seen.setdefault((path, children), (type(node), outline(kind), kind))
            same = first[:2] == (type(node), outline(kind))
            assert same, (
                f"{where}: {render_path(path)}: found {first[2]}, expected {kind}: the ranks' containers differ"
            )


def _nodes(tree: Any, path: TreePath = ()) -> Iterator[tuple[TreePath, Any, tuple[Any, ...]]]:
    """Yield each container with its path and its entries."""
    children = entries(tree)
    if children is not None:
        yield path, tree, tuple(children)
        for entry, child in children.items():
            yield from _nodes(child, (*path, entry))


def _deviations(
    where: str, found: Any, expected: Any, tolerances: Tolerances, largest: Mapping[str, float]
) -> Iterator[Deviation]:
    """Yield the deviation of each shard that isn't within the tolerances.

    Args:
        where: Beginning of the messages.
        found: Tree under test.
        expected: Tree with the right values.
        tolerances: Allowed deviation of each element.
        largest: Largest absolute value of each whole tensor, by key, which limits the absolute tolerance.

    Raises:
        AssertionError: The trees differ in their paths, in a shard's metadata, or in a leaf that isn't a shard.
    """
    leaves, targets = (dict(leaves_with_paths(apply_factories(tree))) for tree in (found, expected))
    assert leaves.keys() == targets.keys(), f"{where}: found {list(leaves)}, expected {list(targets)}"
    for path, leaf in targets.items():
        if isinstance(leaf, ShardedTensor):
            place = f"{where}: {leaf.key!r} at {render_path(path)}"
            assert leaves[path].without_data() == leaf.without_data(), f"{place}: found {leaves[path]}, expected {leaf}"
            wrong = deviation(leaves[path].data, leaf.data, tolerances, largest[leaf.key])
            if wrong is not None:
                yield replace(wrong, text=f"{place}: {wrong.text}")
        elif not isinstance(leaf, LocalNonpersistentObject):  # local values belong to a rank, and aren't resharded
            same = outline(leaves[path]) == outline(leaf)
            assert same, f"{where}: {render_path(path)}: found {leaves[path]!r}, expected {leaf!r}"
