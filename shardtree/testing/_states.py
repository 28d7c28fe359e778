"""Global states, ranks' sharded trees of a state in a layout, and the law of round trips through a checkpoint."""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from hypothesis import strategies as st

from ..core.mapping import LocalNonpersistentObject, ShardedObject
from ..core.trees import deepest, leaves_with_paths, without_data
from ..live import simulate
from ..shell.checkpoint import load as st_load
from ..shell.checkpoint import save as st_save
from ..shell.storage import Directory
from ..shell.table import Strategies
from ..stores import MemoryStorage
from ._bits import assemble, check_same, outline, refilled
from ._layouts import Layout, cut, layouts, pretty_repr
from ._tensors import PRINTABLE_DTYPES, tensors

# Common states.


@cache  # building the strategy takes longer than drawing from it
def common_states() -> st.SearchStrategy[dict[str, Any]]:
    """Return a strategy for common states: nested containers of numbers, text, bytes and tensors.

    Examples:
        >>> from hypothesis import find
        >>> find(common_states(), lambda state: "a" in state)
        {'a': None}
    """
    return st.dictionaries(_names(), st.recursive(_values(), _containers, max_leaves=6), max_size=3)


def _names() -> st.SearchStrategy[str]:
    return st.text("abc/._é", min_size=1, max_size=3)


def _values() -> st.SearchStrategy[Any]:
    numbers = st.integers() | st.floats() | st.complex_numbers() | st.just(math.nan)
    text = st.text(max_size=4) | st.binary(max_size=4)
    return st.none() | st.booleans() | numbers | text | tensors(dtype=st.sampled_from(PRINTABLE_DTYPES))


def _containers(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    many = st.lists(children, max_size=3)
    mappings = st.dictionaries(_names() | st.integers(0, 9), children, max_size=3)
    return st.one_of(many, mappings, many.map(tuple), mappings.map(OrderedDict), many.map(deque))


# Global states, and ranks' trees of them.


@dataclass(frozen=True, slots=True, eq=False)
class GlobalState:
    """The state of all ranks together: the oracle that loads are compared with.

    Attributes:
        tensors: Global tensors by key.
        objects: Elements of each array of objects, in order, by the array's key.
        common: Values that are the same on every rank.
    """

    tensors: Mapping[str, torch.Tensor]
    objects: Mapping[str, Sequence[Any]]
    common: Mapping[str, Any]

    _repr_pretty_ = pretty_repr

    def __repr__(self) -> str:
        """Return the tensors' shapes and dtypes, and the objects and common values themselves."""
        # Tensors' values are left out, since torch can't print some dtypes.
        kinds = {key: f"{str(whole.dtype)[6:]} {tuple(whole.shape)}" for key, whole in self.tensors.items()}
        return f"GlobalState(tensors={kinds}, objects={self.objects}, common={self.common})"


def global_states(*, max_tensors: int = 3) -> st.SearchStrategy[GlobalState]:
    """Return a strategy for states: one or more tensors of any shape and dtype, objects and common values.

    Examples:
        >>> from hypothesis import given, settings
        >>> @settings(max_examples=3)
        ... @given(global_states())
        ... def check_has_tensors(state):
        ...     assert state.tensors
        >>> check_has_tensors()
    """
    mappings = st.dictionaries(st.text("ab./é", min_size=1, max_size=3), tensors(), min_size=1, max_size=max_tensors)
    objects = st.dictionaries(st.sampled_from(["rng", "o/shard_1"]), st.lists(st.integers(), min_size=1, max_size=3))
    return st.builds(GlobalState, mappings, objects, common_states())


@st.composite
def state_layouts(draw: st.DrawFn, state: GlobalState, ranks: int) -> dict[str, Layout]:
    """Return a strategy for layouts of a state's tensors, by key.

    Examples:
        >>> state = GlobalState({"w": torch.zeros(2)}, {}, {})
        >>> from hypothesis import find
        >>> find(state_layouts(state, 1), lambda found: True)["w"].pieces
        (Piece(0, (0,), (2,)),)
    """
    return {key: draw(layouts(tuple(tensor.shape), ranks)) for key, tensor in state.tensors.items()}


def rank_tree(state: GlobalState, layout: Mapping[str, Layout], rank: int) -> dict[str, Any]:
    """Return the sharded tree that a rank saves for a state.

    Without common values the tree has only shards and objects, so that formats which store nothing but tensors can be
    tested too. With common values it also has a `LocalNonpersistentObject`, which isn't stored.

    Args:
        state: The global values.
        layout: Layout of each tensor, by key.
        rank: Index of the rank.

    Examples:
        >>> from shardtree.testing import even_layout
        >>> state = GlobalState({"w": torch.arange(4)}, {}, {"step": 3})
        >>> tree = rank_tree(state, {"w": even_layout((4,), 2, axis=0)}, 1)
        >>> tree["model"]["w"][0].data, tree["common"]
        (tensor([2, 3]), {'step': 3})
    """
    ranks = ranks_of(layout)
    shards = {key: cut(layout[key], key, whole, rank) for key, whole in state.tensors.items()}
    objects = [item for key, values in state.objects.items() for item in _objects(key, values, rank, ranks)]
    parts = {"model": {key: of_key for key, of_key in shards.items() if of_key}, "objects": objects}
    plain = {"common": dict(state.common), "local": [7, LocalNonpersistentObject(rank)]} if state.common else {}
    return {name: tree for name, tree in parts.items() if tree} | plain


def target_tree(state: GlobalState, layout: Mapping[str, Layout], rank: int) -> dict[str, Any]:
    """Return a rank's load target: `rank_tree` without data.

    Examples:
        >>> from shardtree.testing import even_layout
        >>> state = GlobalState({"w": torch.arange(4)}, {}, {})
        >>> target_tree(state, {"w": even_layout((4,), 1, axis=0)}, 0)["model"]["w"][0].data is None
        True
    """
    tree = {name: part for name, part in rank_tree(state, layout, rank).items() if name != "common"}
    target: dict[str, Any] = without_data(tree)
    return target


def _objects(key: str, values: Sequence[Any], rank: int, ranks: int) -> list[ShardedObject]:
    """Return a rank's objects of an array of objects; each object is on two ranks, unless the job has only one."""
    shape, holders = (len(values),), range(min(ranks, 2))
    return [
        ShardedObject(key, value, shape, (number,), replica)
        for number, value in enumerate(values)
        for replica in holders
        if (number + replica) % ranks == rank
    ]


# All ranks' trees of a state.


@dataclass(frozen=True, slots=True, eq=False)
class ShardedTrees:
    """All ranks' trees of a state: arguments for the function under test, together with the oracle.

    Attributes:
        state: The global values, which are the oracle.
        layout: Layout of each tensor, by key.
        trees: Trees by rank.
    """

    state: GlobalState
    layout: Mapping[str, Layout]
    trees: tuple[Any, ...]

    @property
    def targets(self) -> tuple[Any, ...]:
        """Each rank's load target: its tree without data."""
        return tuple(target_tree(self.state, self.layout, rank) for rank in range(len(self.trees)))

    _repr_pretty_ = pretty_repr

    def __repr__(self) -> str:
        """Return the state and its layout, which determine the trees."""
        return f"ShardedTrees({self.state}, {dict(self.layout)})"


@st.composite
def sharded_trees(
    draw: st.DrawFn, *, ranks: int | None = None, state: st.SearchStrategy[GlobalState] | None = None
) -> ShardedTrees:
    """Return a strategy for all ranks' trees of a state, in any layouts, with the state itself.

    Args:
        draw: Hypothesis's draw function, which callers don't pass.
        ranks: Number of ranks; 1 to 4 by default.
        state: Strategy for the state; by default tensors of any shape and dtype, objects and a common state.

    Examples:
        >>> from hypothesis import given, settings
        >>> @settings(max_examples=3)
        ... @given(sharded_trees(ranks=2))
        ... def check_a_tree_a_rank(drawn):
        ...     assert len(drawn.trees) == 2
        >>> check_a_tree_a_rank()
    """
    whole = draw(global_states() if state is None else state)
    count = draw(st.integers(1, 4)) if ranks is None else ranks
    layout = draw(state_layouts(whole, count))
    return ShardedTrees(whole, layout, tuple(rank_tree(whole, layout, rank) for rank in range(count)))


# The law of round trips.


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
        state: The global values.
        save_layout: Layout of each tensor while saving, by key.
        load_layout: Layout of each tensor while loading, by key.
        backend: Name of the format; the native one by default.
        version: Version of the format.
        strategies: Dispatch table with the format's rows; None for the process's.
        directory: Place of the checkpoint; memory by default.
        save: Function under test, called as ``save(tree, directory, world=world)`` on each rank, with the format as
            third argument if `backend` is given, and with ``strategies`` if they are given.
        load: Function under test, called as ``load(target, directory, world=world)`` on each rank, with ``strategies``
            if they are given.
        prepare_target: Function that is applied to each rank's target, whose shards have no data.

    Raises:
        AssertionError: The state differs; the error names the tensor, object or rank, and the difference.

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
    simulate(ranks_of(save_layout), lambda world: save(rank_tree(state, save_layout, world.rank), *to, world=world))
    targets = [prepare_target(target_tree(state, load_layout, rank)) for rank in range(ranks_of(load_layout))]
    check_loaded(state, targets, simulate(len(targets), lambda world: load(targets[world.rank], place, world=world)))


def check_loaded(state: GlobalState, targets: Sequence[Any], results: Sequence[Any]) -> None:
    """Raise unless each rank loaded the part of a state that its target asks for."""
    # Tensors are assembled rather than compared shard by shard, to find differing replicas and missing elements too.
    check_same("tensors differ from what was saved", assemble(map(refilled, targets, results)), state.tensors)
    for rank, (target, result) in enumerate(zip(targets, results, strict=True)):
        check_rest(state, target, result, rank)


def ranks_of(layout: Mapping[str, Layout]) -> int:
    """Return the number of ranks, which all layouts must share."""
    counts = {of_key.ranks for of_key in layout.values()}
    assert len(counts) == 1, f"layouts are for different numbers of ranks: {sorted(counts)}"
    return counts.pop()


def check_rest(state: GlobalState, target: Any, result: Any, rank: int) -> None:
    """Raise unless a rank loaded its objects, the common state and its local values."""
    if state.common:
        same = outline(result["common"]) == outline(dict(state.common))
        assert same, f"rank {rank}: the common state differs: {result['common']!r}, expected {state.common!r}"
        assert result["local"] == [7, rank], f"rank {rank}: found {result['local']}, expected {[7, rank]}"
    for path, leaf in leaves_with_paths(target):
        if isinstance(leaf, ShardedObject):
            expected, found = state.objects[leaf.key][leaf.global_offset[0]], deepest(result, path)[0]
            assert outline(found) == outline(expected), f"rank {rank}: {leaf.unique_key!r} is {found!r}"
