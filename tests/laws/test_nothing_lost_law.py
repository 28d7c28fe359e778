"""Nothing that holds a tensor is lost in silence: what is saved comes back as what it was, or the call raises."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import make_dataclass
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

import shardtree as st
from shardtree.errors import CheckpointingException, UnsupportedValue, render_path
from shardtree.mapping import ShardedBase
from shardtree.storage import MemoryStorage
from shardtree.trees import flatten_with_paths, map_shards, without_data
from tests.core.trees.samples import assert_caught, at
from tests.laws.leaf_kinds import FINAL, KINDS, PICKLED, REFUSED, STORED, SUBCLASSES, Unregistered, dtensor, values_in
from tests.shell.checkpoint.parts import FORMATS

Places = list[tuple[tuple[Any, ...], str]]
"""Where a leaf stands, and of what kind it is."""
Save = Callable[[Any, MemoryStorage], None]
Load = Callable[[Any, MemoryStorage], Any]

CONTAINERS: list[tuple[Callable[[Any], Any], tuple[Any, ...]]] = [
    (lambda leaf: leaf, ()),
    (lambda leaf: {"x": leaf, "step": 1}, ("x",)),
    (lambda leaf: [0.5, leaf], (1,)),
    (lambda leaf: ({"x": [leaf]}, None), (0, "x", 0)),
]


def tree_of(kinds: list[str], wraps: list[int]) -> tuple[dict[str, Any], Places]:
    """Return a tree with a leaf of each kind, in containers, and where they are."""
    tree: dict[str, Any] = {"step": 7}
    places: Places = []
    for number, (kind, wrap) in enumerate(zip(kinds, wraps, strict=True)):
        hold, path = CONTAINERS[wrap]
        tree[f"leaf{number}"] = hold(KINDS[kind](f"key{number}", torch.arange(4.0) + 10 * number))
        places.append(((f"leaf{number}", *path), kind))
    return tree, places


def load_pickled(target: Any, folder: MemoryStorage) -> Any:
    return st.load(target, folder, options=st.LoadOptions(allow_pickle=True))


def nothing_is_lost(save: Save, kinds_and_wraps: list[tuple[str, int]], load: Load = load_pickled) -> None:
    """A save stores every tensor of a tree, which a load gives back as what it was, or it names all that it refuses."""
    tree, places = tree_of([kind for kind, _ in kinds_and_wraps], [wrap for _, wrap in kinds_and_wraps])
    folder = MemoryStorage()
    try:
        save(tree, folder)
    except CheckpointingException as error:
        # A format that stores each value for itself says in a note whose path it is.
        text = "\n".join([str(error), *getattr(error, "__notes__", [])])
        assert any(render_path(path[:1], "") in text for path, kind in places if kind not in STORED), text
        return
    # The target has the tree's structure and none of its elements.
    pairs, rebuild = flatten_with_paths(without_data(tree))
    target = rebuild([torch.zeros_like(leaf) if isinstance(leaf, torch.Tensor) else leaf for _, leaf in pairs])
    loaded = load(target, folder)
    for path, kind in places:
        assert values_in(at(loaded, path)) == values_in(at(tree, path)), (kind, path)


def plain(backend: tuple[str, int], tree: Any, folder: MemoryStorage) -> None:
    st.save(tree, folder, backend)


def pickled(backend: tuple[str, int], tree: Any, folder: MemoryStorage) -> None:
    st.save(tree, folder, backend, options=st.SaveOptions(allow_pickle=True))


LEAVES = some.lists(some.tuples(some.sampled_from(sorted(KINDS)), some.integers(0, 3)), min_size=1, max_size=4)


@given(LEAVES, some.sampled_from(FORMATS), some.booleans())
def test_what_is_saved_comes_back_as_what_it_was_or_is_named(
    leaves: list[tuple[str, int]], backend: tuple[str, int], pickles: bool
) -> None:
    nothing_is_lost(partial(pickled if pickles else plain, backend), leaves)


@pytest.mark.parametrize("backend", FORMATS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_is_stored_whole_or_refused_by_its_path(kind: str, backend: tuple[str, int]) -> None:
    for wrap in range(len(CONTAINERS)):
        nothing_is_lost(partial(plain, backend), [(kind, wrap)])


@pytest.mark.parametrize("kind", KINDS)
def test_the_list_says_which_kinds_are_refused(kind: str) -> None:
    tree, _ = tree_of([kind], [1])
    for save, refused in ((plain, {**REFUSED, **PICKLED}), (pickled, REFUSED)):
        if kind in refused:
            with pytest.raises(CheckpointingException):
                save(FORMATS[0], tree, MemoryStorage())
        else:
            save(FORMATS[0], tree, MemoryStorage())


USES: dict[str, Callable[[Any], Any]] = {
    "load": lambda tree: st.load(tree, saved({"step": 7})),
    "explain": lambda tree: explained(st.explain(tree, saved({"step": 7}))),
    "redistribute from": lambda tree: st.redistribute(tree, {}),
    "redistribute to": lambda tree: st.redistribute({}, tree),
    "fingerprint": st.fingerprint,
    "shard": lambda tree: st.shard(tree, st.Mesh(tp=2), st.PartitionSpec()),
    "unshard": lambda tree: st.layouts.unshard([tree]),
}
KEEP_CLASSES = ("load", "explain", "redistribute from", "redistribute to")


@pytest.mark.parametrize(
    ("kind", "use"), [(kind, use) for kind in REFUSED for use in USES if kind not in SUBCLASSES or use in KEEP_CLASSES]
)
def test_what_a_save_refuses_is_refused_by_all_that_take_trees(kind: str, use: str) -> None:
    tree, _ = tree_of([kind], [1])
    with pytest.raises(CheckpointingException, match=r"tree\['leaf0'\]\['x'\]"):
        USES[use](tree)


def explained(explanation: Any) -> None:
    """Raise what an explanation says that a load would raise."""
    assert explanation.ok is False
    raise CheckpointingException(str(explanation))


def saved(tree: Any) -> MemoryStorage:
    folder = MemoryStorage()
    st.save(tree, folder)
    return folder


def derived(base: type) -> type:
    class Mine(base):  # type: ignore[misc]
        """A leaf with a method."""

    return Mine


DEFINITIONS: dict[str, Callable[[type], Any]] = {
    "a class": derived,
    "one with a tensor of its own": lambda base: make_dataclass(
        "Mine", [("scale", torch.Tensor)], bases=(base,), frozen=True, eq=False
    ),
    "one with another base before it": lambda base: type("Mine", (Mixin, base), {"__slots__": ()}),
}


class Mixin:
    """Something that leaves may be given."""

    __slots__ = ()


@pytest.mark.parametrize("name", FINAL)
@pytest.mark.parametrize("define", DEFINITIONS)
def test_no_class_derives_from_a_leaf_s(name: str, define: str) -> None:
    """So that no leaf is stored without what its class adds, or left out as of a kind that nothing knows."""
    with pytest.raises(UnsupportedValue, match=rf"cannot be subclassed\n  found class \S*Mine\(.*{name}\)\n"):
        DEFINITIONS[define](FINAL[name])


def test_the_law_of_final_classes_catches_one_that_lets_others_derive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(ShardedBase, "__init_subclass__")
    with pytest.raises(pytest.fail.Exception):
        test_no_class_derives_from_a_leaf_s("ShardedObject", "a class")


def test_the_classes_of_leaves_are_no_others() -> None:
    shards = {kind.__name__ for kind in ShardedBase.__subclasses__() if kind.__module__.startswith("shardtree.")}
    assert shards | {"ShardedBase", "LocalNonpersistentObject", "Record"} == set(FINAL)
    made = {type(KINDS[kind]("key", torch.arange(4.0))) for kind in ("shard", "factory", "object")}
    assert made <= set(FINAL.values())


FAULTS: dict[str, Callable[[Any], Any]] = {
    "DTensors stored as the part that a rank has": lambda leaf: (
        leaf.to_local()[:2] if type(leaf) is type(dtensor(torch.ones(1))) else leaf
    ),
    "dataclasses stored by their fields": lambda leaf: vars(leaf) if type(leaf) is Unregistered else leaf,
    "tensors in sets left out": lambda leaf: set() if isinstance(leaf, set) else leaf,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_law_of_what_is_saved_catches(fault: str) -> None:
    def save(tree: Any, folder: MemoryStorage) -> None:
        st.save(map_shards(FAULTS[fault], tree), folder)

    assert_caught(nothing_is_lost, save, LEAVES)


def test_the_law_catches_a_load_that_gives_back_the_target_s_own_tensors() -> None:
    def load(target: Any, folder: MemoryStorage) -> Any:
        pairs, rebuild = flatten_with_paths(target)
        loaded = dict(flatten_with_paths(load_pickled(target, folder))[0])
        own = [leaf if isinstance(leaf, torch.Tensor) else loaded.get(path, leaf) for path, leaf in pairs]
        return rebuild(own)

    with pytest.raises(AssertionError):
        nothing_is_lost(partial(plain, FORMATS[0]), [("tensor", 0)], load)


@pytest.mark.peers
def test_megatron_s_own_leaves_are_told_as_those_that_look_like_them() -> None:
    mapping: Any = pytest.importorskip("megatron.core.dist_checkpointing.mapping")
    shard = mapping.ShardedTensor.from_rank_offsets("theirs", torch.ones(2))
    leaves = [shard, mapping.ShardedObject("o", [1], (1,), (0,)), mapping.LocalNonpersistentObject(torch.ones(2))]
    uses: list[Callable[[Any], Any]] = [
        lambda tree: st.save(tree, MemoryStorage()),
        lambda tree: st.load(tree, saved({"step": 7})),
        lambda tree: explained(st.explain(tree, saved({"step": 7}))),
        lambda tree: st.redistribute(tree, {}),
        st.fingerprint,
    ]
    for leaf in leaves:
        for use in uses:
            with pytest.raises(CheckpointingException, match=r"from_megatron"):
                use({"x": leaf})


def test_the_error_says_how_to_register_a_class() -> None:
    with pytest.raises(CheckpointingException, match=r"tree\['config'\]: Layer\n(.|\n)*register_pytree_node"):
        st.save({"config": KINDS["equinox-like module"]("", torch.ones(1))}, MemoryStorage())
    folder = saved({"config": Unregistered(0.1)})
    assert st.load({}, folder)["config"].fields == {"w": 0.1}
