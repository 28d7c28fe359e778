"""The law of round trips: a state that is saved in one layout and loaded in another is unchanged, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial, reduce
from operator import getitem
from typing import Any

from ..checkpoint import load as st_load
from ..checkpoint import save as st_save
from ..mapping import ShardedObject
from ..storage import Directory, MemoryStorage
from ..strategies import Strategies
from ..trees import leaves_with_paths
from ..world import World, simulate
from ._bits import assemble, first_difference, outline, refilled
from ._layouts import Layout
from ._states import GlobalState, rank_tree, target_tree


def check_roundtrip(
    state: GlobalState,
    save_layout: Mapping[str, Layout],
    load_layout: Mapping[str, Layout],
    *,
    backend: str | None = None,
    version: int = 1,
    strategies: Strategies | None = None,
    directory: Directory | None = None,
    save: Callable[..., Any] = st_save,
    load: Callable[..., Any] = st_load,
    prepare_target: Callable[[Any], Any] = lambda target: target,
) -> None:
    """Raise unless a state that is saved in one layout and loaded in another is unchanged, bit for bit.

    Each layout is run on as many simulated ranks as it has.

    Args:
        state: the global values.
        save_layout: by tensor key, for saving.
        load_layout: likewise, for loading.
        backend: the format; the native one by default.
        version: the format's version.
        strategies: the dispatch table that has its rows.
        directory: where the checkpoint goes; memory by default.
        save: called as ``save(tree, directory, world=world)`` on each rank, with the format as third argument and with
            ``strategies`` if they are passed.
        load: called as ``load(target, directory, world=world)`` on each rank, with ``strategies`` likewise.
        prepare_target: applied to each rank's target, whose shards have no data.

    Raises:
        AssertionError: names the tensor, object or rank, and the difference.

    Examples:
        >>> import torch
        >>> from shardtree.testing import even_layout
        >>> state = GlobalState({"w": torch.arange(12).reshape(4, 3)}, {"rng": [5]}, {"step": 3})
        >>> rows, columns = even_layout((4, 3), 4, axis=0), even_layout((4, 3), 3, axis=1)
        >>> check_roundtrip(state, {"w": rows}, {"w": columns})
        >>> check_roundtrip(state, {"w": rows}, {"w": columns}, backend="zarr", version=3)
    """
    place = MemoryStorage() if directory is None else directory
    if strategies is not None:
        save, load = partial(save, strategies=strategies), partial(load, strategies=strategies)
    to = (place,) if backend is None else (place, (backend, version))
    simulate(_ranks(save_layout), lambda world: save(rank_tree(state, save_layout, world.rank), *to, world=world))
    load_rank = partial(_load_rank, state, load_layout, place, load, prepare_target)
    pairs = simulate(_ranks(load_layout), load_rank)
    # Assembled rather than compared shard by shard: that finds replicas that differ, and elements on no rank, too.
    check_tensors(state, assemble(refilled(target, loaded) for target, loaded in pairs))
    for rank, (target, loaded) in enumerate(pairs):
        check_rest(state, target, loaded, rank)


def _load_rank(
    state: GlobalState,
    layout: Mapping[str, Layout],
    place: Directory,
    load: Callable[..., Any],
    prepare_target: Callable[[Any], Any],
    world: World,
) -> tuple[Any, Any]:
    target = prepare_target(target_tree(state, layout, world.rank))
    return target, load(target, place, world=world)


def _ranks(layout: Mapping[str, Layout]) -> int:
    counts = {each.ranks for each in layout.values()}
    assert len(counts) == 1, f"layouts are for different numbers of ranks: {sorted(counts)}"
    return counts.pop()


def check_tensors(state: GlobalState, found: Mapping[str, Any]) -> None:
    """Raise unless tensors equal those of a state, bit for bit."""
    assert found.keys() == state.tensors.keys(), f"found {sorted(found)}, expected {sorted(state.tensors)}"
    wrong = {key: first_difference(found[key], whole) for key, whole in state.tensors.items()}
    lines = [f"{key!r}: {difference}" for key, difference in wrong.items() if difference]
    assert not lines, "tensors differ from what was saved\n  " + "\n  ".join(lines)


def check_rest(state: GlobalState, target: Any, loaded: Any, rank: int) -> None:
    """Raise unless a rank loaded its objects, the common state and its local values."""
    if state.common:
        same = outline(loaded["common"]) == outline(dict(state.common))
        assert same, f"rank {rank}: the common state differs: {loaded['common']!r}, expected {state.common!r}"
        assert loaded["local"] == [7, rank], f"rank {rank}: found {loaded['local']}, expected {[7, rank]}"
    for path, leaf in leaves_with_paths(target):
        if isinstance(leaf, ShardedObject):
            expected, found = state.objects[leaf.key][leaf.global_offset[0]], reduce(getitem, path, loaded)
            assert outline(found) == outline(expected), f"rank {rank}: {leaf.unique_key!r} is {found!r}"
