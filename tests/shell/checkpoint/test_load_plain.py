"""Plain tensors in a load's target: each asks for the whole stored tensor of its path's key, or is named."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import shardtree as st
from shardtree.errors import KeyMismatch
from shardtree.interop.dtensor import from_dtensors, to_dtensors
from shardtree.storage import ReadReport
from tests.options import load_keywords
from tests.shell.checkpoint.parts import saved, whole

W, STEP = torch.arange(12.0).view(3, 4), torch.tensor(7.0)


def load(target: Any, folder: Any, **options: Any) -> tuple[Any, ReadReport]:
    reports: list[ReadReport] = []
    loaded = st.load(target, folder, **load_keywords(report=reports.append, **options))
    explained = st.explain(target, folder, **load_keywords(**options))
    assert explained.ok and explained.unfilled == reports[0].unfilled
    return loaded, reports[0]


def test_what_dcp_saved_comes_back_whole_and_through_dtensors(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4)).state_dict()
    state = {"model": model, "optim": {name: {"step": torch.tensor(5.0)} for name in model}}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        dcp.save(state, checkpoint_id=tmp_path)
    finally:
        dist.destroy_process_group()
    empty = st.map_shards(torch.zeros_like, state)
    loaded, _ = load(empty, tmp_path, strict="raise_all")
    assert not st.diff(loaded, state)
    like = st.map_shards(torch.zeros_like, state)
    through = to_dtensors(st.load(from_dtensors(like), tmp_path), like=like)
    assert not st.diff(through, state)


@pytest.mark.parametrize(("asked", "kept"), [((), (1,)), ((1,), ()), ((1, 1), (1,))])
@pytest.mark.parametrize("donate", [False, True])
def test_one_element_fills_one_element_of_any_shape(asked: Any, kept: Any, donate: bool) -> None:
    given = torch.zeros(asked)
    loaded = st.load({"step": given}, saved({"step": whole("step", STEP.reshape(kept))}), donate=donate)["step"]
    assert loaded.shape == torch.Size(asked) and loaded.item() == 7 and given.item() == (7 if donate else 0)


# What isn't stored under the path's key.


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        ({"model": {"w": whole("decoder.w", W)}}, "'model.w' is not stored, but a shard .* perhaps as 'decoder.w'"),
        ({"model": {"w": whole("decoder.w", W), "n": 1}}, ".*but a shard or object was saved there"),
        ({"w": whole("w", W)}, "'model.w' is not stored, but 'w' is"),
        ({"model": {"w": st.ShardedObject("o", 1, (1,), (0,))}}, ".*but a shard or object was saved there"),
    ],
)
@pytest.mark.parametrize("strict", ["assume_ok_unexpected", "raise_unexpected"])
def test_a_tensor_that_is_stored_under_another_key_is_an_error(tree: Any, said: str, strict: str) -> None:
    folder, target = saved(tree), {"model": {"w": torch.zeros(3, 4)}}
    with pytest.raises(KeyMismatch, match=rf"(?s)other keys.*tree\['model'\]\['w'\]: {said}"):
        st.load(target, folder, strict=strict)
    assert st.explain(target, folder, strict=strict).ok is False
    _, report = load(target, folder, strict="log_unexpected")
    assert report.unfilled == ("tree['model']['w']",)


@pytest.mark.parametrize("value", [{W}, SimpleNamespace(inner=[W])], ids=lambda value: type(value).__name__)
def test_a_value_that_holds_tensors_and_is_not_entered_is_named(value: Any) -> None:
    folder = saved({"w": whole("w", W), "n": 1})
    assert load({"w": W, "x": value}, folder)[1].unfilled == ("tree['x']",)
    local = st.LocalNonpersistentObject(value)
    assert load({"w": W, "x": local}, folder)[0]["x"] is value


@pytest.mark.parametrize("stands_there", [{}, [], {"lr": 1}])
def test_a_container_in_place_of_a_tensor_is_named(stands_there: Any) -> None:
    folder = saved({"w": stands_there, "step": 1})
    loaded, report = load({"w": torch.zeros(2)}, folder)
    assert loaded["w"] == stands_there and report.unfilled == ("tree['w']",)
    with pytest.raises(KeyMismatch, match=r"tree\['w'\]"):
        st.load({"w": torch.zeros(2)}, folder, strict="raise_all")


# Several ranks.


def test_one_warning_names_what_any_rank_lacks(caplog: pytest.LogCaptureFixture) -> None:
    folder = saved({"w": whole("w", W)})
    with caplog.at_level(logging.WARNING, "shardtree"):
        st.simulate(2, lambda world: st.load({"w": torch.zeros(3, 4), f"x{world.rank}": STEP}, folder, world=world))
    assert [record.getMessage().count("tree['x") for record in caplog.records] == [2]


@pytest.mark.parametrize("exchange", ["always", "never"])
def test_each_rank_gets_the_whole_tensor_which_is_read_once_where_ranks_exchange(exchange: Any) -> None:
    folder = saved({"w": whole("w", W), "cut": whole("cut", W)})
    reports: list[ReadReport] = []

    def one(world: Any) -> Any:
        # A rank that has none of its own takes part too.
        plain = {"w": torch.zeros(3, 4)} if world.rank < 3 else {}
        target = plain | {"cut": whole("cut", torch.zeros(3, 1), (1, world.rank, 4))}
        options = st.LoadOptions(exchange=exchange, report=reports.append, verify=None)
        return st.load(target, folder, world=world, options=options)

    loaded = st.simulate(4, one)
    assert all(torch.equal(each["w"], W) for each in loaded[:3]) and "w" not in loaded[3]
    assert torch.equal(torch.cat([each["cut"] for each in loaded], 1), W)
    if exchange == "always":
        assert sum(report.bytes_read for report in reports) == 2 * W.nbytes
    targets = [{"w": torch.zeros(3, 4)}] * 3
    how = st.LoadOptions(exchange=exchange, verify=None)
    explained = st.explain_ranks(targets, folder, options=how)
    assert explained.ok and explained.cost is not None
    assert explained.cost.bytes_read == (1 if exchange == "always" else 3) * W.nbytes
