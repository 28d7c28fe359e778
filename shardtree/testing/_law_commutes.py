"""The law of transforms: transforming commutes with resharding, so that no layout can be seen in what they give."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import permutations
from typing import Any

from ..errors import CheckpointingException, render_path
from ..layouts import Mesh, PartitionSpec, shard
from ..mapping import LocalNonpersistentObject, ShardedTensor
from ..plans import reshard
from ..trees import apply_factories, leaves_with_paths, map_shards
from ._bits import first_difference, outline
from ._law_purity import check_pure


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
