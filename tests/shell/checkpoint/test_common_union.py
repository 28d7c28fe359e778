"""save with SaveOptions(common="union"): common states of ranks that have keys of their own."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as hypothesis

import shardtree as st
from shardtree.errors import CorruptCheckpoint, IntegrityError, KeyMismatch, render_path
from shardtree.shell.checkpoint.loading import _omissions
from shardtree.shell.table import encode_metadata, read_metadata
from shardtree.storage import MemoryStorage
from shardtree.world import World
from tests.core.trees.samples import assert_caught
from tests.shell.checkpoint.test_collectives import CountingWorld

UNION = st.SaveOptions(common="union")
RANKS = 4  # two stages of two ranks


class Kind(enum.Enum):
    ADAM = 1


def tree(rank: int) -> dict[str, Any]:
    stage = rank // 2
    optim = {f"param_groups.layers.{stage}.w.lr": (stage + 1) / 10, f"state.layers.{stage}.w.step": torch.tensor(stage)}
    shard = st.ShardedTensor.from_rank_offsets(f"layers.{stage}.w", torch.full((2,), rank), (0, rank % 2, 2))
    return {"layers": {str(stage): {"w": shard}}, "optim": {"kind": Kind.ADAM, **optim}, "step": 7, "none": []}


def save_all(folder: Any, more: Any = lambda _: {}, **keywords: Any) -> list[int]:
    def on_rank(world: World) -> int:
        counting = CountingWorld(world)
        keywords_ = {"options": UNION, **keywords}
        st.save({**tree(world.rank), **more(world.rank)}, folder, world=counting, **keywords_)
        return counting.count

    return st.simulate(RANKS, on_rank)


EXPECTED = {
    "param_groups.layers.0.w.lr": 0.1,
    "state.layers.0.w.step": torch.tensor(0),
    "param_groups.layers.1.w.lr": 0.2,
    "state.layers.1.w.step": torch.tensor(1),
}


@pytest.mark.parametrize("backend", [("safetensors", 1), ("zarr", 3), ("torch_dist", 1)], ids=str)
def test_all_stages_keys_are_stored_and_each_rank_gets_its_own(backend: tuple[str, int]) -> None:
    folder = MemoryStorage()
    save_all(folder, sharded_strategy=backend, more=lambda _: {"optim": {**tree(_)["optim"], "kind": "adam"}})
    assert not st.diff(st.load_common_state_dict(folder)["optim"], {**EXPECTED, "kind": "adam"})

    def on_rank(world: World) -> None:
        target = tree(world.rank)
        own = st.load(target, folder, world=world)
        if backend[0] == "torch_dist":  # has no place that says what was united
            assert not st.diff(own["optim"], {**EXPECTED, "kind": "adam"}) and own["step"] == 7
            own = st.trees.restrict(own, target)
        assert own["step"] == 7 and not st.diff(own["optim"], {**target["optim"], "kind": "adam"})
        assert own["layers"][str(world.rank // 2)]["w"].tolist() == [world.rank] * 2

    st.simulate(RANKS, on_rank)


KEYS = hypothesis.sets(hypothesis.sampled_from("abcd"))
TWO_LOADS = hypothesis.tuples(KEYS, KEYS, hypothesis.lists(KEYS, min_size=1, max_size=3))
Load = Callable[..., Any]


def tree_of(keys: set[str]) -> dict[str, Any]:
    """Return a tree with keys at its root, and in a dict in it."""
    own = dict.fromkeys(sorted(keys), 0.1)
    return {**own, "lr": {**own, "max": 1}, "step": 3}


def nothing_united_vanishes(load: Load, keys: tuple[set[str], set[str], list[set[str]]]) -> None:
    """Each stored value is in the result of some rank, or listed as left out by all; ``raise_all`` raises for it.

    A result has what all ranks had, and what the target names of the rest, or all of it where it names none.
    """
    *saved, asked = keys
    folder, every = MemoryStorage(), saved[0] | saved[1]
    save_two([tree_of(each) for each in saved], folder)
    targets, reports = [tree_of(each) for each in asked], list[Any]()
    options = st.LoadOptions(report=reports.append)
    found = st.simulate(len(asked), lambda world: load(targets[world.rank], folder, world=world, options=options))
    lost = {render_path(path) for key in every for path in ((key,), ("lr", key))}
    for names, each in zip(asked, found, strict=True):
        named = names & (saved[0] ^ saved[1])
        expected = saved[0] & saved[1] | named if named else every
        assert each == tree_of(expected)
        lost -= {render_path(path) for key in expected for path in ((key,), ("lr", key))}
    assert all({*report.left_out} == lost for report in reports), (lost, reports)
    strict = {"strict": "raise_all", "validate_access_integrity": False}
    explained = st.explain_ranks(targets, folder, **strict)
    assert {*explained.left_out} == lost and explained.ok is not bool(lost)

    def raises(world: World) -> None:
        with pytest.raises(KeyMismatch, match="no rank's target has their keys") if lost else nullcontext():
            load(targets[world.rank], folder, world=world, **strict)

    st.simulate(len(asked), raises)


@pytest.mark.slow
@given(TWO_LOADS)
def test_what_no_rank_names_of_a_union_is_listed(keys: Any) -> None:
    nothing_united_vanishes(st.load, keys)


def test_the_law_of_unions_catches_ranks_that_list_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_omissions.Omissions, "unasked_paths", lambda self, bits: ())
    assert_caught(nothing_united_vanishes, st.load, TWO_LOADS)


def test_what_no_rank_names_of_a_union_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    folder = MemoryStorage()
    save_two([{"lr": {f"stage {rank}": torch.ones(2)}} for rank in range(2)], folder)
    st.simulate(2, lambda world: st.load({"lr": {"stage 0": 0}}, folder, world=world, strict="log_all"))
    assert [record.message for record in caplog.records if "stage 1" in record.message] == [
        "load: stored values that only some ranks had are left out: no rank's target has their keys\n"
        "  tree['lr']['stage 1']"
    ]


@pytest.mark.parametrize("forged", [3, [3], [["a", "b"]], [[["a"], ["b"], []]], [[[["a"]], []]], [[["a"], [None]]]])
def test_a_forged_note_of_what_was_united_is_refused(forged: Any) -> None:
    folder = MemoryStorage()
    save_all(folder)
    _, fields = read_metadata(folder)
    assert fields["united"] == [[["optim"], ["kind"]]]
    folder.replace("metadata.json", encode_metadata({**fields, "united": forged}), durable=False)
    with pytest.raises(CorruptCheckpoint, match=r"'united' in metadata\.json is invalid"):
        st.load({"step": 0}, folder)


def test_keys_that_metadata_cannot_name_leave_the_union_whole() -> None:
    folder = MemoryStorage()
    save_two([{"a": {(rank, 1): rank}} for rank in range(2)], folder)
    assert st.load({"a": {(0, 1): 0}}, folder) == {"a": {(0, 1): 0}}
    save_two([{"a": {(0, 0): 1, rank: rank}} for rank in range(2)], second := MemoryStorage())
    assert st.load({"a": {0: 0}}, second) == {"a": {(0, 0): 1, 0: 0, 1: 1}}


def test_it_is_stored_as_what_equal_states_are_stored_as() -> None:
    union, same = MemoryStorage(), MemoryStorage()
    save_all(union)
    optim = {"kind": Kind.ADAM, **EXPECTED}
    save_all(same, lambda _: {"optim": optim}, options=None)
    assert not st.diff(*(st.load_common_state_dict(folder) for folder in (union, same)))
    types = st.LoadOptions(types=(Kind,))
    assert st.load_common_state_dict(union, options=types)["optim"]["kind"] is Kind.ADAM
    assert st.load_common_state_dict(union)["none"] == []


def test_where_all_are_equal_it_takes_no_further_collective() -> None:
    alike = {"optim": EXPECTED}
    usual = save_all(MemoryStorage(), lambda _: alike, options=None)
    assert save_all(MemoryStorage(), lambda _: alike) == usual
    assert save_all(MemoryStorage()) == [count + 2 for count in usual]


def test_an_asynchronous_save_stores_the_union_as_it_was() -> None:
    folder = MemoryStorage()

    def on_rank(world: World) -> None:
        own = tree(world.rank)
        request = st.save(own, folder, world=world, options=UNION, async_sharded_save=True)
        own["optim"][f"state.layers.{world.rank // 2}.w.step"] += 5
        request.execute_sync()

    st.simulate(RANKS, on_rank)
    assert not st.diff({**st.load_common_state_dict(folder)["optim"], "kind": None}, {**EXPECTED, "kind": None})


def shard(key: str) -> st.ShardedTensor:
    return st.ShardedTensor.from_rank_offsets(key, torch.arange(2.0))


def save_two(trees: Sequence[Any], folder: MemoryStorage) -> None:
    st.simulate(2, lambda world: st.save(trees[world.rank], folder, world=world, options=UNION))


def test_shards_beside_values_and_dicts_of_shards_alone_are_no_conflict() -> None:
    folder = MemoryStorage()
    trees = [
        {"m": {"w": shard("w")}, "s": {"a": shard("a"), "b": {"c": shard("c")}}, "l": [shard("l"), 1]},
        {"m": {"lr": 1}, "s": {"lr": 2, "b": {"d": 3}}, "l": [st.LocalNonpersistentObject(4), 1]},
    ]
    save_two(trees, folder)
    loaded = st.simulate(2, lambda world: st.load(trees[world.rank], folder, world=world))
    values = torch.arange(2.0)
    assert not st.diff(loaded[0]["m"], {"lr": 1, "w": values}) and not st.diff(loaded[0]["l"], [values, 1])
    assert not st.diff(loaded[0]["s"], {"lr": 2, "b": {"c": values, "d": 3}, "a": values})
    assert loaded[1] == {"m": {"lr": 1}, "s": {"lr": 2, "b": {"d": 3}}, "l": [4, 1]}


class Moments(NamedTuple):
    mean: Any
    step: int


def test_equal_values_with_fields_that_hold_tensors_agree() -> None:
    folder = MemoryStorage()
    save_two([{"o": Moments(torch.tensor([1.0, float("nan")]), 1), f"own {rank}": rank} for rank in range(2)], folder)
    common = st.load_common_state_dict(folder, options=st.LoadOptions(types=(Moments,)))
    expected = {"o": Moments(torch.tensor([1.0, float("nan")]), 1), "own 0": 0, "own 1": 1}
    assert not st.diff(common, expected) and isinstance(common["o"], Moments)

    def other(rank: int) -> dict[str, Any]:
        return {"o": Moments(torch.tensor([float(rank)]), 1), f"own {rank}": rank}

    text = r"tree\['o'\]\['mean'\]: rank 0 has Tensor \(1,\) float32 \[0\.0\], rank 1 has Tensor .* \[1\.0\]"
    with pytest.raises(IntegrityError, match=text):
        save_two([other(0), other(1)], MemoryStorage())


SHAPES = hypothesis.dictionaries(
    hypothesis.sampled_from("ab"),
    hypothesis.recursive(
        hypothesis.sampled_from([1, 2, "shard", "local"]),
        lambda of: hypothesis.one_of(
            hypothesis.dictionaries(hypothesis.sampled_from("ab"), of, min_size=1),
            hypothesis.lists(of, min_size=1, max_size=2),
            of.map(lambda child: (child,)),
            of.map(lambda child: Moments(child, 1)),
        ),
        max_leaves=4,
    ),
    min_size=1,
)
Save = Callable[[Sequence[Any], MemoryStorage], None]


def loads_where_it_saves(save: Save, shapes: Sequence[Any]) -> None:
    """Each rank gets all that its tree had, or nothing is written."""

    def filled(rank: int, as_loaded: bool) -> Any:
        def leaf(path: Any, kind: Any) -> Any:
            if kind == "shard":
                return torch.arange(2.0) if as_loaded else shard(f"{rank} {path}")
            return kind if as_loaded or kind != "local" else st.LocalNonpersistentObject(kind)

        leaves, rebuild = st.trees.flatten_with_paths(shapes[rank])
        return rebuild([leaf(path, kind) for path, kind in leaves])

    folder, trees = MemoryStorage(), [filled(rank, False) for rank in range(2)]
    try:
        save(trees, folder)
    except IntegrityError:
        assert not folder.names()
        return
    for rank, loaded in enumerate(st.simulate(2, lambda world: st.load(trees[world.rank], folder, world=world))):
        lost = st.diff(filled(rank, True), loaded)
        assert not lost.only_left and not lost.mismatch


TWO_SHAPES = hypothesis.tuples(SHAPES, SHAPES)


@example(({"a": 1}, {"b": Moments({"a": 1, "b": "shard"}, 1)}))  # a record, of which a load leaves a hole out
@given(TWO_SHAPES)
def test_what_a_save_of_a_union_stores_every_rank_can_load(shapes: Sequence[Any]) -> None:
    loads_where_it_saves(save_two, shapes)


def test_the_law_of_loads_catches_a_union_in_which_shards_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardtree.shell.checkpoint.saving._parts.misfits", lambda union, shards: ())
    assert_caught(loads_where_it_saves, save_two, TWO_SHAPES)
