"""What is saved beside tensors: the common state, its comparison between ranks, records, pickles, async requests."""

from __future__ import annotations

import enum
from collections import OrderedDict, namedtuple
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from hypothesis import given

import shardtree as st
from shardtree.errors import (
    IntegrityError,
    RemoteError,
    StrategyError,
    UnsafeFile,
)
from shardtree.shell.checkpoint.saving import _start
from shardtree.storage import MemoryStorage
from shardtree.testing import common_states, outline
from tests.shell.checkpoint.parts import saved_by


def shard(rank=0, ranks=1, key="w"):
    return st.ShardedTensor.from_rank_offsets(key, torch.full((2,), rank), (0, rank, ranks))


@pytest.mark.slow
@given(common_states())
def test_the_common_state_comes_back_as_it_was(state):
    folder = saved_by([{"state": state, "w": shard()}])
    assert outline(st.load({}, folder)) == outline({"state": state})
    assert outline(st.load_common_state_dict(folder)) == outline({"state": state})


def test_the_saved_tree_is_not_changed():
    held = [shard(), 1]
    tree = {"list": held, "dict": OrderedDict(a=None), "step": 3}
    saved_by([tree], content_metadata={"a": 1})
    assert list(tree) == ["list", "dict", "step"] and tree["list"] is held and len(held) == 2
    assert outline([held[1], tree["dict"], tree["step"]]) == outline([1, OrderedDict(a=None), 3])


# Comparison between ranks.


class Local(enum.Enum):
    """A class that nobody else can import."""

    ONE = 1


Local.__qualname__ = "unknown.Local"


class Opaque:
    def __init__(self, value):
        self.value = value


@pytest.mark.parametrize(
    ("one", "other", "path"),
    [
        ({"a": {"b": [1, 2]}}, {"a": {"b": [1, 3]}}, r"tree\['a'\]\['b'\]\[1\]"),
        ({"a": 1}, {"a": 1, "b": 2}, r"tree\['b'\]: rank 0 has nothing, rank 1 has 2"),
        ({"a": 1}, {"a": True}, r"tree\['a'\]"),
        ({"a": 0.0}, {"a": -0.0}, r"tree\['a'\]"),
        ({"a": torch.zeros(2)}, {"a": torch.ones(2)}, r"tree\['a'\]"),
        ({"a": (1,)}, {"a": [1]}, r"tree\['a'\]"),
        ({"mode": Local.ONE, "rank": 0}, {"mode": Local.ONE, "rank": 1}, r"differ\n +tree\['rank'\]"),
        ({"a": {1, 2}, "b": Opaque(0)}, {"a": {1, 2}, "b": Opaque(1)}, r"differ\n +tree\['b'\]"),
    ],
)
def test_ranks_that_differ_are_told_where(one, other, path):
    def on_rank(world):
        tree = [one, other][world.rank] | {"w": shard(world.rank, 2)}
        with pytest.raises(IntegrityError, match=path):
            st.save(tree, folder, world=world, options=st.SaveOptions(allow_pickle=True))
        return True

    folder = MemoryStorage()
    assert st.simulate(2, on_rank) == [True, True]
    assert not st.is_checkpoint(folder) and not folder.names()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"nan": float("nan")}, {"nan": float("nan")}),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ({"mine": st.LocalNonpersistentObject(1)}, {}),
        ({"t": torch.tensor([float("nan")])}, {"t": torch.tensor([float("nan")])}),
    ],
)
def test_what_does_not_count_is_no_difference(one, other):
    folder = saved_by([one | {"w": shard(0, 2)}, other | {"x": shard(1, 2)}])
    assert st.is_checkpoint(folder)


def test_without_validation_common_states_are_not_compared_and_rank_zeros_counts():
    folder = saved_by([{"step": rank, "w": shard(rank, 2)} for rank in range(2)], validate_access_integrity=False)
    assert st.load_common_state_dict(folder) == {"step": 0}


def test_preprocessing_that_changes_its_argument_does_not_change_what_is_saved():
    def pop_time(common):
        common.pop("time")
        common["nested"].clear()
        return common

    trees = [{"time": rank, "nested": {"lr": 0.1}, "w": shard(rank, 2)} for rank in range(2)]
    folder = saved_by(trees, preprocess_common_before_consistancy_check=pop_time)
    assert st.load_common_state_dict(folder) == {"time": 0, "nested": {"lr": 0.1}}
    assert trees[1]["nested"] == {"lr": 0.1}


# Content metadata.


@pytest.mark.parametrize("content", [{"optimizer": "adam", "betas": (0.9, 0.99)}, {}])
def test_content_metadata_is_beside_the_state(content):
    folder = saved_by([{"w": shard(), "step": 1}], content_metadata=content)
    assert st.load_content_metadata(folder) == content
    loaded = st.load({}, folder)
    assert st.load_content_metadata(preloaded_state_dict=loaded) == content
    assert loaded == {"step": 1, "content_metadata": content}


def test_without_content_metadata_there_is_none():
    assert st.load_content_metadata(saved_by([{"step": 1}])) is None
    assert st.load_content_metadata(saved_by([[shard(), 1]])) is None


def test_content_metadata_takes_what_the_common_state_takes():
    folder = saved_by([{"w": shard(), "z": Opaque}], allow_pickle=True, content_metadata={"o": Pair(1, 2)})
    with pytest.raises(UnsafeFile):
        st.load_content_metadata(folder)
    options = st.LoadOptions(allow_pickle=True)
    assert st.load_content_metadata(folder, options=replace(options, types=(Pair,))) == {"o": Pair(1, 2)}
    strategies = st.default_strategies
    found = st.load_content_metadata(folder, options=options, strategies=strategies)
    assert isinstance(found["o"], st.trees.Record)


# Records and pickles.


class Colour(enum.Enum):
    RED = 1


@dataclass
class Config:
    lr: float
    colour: Colour


Pair = namedtuple("Pair", "left right")
STATE = {"config": Config(0.1, Colour.RED), "pair": Pair(1, [2])}


def test_classes_come_back_as_records_or_as_the_classes_that_are_given():
    folder = saved_by([STATE | {"o": st.ShardedObject("o", Colour.RED, (1,), (0,))}])
    target = {"o": st.ShardedObject("o", None, (1,), (0,))}
    plain = st.load(target, folder)
    assert type(plain["config"]) is st.trees.Record and plain["config"].fields["lr"] == 0.1
    assert type(plain["o"]) is st.trees.Record and plain["o"].type_name.endswith("Colour")
    types = (Config, Colour, Pair)
    typed = st.load(target, folder, options=st.LoadOptions(types=types))
    assert typed == STATE | {"o": Colour.RED}
    assert st.load_common_state_dict(folder, options=st.LoadOptions(types=types)) == STATE
    opened = st.open_checkpoint(folder, options=st.LoadOptions(types=types))
    assert opened.common() == STATE and opened["o/shard_0_1"].data is Colour.RED


# Integrity of shards and objects.


def test_a_checkpoint_may_be_saved_onto_itself():
    folder = saved_by([{"w": shard(), "step": 1}])
    opened = st.open_checkpoint(folder)
    st.save({key: opened[key] for key in opened} | opened.common(), folder, overwrite=True)
    assert st.load_plain_tensors(folder)["w"].tolist() == [0, 0] and st.load_common_state_dict(folder) == {"step": 1}


def test_ranks_that_contradict_each_other_are_noticed_without_validation_too():
    trees = [
        {"w": st.ShardedTensor.from_rank_offsets("w", torch.zeros(2, dtype=dtype), (0, rank, 2))}
        for rank, dtype in enumerate((torch.int8, torch.int16))
    ]
    with pytest.raises(IntegrityError, match="agree"):
        saved_by(trees, validate_access_integrity=False)


# Async requests.


@pytest.mark.parametrize("replaces", [False, True])
def test_an_interrupt_right_after_the_folder_is_made_leaves_none(monkeypatch, replaces):
    folder = MemoryStorage()
    if replaces:
        st.save({"w": shard()}, folder, ("dcp", 1))
    before = folder.names()
    name = "make_sibling" if replaces else "make_save_folder"
    make = getattr(_start, name)

    def interrupted(*arguments, **options):
        make(*arguments, **options)
        assert folder.siblings() if replaces else folder.names()
        raise KeyboardInterrupt

    monkeypatch.setattr(_start, name, interrupted)
    with pytest.raises(KeyboardInterrupt):
        st.save({"w": shard()}, folder, overwrite=replaces)
    assert folder.names() == before and not folder.siblings()


def failing_to_clean_up(folder, finalizers, world):
    def fail():
        raise ZeroDivisionError

    request = st.save({"w": shard(world.rank, 2)}, folder, async_sharded_save=True, world=world)
    request = replace(request, clean_up=fail if world.rank == 0 else request.clean_up, finalize_fns=finalizers)
    try:
        request.execute_sync()
    except (ZeroDivisionError, RemoteError) as error:
        return type(error)
    return None


def test_a_rank_that_fails_to_clean_up_leaves_the_others_be_unless_they_wait_for_its_finalizers():
    for finalizers, raised in (((), [ZeroDivisionError, None]), ((lambda: None,), [RemoteError, RemoteError])):
        folder = MemoryStorage()
        assert st.simulate(2, partial(failing_to_clean_up, folder, finalizers), timeout=20.0) == raised
        assert st.load_plain_tensors(folder)["w"].tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize("remote", [False, True])
def test_what_does_not_fit_together_leaves_nothing(remote, tmp_path):
    fsspec = pytest.importorskip("fsspec")
    folder = f"memory://{tmp_path.name}/step" if remote else tmp_path / "step"

    def on_rank(world):
        with pytest.raises(IntegrityError):
            st.save({"w": shard(world.rank, 4)}, folder, world=world)  # of the four, two are missing

    st.simulate(2, on_rank)
    assert list(tmp_path.iterdir()) == []
    assert fsspec.filesystem("memory").find(f"/{tmp_path.name}") == []


def test_an_index_that_returns_no_fields_is_refused():
    def save_nothing(pending, shards):
        return st.AsyncRequest(pending.world, lambda: None, lambda written: None)

    folder = MemoryStorage()
    with pytest.raises(StrategyError, match=r"result of an index[\s\S]*found NoneType"):
        st.save({"w": shard()}, folder, save_nothing)
    assert not st.is_checkpoint(folder)


def test_a_format_without_a_clean_up_keeps_no_note_of_the_owner():
    def save_nothing(pending, shards):
        return st.AsyncRequest(pending.world, lambda: None, lambda written: {"folder": pending.save_id})

    folder = MemoryStorage()
    st.save({"step": 1}, folder, save_nothing)
    assert st.is_checkpoint(folder)
    assert not any(name.endswith("owner.json") for name in folder.all_names())
