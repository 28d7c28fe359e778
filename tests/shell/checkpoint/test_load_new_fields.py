"""Classes, tuples and lists that have changed since a save: what is not stored stays as it is, and is named."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import fields, make_dataclass
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some

import shardtree as st
from shardtree.core.trees import _at_paths
from shardtree.errors import KeyMismatch, TreeError
from shardtree.storage import MemoryStorage
from shardtree.trees import register_dataclass
from tests.core.trees.samples import assert_caught
from tests.shell.checkpoint.parts import FORMATS

LENIENT = ["log_unexpected", "log_all", "return_unexpected", "return_all", "ignore_all"]


@cache
def kind(*names: str) -> Any:
    """Return a registered class with these fields: each subset of names is a version of one class."""
    return register_dataclass(make_dataclass("State", names))


def shard(key: str, number: float, *, has_data: bool = True) -> Any:
    leaf = st.ShardedTensor.from_rank_offsets(key, torch.full((2,), float(number)))
    return leaf if has_data else leaf.without_data()


def saved(tree: Any, backend: Any = ("safetensors", 1)) -> MemoryStorage:
    folder = MemoryStorage()
    st.save(tree, folder, backend)
    return folder


def load(target: Any, folder: Any, strict: str = "log_unexpected", **options: Any) -> tuple[Any, Any]:
    reports: list[Any] = []
    tree = st.load(target, folder, strict=strict, options=st.LoadOptions(report=reports.append), **options)
    return tree[0] if strict.startswith("return") else tree, reports[0]


@pytest.mark.parametrize("strict", LENIENT)
def test_a_new_field_stays_as_the_target_has_it(strict: str, caplog: pytest.LogCaptureFixture) -> None:
    folder = saved(kind("w", "lr")(shard("w", 1), 0.5))
    new = shard("new", 9)
    target = kind("w", "lr", "new", "decay")(shard("w", 0), 0.0, new, 7)
    with caplog.at_level(logging.WARNING):
        state, report = load(target, folder, strict)
    assert state.w.tolist() == [1, 1] and state.lr == 0.5 and state.new is new.data and state.decay == 7
    assert report.kept == st.explain(target, folder, strict=strict).kept == ("tree['new']", "tree['decay']")
    assert ("the target's own is kept" in caplog.text) == (strict != "ignore_all")
    assert new.data.tolist() == [9, 9] and "2 kept" in str(report)


@pytest.mark.parametrize("strict", ["assume_ok_unexpected", "raise_unexpected", "raise_all"])
def test_modes_that_leave_nothing_out_name_the_field(strict: str) -> None:
    folder = saved(kind("w", "lr")(shard("w", 1), 0.5))
    with pytest.raises(KeyMismatch, match="'new'"):
        load(kind("w", "lr", "new")(shard("w", 0), 0.0, shard("new", 9)), folder, strict)
    for value in (7, torch.ones(2)):
        with pytest.raises(TreeError, match=r"tree\['new'\](.|\n)*'log_unexpected'"):
            load(kind("w", "lr", "new")(shard("w", 0), 0.0, value), folder, strict)
    with pytest.raises((TreeError, KeyMismatch), match=r"'log_unexpected'|1 unexpected"):
        load(kind("w")(shard("w", 0)), folder, strict) and load(kind("w", "new")(shard("w", 0), shard("x", 1)), folder)


@pytest.mark.parametrize("strict", LENIENT)
@pytest.mark.parametrize(
    ("value", "place"),
    [
        (shard("new", 9, has_data=False), r"tree\['new'\]"),
        (st.ShardedTensor.from_rank_offsets("new", torch.empty(2, device="meta")), r"tree\['new'\]"),
        (st.ShardedObject("new", None, (1,), (0,)), r"tree\['new'\]"),
        ([shard("a", 1), shard("b", 1, has_data=False)], r"tree\['new'\]\[1\]"),
        (kind("w", "lr")(shard("a", 1, has_data=False), 3), r"tree\['new'\]\['w'\]"),
    ],
)
def test_what_has_no_data_is_an_error_that_names_it(value: Any, place: str, strict: str) -> None:
    folder = saved(kind("w", "lr")(shard("w", 1), 0.5))
    with pytest.raises(TreeError, match=f"cannot be completed: the target lacks values for some entries\n  {place}\n"):
        load(kind("w", "lr", "new")(shard("w", 0), 0.0, value), folder, strict)


class Two(NamedTuple):
    w: Any
    lr: Any


class Three(NamedTuple):
    w: Any
    lr: Any
    new: Any


State = kind("w", "lr")
CHANGES: dict[str, tuple[Any, Any, Any]] = {
    "a nested class": (
        State(shard("w", 1), 0.5),
        kind("w", "lr", "new")(shard("w", 0), 0, State(shard("x", 9), 3)),
        lambda tree: tree.new.w.tolist() == [9, 9] and tree.new.lr == 3,
    ),
    "a dict in a class has what is stored": (
        State({"a": shard("a", 1)}, 0.5),
        State({"a": shard("a", 0), "b": shard("b", 9)}, 0),
        lambda tree: [*tree.w] == ["a"] and tree.lr == 0.5,
    ),
    "a field removed": (
        kind("w", "lr", "new")(shard("w", 1), 0.5, {"a": shard("x", 1), "b": 2}),
        State(shard("w", 0), 0),
        lambda tree: tree.w.tolist() == [1, 1] and tree.lr == 0.5,
    ),
    "a list of shards that grew": (
        [shard("a", 1), shard("b", 2)],
        [shard(name, 9) for name in "cba"],
        lambda tree: [tensor[0].item() for tensor in tree] == [9, 2, 1],
    ),
    "a list of shards that shrank": (
        [shard("a", 1), shard("b", 2)],
        [shard("b", 9)],
        lambda tree: [tensor[0].item() for tensor in tree] == [2],
    ),
    "a list of states of shards that grew, and got a field": (
        [kind("w")(shard("a", 1)), kind("w")(shard("b", 2))],
        [State(shard(name, 9), 9) for name in "bca"],
        lambda tree: [state.w[0].item() for state in tree] == [2, 9, 1] and [state.lr for state in tree] == [9, 9, 9],
    ),
    "a list of plain values gives way to the stored one": (
        {"w": shard("w", 1), "list": [1, 2]},
        {"w": shard("w", 0), "list": [3]},
        lambda tree: tree["list"] == [1, 2],
    ),
    "a dict in a new field": (
        kind("w")(shard("w", 1)),
        kind("w", "new", "layers")(shard("w", 0), {"x": {"y": [1], "z": {}}, "w": shard("x", 9)}, (1, {"x": 2})),
        lambda tree: (
            tree.new["x"] == {"y": [1], "z": {}} and tree.new["w"].tolist() == [9, 9] and tree.layers == (1, {"x": 2})
        ),
    ),
    "a named tuple's new field": (
        {"o": Two(shard("w", 1), 0.5)},
        {"o": Three(shard("w", 0), 0, shard("x", 9))},
        lambda tree: isinstance(tree["o"], Three) and tree["o"].lr == 0.5 and tree["o"].new.tolist() == [9, 9],
    ),
    "a named tuple's removed field": (
        {"o": Three(shard("w", 1), 0.5, 3)},
        {"o": Two(shard("w", 0), 0)},
        lambda tree: isinstance(tree["o"], Two) and tree["o"].lr == 0.5,
    ),
    "a factory, an object, a local object": (
        kind("w")(shard("w", 1)),
        kind("w", "new", "lr", "decay")(
            shard("w", 0),
            st.lenses.as_factory(shard("x", 9), st.lenses.transposed(0)),
            st.ShardedObject("o", {"seed": 1}, (1,), (0,)),
            st.LocalNonpersistentObject([4]),
        ),
        lambda tree: tree.new.tolist() == [9, 9] and tree.lr == {"seed": 1} and tree.decay == [4],
    ),
    "a class of which a value alone is stored": (
        {"w": shard("w", 1), "s": kind("lr")(0.5)},
        {"w": shard("w", 0), "s": State(shard("x", 9), 0)},
        lambda tree: tree["s"].w.tolist() == [9, 9] and tree["s"].lr == 0.5,
    ),
    "a class of which nothing is stored is not in a dict": (
        {"w": shard("w", 1)},
        {"w": shard("w", 0), "s": kind("w")(shard("x", 9))},
        lambda tree: [*tree] == ["w"],
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_has_changed_is_joined_with_what_is_stored(name: str) -> None:
    before, target, is_right = CHANGES[name]
    for backend in [("safetensors", 1), ("dcp", 1), ("torch_dist", 1)][: 1 if "named" in name else 3]:
        folder = saved({"s": before}, backend)
        tree, report = load({"s": target}, folder)
        assert is_right(tree["s"]), f"{backend}: {tree}"
        explained = st.explain({"s": target}, folder, strict="log_unexpected")
        assert explained.ok and (explained.kept, explained.left_out) == (report.kept, report.left_out)


def test_stored_values_without_a_place_are_named() -> None:
    folder = saved([kind("w", "lr", "old")(shard("a", 1), 0.5, {"x": 3})])
    assert load([State(shard("a", 0), 0)], folder)[1].left_out == ("tree[0]['old']['x']",)


GROUPS = [{"w": shard("a", 1), "lr": 1}, {"w": shard("b", 2), "lr": 2}]


@pytest.mark.parametrize("strict", [*LENIENT, "assume_ok_unexpected"])
@pytest.mark.parametrize(
    ("before", "now"),
    [
        (GROUPS, [{"w": shard("b", 0), "lr": 9}]),
        (GROUPS, [{"w": shard(name, 0), "lr": 9} for name in ("b", "a", "a")]),
        (tuple(GROUPS), ({"w": shard("b", 0)},)),
        ([State(shard("a", 1), 1), State(shard("b", 2), 2)], [State(shard("b", 0), 9)]),
        ((shard("a", 1), 7), (shard("a", 0), 0, 9)),
        ([1, 2], [shard("a", 0)]),
    ],
)
def test_a_sequence_of_another_length_with_shards_beside_values_is_an_error(before: Any, now: Any, strict: str) -> None:
    folder = saved({"g": before} if before != [1, 2] else {"g": before, "w": shard("a", 1)})
    whole = (
        rf"target\['g'\] (.|\n)*length {len(now)}, expected \w+ of length {len(before)}\n  Give it the stored length"
    )
    with pytest.raises(TreeError, match=whole):
        load({"g": now}, folder, strict, validate_access_integrity=False)


@pytest.mark.parametrize("strict", LENIENT)
def test_an_entry_in_front_does_not_get_anothers_values(strict: str) -> None:
    with pytest.raises(TreeError, match="length 3, expected list of length 2"):
        load([{"w": shard(name, 9), "lr": 9} for name in ("new", "a", "b")], saved(GROUPS), strict)


@pytest.mark.parametrize(
    ("value", "paths"),
    [
        ({"x": 1}, ("['x']",)),
        ((1, {"x": 1}), ("[0]", "[1]['x']")),
        ({"x": {"y": [1, 2]}, "z": {}}, ("['x']['y'][0]", "['x']['y'][1]")),
        ({"x": shard("x", 9), "y": shard("y", 9, has_data=False)}, ("['x']",)),
        ([1, 2], ("[0]", "[1]")),
        (5, ("",)),
        ({}, ()),
    ],
)
def test_all_of_a_new_field_is_kept_and_named(value: Any, paths: tuple[str, ...]) -> None:
    target = kind("w", "new")(shard("w", 0), value)
    state, report = load(target, saved(kind("w")(shard("w", 1))))
    expected = {"x": value["x"].data} if paths == ("['x']",) and "y" in value else value
    assert state.w.tolist() == [1, 1] and state.new == expected
    assert report.kept == tuple(f"tree['new']{path}" for path in paths)


def test_a_dict_of_which_something_is_stored_lacks_the_rest() -> None:
    folder = saved(kind("w", "new")(shard("w", 1), {"x": 1, "list": []}))
    state, report = load(kind("w", "new")(shard("w", 0), {"x": 0, "y": 0, "list": []}), folder)
    assert state.new == {"x": 1, "list": []} and report.kept == ()


def test_naming_what_is_kept_looks_into_each_container_once(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[Any] = []
    stored_entries = _at_paths.stored_entries

    def counted(node: Any) -> Any:
        entered.append(node)
        return stored_entries(node)

    monkeypatch.setattr(_at_paths, "stored_entries", counted)
    target = {"w": shard("w", 0), "list": [*range(50)], "new": (shard("x", 9), *range(50))}
    load(target, saved({"w": shard("w", 1), "list": [*range(50)]}))
    assert 0 < len(entered) < 20


def test_ranks_that_lack_a_value_agree_and_rank_0_logs_once(caplog: pytest.LogCaptureFixture) -> None:
    folder = saved({"s": kind("w")(shard("w", 1))})

    def one(world: Any) -> Any:
        leaf = st.ShardedTensor.from_rank_offsets("w", torch.zeros(1), (0, world.rank, 2))
        new = st.ShardedTensor.from_rank_offsets("new", torch.full((1,), world.rank + 5.0), (0, world.rank, 2))
        return load({"s": kind("w", "new")(leaf, new)}, folder, world=world)[0]["s"].new.item()

    with caplog.at_level(logging.WARNING):
        assert st.simulate(2, one) == [5, 6]
    assert caplog.text.count("the target's own is kept") == 1


# The law: of each field of the target, what is stored, or else the target's own, which the report names.

NAMES = ("w", "lr", "inner", "new", "layers")
VALUES: dict[str, Callable[[int], Any]] = {
    "w": lambda number: shard("w", number),
    "lr": lambda number: number,
    "inner": lambda number: kind("w")(shard("inner", number)),
    "new": lambda number: (shard("new", number), number),
    "layers": lambda number: [shard(f"layers.{n}", number) for n in range(2)],
}


def numbers(value: Any) -> set[float]:
    """Return the numbers that a loaded field is made of."""
    if isinstance(value, torch.Tensor):
        return set(value.tolist())
    if isinstance(value, (list, tuple)):
        return set().union(*map(numbers, value))
    return {value} if isinstance(value, int) else numbers(value.w)


def stored_or_own(load: Any, before: Collection[str], now: Collection[str], backend: Any) -> None:
    folder = saved({"s": kind(*before)(*(VALUES[name](1) for name in before))}, backend)
    state, report = load({"s": kind(*now)(*(VALUES[name](2) for name in now))}, folder)
    if not {*before} & {*now}:
        assert not state.keys()  # nothing is loaded, and a dict can be without the class
        return
    assert [field.name for field in fields(state["s"])] == [*now]
    for name in now:
        assert numbers(getattr(state["s"], name)) == {1 if name in before else 2}, name
        assert any(path.startswith(f"tree['s']['{name}']") for path in report.kept) == (name not in before)


FIELDS = some.lists(some.sampled_from(NAMES), min_size=1, unique=True).map(tuple)


@settings(max_examples=40)
@given(FIELDS, FIELDS, some.sampled_from([*FORMATS]))
def test_each_field_has_what_is_stored_or_the_targets_own(before: Any, now: Any, backend: Any) -> None:
    stored_or_own(load, before, now, backend)


def test_the_law_catches_fields_that_are_kept_though_they_are_stored() -> None:
    def keeping(target: Any, folder: Any) -> Any:
        state, report = load(target, folder)
        return ({"s": st.unbox(target["s"])} if "s" in state else state), report

    assert_caught(stored_or_own, keeping, FIELDS, FIELDS, some.just(("safetensors", 1)))
