"""Named tuples: keys name their fields, in trees of any kind, and states come back as their class."""

from __future__ import annotations

import copy
import pickle
from collections import namedtuple
from typing import Any, NamedTuple

import optree
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as hs

import shardtree as st
from shardtree import meshes
from shardtree.core.trees import path_key
from shardtree.core.trees._nodes import Field, entries
from shardtree.errors import KeyMismatch, TreeError
from shardtree.storage import MemoryStorage
from shardtree.trees import HOLE, flatten_with_paths, leaves_with_paths
from tests.core.trees.samples import Pair, assert_caught, at


class ScaleByAdamState(NamedTuple):
    count: Any
    mu: Any
    nu: Any


class EmptyState(NamedTuple):
    pass


def chain(value: int = 0) -> Any:
    """Return the state of optax's `chain(clip, scale_by_adam)`."""
    moments = ({"w": torch.full((4, 2), float(value + n)), "b": torch.full((2,), float(value))} for n in (1, 2))
    return (EmptyState(), ScaleByAdamState(torch.tensor(value), *moments))


WITH_CLASSES = st.LoadOptions(types=(EmptyState, ScaleByAdamState))
KEYS = ["opt.1.count", "opt.1.mu.b", "opt.1.mu.w", "opt.1.nu.b", "opt.1.nu.w"]
FORMATS = [("safetensors", 1), ("torch_dist", 1), ("dcp", 1), ("zarr", 3)]
MESH, ONE = st.Mesh(dp=2), st.Mesh(dp=1)


def shards(tree: Any, mesh: st.Mesh = MESH, **options: Any) -> list[Any]:
    """Return each rank's part of a tree: the first axis of all but the count is cut."""

    def spec(leaf: Any) -> Any:
        return st.P("dp") if leaf.ndim else st.P()

    return st.shard(tree, mesh, st.map_shards(spec, tree), **options)


# Every leaf is reached by its path, and a named tuple's entry on it is the field's name in keys.


def trees() -> hs.SearchStrategy[Any]:
    def containers(children: hs.SearchStrategy[Any]) -> hs.SearchStrategy[Any]:
        many = hs.lists(children, max_size=3)
        pairs = hs.builds(Pair, children, children)
        states = hs.builds(ScaleByAdamState, children, children, children) | hs.just(EmptyState())
        return pairs | states | many | many.map(tuple) | hs.dictionaries(hs.text("ab01", max_size=2), children)

    return hs.recursive(hs.integers(), containers, max_leaves=20)


def names(tree: Any, name: str = "") -> list[str]:
    """Return the keys of a tree's leaves, found by Python's own means."""
    if isinstance(tree, int):
        return [name]
    pairs: Any = enumerate(tree)
    if isinstance(tree, dict):
        pairs = sorted(tree.items())
    elif hasattr(tree, "_asdict"):
        pairs = tree._asdict().items()
    return [found for entry, child in pairs for found in names(child, f"{name}.{entry}")]


def names_fields(flatten: Any, tree: Any) -> None:
    pairs, rebuild = flatten(tree)
    assert [f".{path_key(path)}" * bool(path) for path, _ in pairs] == names(tree)
    assert all(at(tree, path) is leaf for path, leaf in pairs)
    # repr tells classes, which == doesn't.
    assert repr(rebuild([leaf for _, leaf in pairs])) == repr(tree)


@given(trees())
def test_keys_name_fields(tree: Any) -> None:
    names_fields(flatten_with_paths, tree)


def test_keys_name_fields_catches_positions() -> None:
    def by_positions(tree: Any) -> Any:
        pairs, rebuild = flatten_with_paths(tree)
        return [(tuple(int(e) if isinstance(e, Field) else e for e in path), leaf) for path, leaf in pairs], rebuild

    assert_caught(names_fields, by_positions, trees())


@given(trees())
def test_each_way_into_a_tree_has_the_same_paths(tree: Any) -> None:
    seen: list[str] = []
    st.select([tree], lambda path, leaf: seen.append(path_key(path)))
    assert sorted(seen) == sorted(path_key(path) for path, _ in leaves_with_paths([tree]))


def test_a_field_is_its_position_and_goes_between_processes() -> None:
    field = Field(1, "mu")
    assert {1: "a"}[field] == "a" and ("opt", field) == ("opt", 1) and type(int(field)) is int
    for again in (pickle.loads(pickle.dumps(field)), copy.deepcopy((field,))[0]):
        assert (str(again), again, type(again)) == ("mu", 1, Field)


def test_classes_that_are_registered_and_results_of_torch_keep_their_own_entries() -> None:
    class Own(Pair):
        pass

    with pytest.warns(UserWarning, match="already registered"):
        optree.register_pytree_node(
            Own, lambda o: (o[:1], None, ("own",)), lambda _, c: Own(*c, 2), namespace="shardtree"
        )
    try:
        assert leaves_with_paths({"a": Own(1, 2)}) == [(("a", "own"), 1)] and entries(Own(1, 2)) == {"own": 1}
        largest = torch.max(torch.ones(2, 2), 0)  # torch.return_types.max
        assert [path_key(path) for path, _ in leaves_with_paths(largest)] == ["0", "1"]
    finally:
        optree.unregister_pytree_node(Own, namespace="shardtree")


def test_fields_that_python_renamed_and_keys_beside_them() -> None:
    Renamed = namedtuple("Renamed", ["mu", "def", "2"], rename=True)
    tree = {"a": Renamed(1, 2, 3), "b": {"mu": 4}}
    assert [path_key(path) for path, _ in leaves_with_paths(tree)] == ["a.mu", "a._1", "a._2", "b.mu"]
    state = {"opt": Pair(torch.ones(2), torch.zeros(2)), "opt.first": torch.zeros(2)}
    with pytest.raises(
        TreeError, match=r"(?s)tree\['opt'\]\[0\].*tree\['opt.first'\]|tree\['opt.first'\].*tree\['opt'\]\[0\]"
    ):
        shards(state)


# The state of an optax chain is saved, loaded and converted there and back.


@pytest.mark.parametrize("backend", FORMATS, ids=str)
def test_an_optax_state_comes_back_in_each_format(backend: tuple[str, int]) -> None:
    folder, other, back = MemoryStorage(), MemoryStorage(), MemoryStorage()
    st.simulate(
        2, lambda world: st.save({"opt": shards({"opt": chain(5)})[world.rank]["opt"]}, folder, backend, world=world)
    )
    assert sorted(st.load_sharded_metadata(folder)) == KEYS
    st.convert(
        folder, other, load_options=WITH_CLASSES, backend="safetensors" if backend[0] != "safetensors" else "zarr"
    )
    st.convert(other, back, load_options=WITH_CLASSES, backend=backend)
    for stored in (folder, back):
        loaded = st.load({"opt": chain()}, stored)
        assert not st.diff(loaded, {"opt": chain(5)})
        assert type(loaded["opt"][1]) is ScaleByAdamState and type(loaded["opt"][0]) is EmptyState
        halves = st.simulate(
            2, lambda world, stored=stored: st.load(shards({"opt": chain()})[world.rank], stored, world=world)
        )
        assert halves[1]["opt"][1].nu["w"].tolist() == [[7, 7], [7, 7]]


def test_specs_and_patterns_go_by_fields() -> None:
    specs = meshes.specs_by_pattern({"opt.*.mu.**": st.P("dp"), "**": st.P()})
    parts = st.shard({"opt": chain()}, MESH, specs)
    assert parts[0]["opt"][1].mu["w"].local_shape == (2, 2) and parts[0]["opt"][1].nu["w"].local_shape == (4, 2)
    chosen = st.select({"opt": chain()}, "opt.*.mu.*")["opt"][1]
    assert chosen.mu.keys() == {"b", "w"} and chosen.nu is chosen.count is HOLE


# Keys of earlier editions have positions.


def by_position(path: Any) -> str:
    return ".".join(str(int(entry)) if isinstance(entry, int) else entry for entry in path)


def test_a_checkpoint_with_positions_is_named_and_opens_by_them() -> None:
    folder = MemoryStorage()
    st.save(shards({"opt": chain(5)}, ONE, key=by_position)[0], folder)
    assert sorted(st.load_sharded_metadata(folder))[:2] == ["opt.1.0", "opt.1.1.b"]
    with pytest.raises(KeyMismatch, match=r"'opt.1.mu.w' is not stored, but 'opt.1.1.w' is"):
        st.load({"opt": chain()}, folder)
    with pytest.raises(KeyMismatch, match=r"opt\.1\.mu\.w"):
        st.load(shards({"opt": chain()}, ONE)[0], folder)
    target = shards({"opt": chain()}, ONE, key=by_position)[0]
    assert not st.diff(st.load(target, folder), {"opt": chain(5)})
    renamed = MemoryStorage()
    names = dict(zip(sorted(st.load_sharded_metadata(folder)), KEYS, strict=True))
    st.convert(folder, renamed, backend="safetensors", transform=st.bind(st.rename, names))
    assert not st.diff(st.load({"opt": chain()}, renamed), {"opt": chain(5)})
