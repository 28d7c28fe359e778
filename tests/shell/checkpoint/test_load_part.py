"""A target that names a part of a checkpoint gets that part, whatever the rest is made of."""

from __future__ import annotations

from collections import namedtuple
from typing import Any, NamedTuple

import pytest
import torch

import shardtree as st
from shardtree.errors import KeyMismatch, TreeError
from shardtree.storage import MemoryStorage
from shardtree.trees import Record
from tests.shell.checkpoint.parts import FORMATS, saved


class ScaleByAdam(NamedTuple):
    """An optimizer's state in optax's form."""

    count: Any
    mu: Any
    nu: Any


def shard(key: str, value: float = 1.0) -> st.ShardedTensor:
    return st.ShardedTensor.from_rank_offsets(key, torch.full((2,), value))


def state() -> dict[str, Any]:
    optimizer = (ScaleByAdam(3, {"w": shard("mu.w")}, {"w": shard("nu.w")}), {"scale": [shard("scale"), 0.5]})
    return {"model": {"w": shard("w")}, "optimizer": optimizer, "mixed": [shard("mixed.0"), 3], "step": 7}


MODEL = {"model": {"w": shard("w", 0.0)}}
LEFT_OUT = ["['optimizer'][0]", "['optimizer'][1]['scale'][1]", "['mixed'][1]"]


def stored(backend: tuple[str, int] = ("safetensors", 1)) -> MemoryStorage:
    return saved(state(), backend)


def in_order(paths: tuple[str, ...]) -> bool:
    """Return whether these are the paths of what goes with the shards, fields of the namedtuple by name or position."""
    return [path.split("[0]['count']")[0].split("[0][0]")[0] for path in paths] == ["tree['optimizer']", *(
        "tree" + path for path in LEFT_OUT[1:]
    )]  # fmt: skip


@pytest.mark.parametrize("backend", FORMATS, ids=str)
def test_the_model_loads_without_the_optimizer(backend: tuple[str, int]) -> None:
    reports: list[Any] = []
    # Without the class, common.pt's pickle is refused as a whole.
    types = () if backend[0] in ("safetensors", "zarr") else (ScaleByAdam,)
    loaded = st.load(MODEL, stored(backend), options=st.LoadOptions(types=types, report=reports.append))
    assert loaded == {"model": {"w": loaded["model"]["w"]}, "step": 7} and loaded["model"]["w"].tolist() == [1, 1]
    assert in_order(reports[0].left_out)


def test_what_goes_is_said_and_can_be_an_error() -> None:
    folder = stored()
    explained = st.explain(MODEL, folder)
    assert explained.ok and in_order(explained.left_out)
    keys = {key: shard(key) for key in ("w", "mu.w", "nu.w", "scale", "mixed.0")}
    with pytest.raises(KeyMismatch, match=r"left out.*\n.*tree\['optimizer'\]\[0\]\['count'\]"):
        st.load({"all": keys}, folder, strict="raise_all")
    tree, missing, unexpected = st.load(MODEL, folder, strict="return_all")
    assert missing == {"mu.w", "nu.w", "scale", "mixed.0"} and not unexpected and "optimizer" not in tree


def test_a_place_that_is_named_in_part_is_an_error() -> None:
    part = {"optimizer": (ScaleByAdam(0, {"w": shard("mu.w")}, None), None)}
    with pytest.raises(TreeError, match=r"tree\['optimizer'\]\[0\]\[2\]"):
        st.load(part, stored())


def test_trainers_give_engines_a_model_without_the_optimizer() -> None:
    engine = {"model": {"w": shard("w", 0.0)}}
    assert st.unbox(st.reshard([state()], [engine])[0])["model"]["w"].tolist() == [1, 1]
    moved = st.simulate(
        2, lambda world: st.redistribute(*((None, engine) if world.rank else (state(), None)), world=world)
    )
    assert moved[0] is None and moved[1]["model"]["w"].data.tolist() == [1, 1]
    assert moved[1].keys() == {"model", "step"}


# What is left of a namedtuple whose class the target has, with other fields or under another identity.


def test_a_namedtuple_class_that_got_other_fields_leaves_its_records_as_they_are() -> None:
    Later = namedtuple("ScaleByAdam", "count mu nu decay", module=__name__)  # type: ignore[name-match]
    target = Later(shard("w"), *(st.LocalNonpersistentObject(number) for number in range(3)))
    loaded = st.load({"all": target}, saved({"config": ScaleByAdam(1, 2, 3), "w": shard("w")}))
    assert isinstance(loaded["config"], Record) and type(loaded["all"]) is Later


def test_the_caller_s_class_counts_before_one_of_that_name_in_the_target() -> None:
    Other = namedtuple("ScaleByAdam", "count mu nu", module=__name__)  # type: ignore[name-match]
    target = Other(shard("w"), *(st.LocalNonpersistentObject(number) for number in range(2)))
    folder = saved({"config": ScaleByAdam(1, 2, 3), "w": shard("w")})
    loaded = st.load({"o": target}, folder, options=st.LoadOptions(types=(ScaleByAdam,)))
    assert type(loaded["config"]) is ScaleByAdam and type(loaded["o"]) is Other
