"""The containers of a load's target: namedtuples come back as themselves, and what can't be entered is refused."""

from __future__ import annotations

import argparse
import os
from collections import namedtuple
from typing import Any, NamedTuple

import pytest
import torch

import shardtree as st
from shardtree.errors import UnsafeFile
from shardtree.trees import Record
from tests.checkpoint.parts import saved


class Moment(NamedTuple):
    """An optimizer's state, as a node of a tree."""

    w: Any
    step: Any


def shard(value=0.0, key="w"):
    return st.ShardedTensor.from_rank_offsets(key, torch.full((2,), float(value)))


# Namedtuples.


def test_a_namedtuple_with_mixed_content_loads_into_its_own_target():
    folder = saved({"o": Moment(shard(1), 3)})
    loaded = st.load({"o": Moment(shard(), 0)}, folder)["o"]
    assert type(loaded) is Moment and loaded.w.tolist() == [1, 1] and loaded.step == 3


def test_a_namedtuple_that_a_factory_builds_is_merged():
    def build(key, data, replica_id, flattened_range):
        return Moment(st.ShardedTensor.from_rank_offsets(key, data), 5)

    def tree(value):
        return {"f": st.ShardedTensorFactory("f", torch.full((2,), value), build, lambda loaded: loaded)}

    loaded = st.load(tree(0.0), saved(tree(1.0)))["f"]
    assert type(loaded) is Moment and loaded.w.tolist() == [1, 1] and loaded.step == 5


def test_a_namedtuple_that_the_target_does_not_have_stays_a_record():
    folder = saved({"o": Moment(1, 2), "w": shard(1)})
    assert isinstance(st.load({"w": shard()}, folder)["o"], Record)
    assert st.load({"w": shard()}, folder, options=st.LoadOptions(types=(Moment,)))["o"] == Moment(1, 2)


def test_a_namedtuple_class_that_got_other_fields_leaves_its_records_as_they_are():
    Later = namedtuple("Moment", "w step decay", module=__name__)
    Later.__qualname__ = Moment.__qualname__
    folder = saved({"config": Moment(1, 2), "w": shard(1)})
    loaded = st.load({"all": Later(shard(), st.LocalNonpersistentObject(2), st.LocalNonpersistentObject(3))}, folder)
    assert isinstance(loaded["config"], Record) and type(loaded["all"]) is Later


def test_the_caller_s_class_counts_before_one_of_that_name_in_the_target():
    Other = namedtuple("Moment", "w step", module=__name__)
    folder = saved({"config": Moment(1, 2), "w": shard(1)})
    loaded = st.load(
        {"o": Other(shard(), st.LocalNonpersistentObject(2))}, folder, options=st.LoadOptions(types=(Moment,))
    )
    assert type(loaded["config"]) is Moment and type(loaded["o"]) is Other


# Trees without an end.


# Shards where trees don't look.


# What is read after the call.


def test_a_relative_path_is_that_of_when_the_checkpoint_was_opened(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    st.save({"w": shard(1)}, "ck")
    tree = st.open_checkpoint("ck")
    (tmp_path / "elsewhere").mkdir()
    os.chdir("elsewhere")
    assert tree["w"].data.read().tolist() == [1, 1]
    assert st.is_checkpoint(os.path.join("..", "ck"))


def test_content_metadata_takes_what_the_common_state_takes():
    folder = saved({"w": shard(1), "z": argparse.Namespace}, allow_pickle=True, content_metadata={"o": Moment(1, 2)})
    with pytest.raises(UnsafeFile):
        st.load_content_metadata(folder)
    assert st.load_content_metadata(folder, options=st.LoadOptions(allow_pickle=True, types=(Moment,))) == {
        "o": Moment(1, 2)
    }
    strategies = st.default_strategies
    assert isinstance(
        st.load_content_metadata(folder, options=st.LoadOptions(allow_pickle=True), strategies=strategies)["o"], Record
    )
