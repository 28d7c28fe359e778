"""torch.distributed.checkpoint's load and save over our checkpoints, beside its own on its own folders."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import SavePlan, WriteItemType
from torch.distributed.tensor import DTensor

import shardtree as st
from shardtree.errors import (
    AlreadyACheckpoint,
    MetadataError,
    NotACheckpoint,
    ShapeError,
    TreeError,
    UnsupportedValue,
    WorldError,
)
from shardtree.interop.dcp import CheckpointReader, CheckpointWriter
from tests.peers.test_dcp_strided import STRIDED

pytestmark = [
    pytest.mark.peers,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized"),
]

QUICK = st.SaveOptions(durable=False)
FIXTURES = Path(__file__).parents[1] / "fixtures"


def job(scale: int) -> dict[str, Any]:
    """Return a state with all that DCP flattens: nested dicts, lists of several kinds, views, parameters, scalars."""
    base = torch.arange(24.0).reshape(6, 4) * scale
    groups = [{"lr": 0.1 * scale, "params": ["w", "t"]}, {"lr": 0.2, "params": []}]
    return {
        "model": {
            "w": base,
            "t": base.clone().t(),
            "rows": base.clone()[1:5:2],
            "parameter": torch.nn.Parameter(torch.full((3, 2), 2.0 * scale)),
            "half": torch.full((5,), scale, dtype=torch.bfloat16),
            "scalar": torch.tensor(scale),
            "none of it": torch.zeros(0, 3),
        },
        "optim": {"state": {"w": {"step": torch.tensor(5.0 * scale)}}, "param_groups": groups},
        "mixed": [torch.ones(2) * scale, scale, torch.zeros(1), [scale]],
        "deep": [{"t": torch.ones(1) * scale, "n": scale}, scale],
        "plain": [1, (2, scale), {"a": scale}],
        "none": None,
    }


def save(state: Any, folder: Path | None, writer: CheckpointWriter | None = None, **options: Any) -> None:
    dcp.save(state, checkpoint_id=folder, storage_writer=writer, no_dist=True, **options)


def loaded(state: dict[str, Any], folder: Path, reader: CheckpointReader | None = None, **options: Any) -> Any:
    """Return the same state, after it was loaded."""
    dcp.load(state, checkpoint_id=folder, storage_reader=reader, no_dist=True, **options)
    return state


def cause(call: Callable[[], Any]) -> BaseException:
    """Return the first rank's error that a call of DCP fails with."""
    with pytest.raises(CheckpointException) as caught:
        call()
    error = next(iter(caught.value.failures.values()))[0]
    assert isinstance(error, BaseException)
    return error


def same(found: Any, expected: Any) -> bool:
    difference = st.diff(found, expected)
    return not (difference.only_left or difference.only_right or difference.mismatch)


# One process


@pytest.mark.parametrize("backend", [None, "dcp", "torch_dist", "zarr"])
def test_a_state_comes_back_as_from_dcps_own_folder(backend: str | None, tmp_path: Path) -> None:
    save(job(3), tmp_path / "ours", CheckpointWriter(backend=backend, options=QUICK))
    save(job(3), tmp_path / "theirs")
    state = job(0)
    memory = {name: tensor.data_ptr() for name, tensor in state["model"].items()}
    theirs = loaded(job(0), tmp_path / "theirs")
    assert same(loaded(state, tmp_path / "ours", CheckpointReader()), theirs)
    assert same(theirs, job(3))
    assert memory == {name: tensor.data_ptr() for name, tensor in state["model"].items()}
    assert same(loaded(job(0), tmp_path / "theirs", CheckpointReader()), theirs)
    assert st.verify(tmp_path / "ours") == ()
    assert not same(loaded(job(0), tmp_path / "ours", CheckpointReader()), job(2))  # the planted fault


def test_a_folder_converted_to_dcp_is_dcps(tmp_path: Path) -> None:
    save(job(3), tmp_path / "ours", CheckpointWriter(options=QUICK))
    st.convert(tmp_path / "ours", tmp_path / "theirs", backend="dcp", save_options=QUICK)
    assert same(loaded(job(0), tmp_path / "theirs"), job(3))


def test_plain_values_stand_where_they_stood_unless_a_list_loses_positions(tmp_path: Path) -> None:
    save(job(3), tmp_path, CheckpointWriter(options=QUICK))
    common = st.load_common_state_dict(tmp_path)
    assert common["optim"] == {"param_groups": job(3)["optim"]["param_groups"]}
    assert common["plain"] == [1, (2, 3), {"a": 3}]
    assert (common["mixed.1"], common["mixed.3"]) == (3, [3])
    assert {"model.w", "optim.state.w.step", "mixed.0"} <= set(st.load_tensors_metadata(tmp_path))


def test_our_own_saves_load_with_tensors_in_the_common_state_and_objects(tmp_path: Path) -> None:
    whole = st.ShardedTensor.from_rank_offsets("model.w", torch.arange(6.0).reshape(3, 2))
    random = [st.ShardedObject("rng", [rank, "s"], (2,), (rank,)) for rank in range(2)]
    extra = st.ShardedObject("extra", {"b": 1}, (1,), (0,))
    st.save({"w": whole, "rng": random, "extra": extra, "count": torch.arange(4), "n": {"lr": 0.5}}, tmp_path)
    state: dict[str, Any] = {
        "model": {"w": torch.zeros(3, 2)},
        "count": torch.zeros(4, dtype=torch.int64),
        "n": {"lr": 0.0},
    }
    asked = {**state, "extra": None, "rng/shard_1_2": None}
    found = loaded(asked, tmp_path, CheckpointReader())
    assert found["count"].data_ptr() == state["count"].data_ptr()
    assert same(found["model"], {"w": whole.data}) and same(found["count"], torch.arange(4))
    assert (found["n"], found["extra"], found["rng/shard_1_2"]) == ({"lr": 0.5}, {"b": 1}, [1, "s"])


def test_a_hugging_face_folder_loads_under_other_names_and_in_another_dtype(tmp_path: Path) -> None:
    weights = {"embed.weight": torch.randn(8, 4, dtype=torch.bfloat16), "norm": torch.ones(4, dtype=torch.bfloat16)}
    st.save({key: st.ShardedTensor.from_rank_offsets(key, w) for key, w in weights.items()}, tmp_path, "huggingface")
    state = {"model": {key: torch.zeros_like(w, dtype=torch.float32) for key, w in weights.items()}}
    found = loaded(state, tmp_path, CheckpointReader(rename="model.{}".format))
    assert same(found["model"], {key: w.float() for key, w in weights.items()})


def test_megatrons_checkpoint_loads(tmp_path: Path) -> None:
    folder = FIXTURES / "megatron_0161_tp2"
    stored = st.load_plain_tensors(folder)
    found = loaded({key: torch.zeros_like(tensor) for key, tensor in stored.items()}, folder, CheckpointReader())
    assert stored and same(found, stored)


def counting(folder: Path, calls: list[int]) -> st.strategies.Strategies:
    """Return a table whose row that loads shards of the native format notes how many it is asked for."""
    row = next(
        row for row in st.default_strategies if row[0] is st.StrategyAction.LOAD_SHARDED and row[1] == "safetensors"
    )

    def load_sharded(checkpoint: Any, shards: Any) -> Any:
        calls.append(len(shards))
        return st.get_default_strategy(*row)(checkpoint, shards)

    return st.default_strategies | {row: load_sharded}


def test_a_rank_reads_all_that_it_asks_for_by_one_plan(tmp_path: Path) -> None:
    state = {str(number): torch.full((4,), float(number)) for number in range(9)}
    save(state, tmp_path, CheckpointWriter(options=QUICK))
    calls: list[int] = []
    target = {key: torch.zeros(4) for key in state}
    assert same(loaded(target, tmp_path, CheckpointReader(strategies=counting(tmp_path, calls))), state)
    assert calls == [9]


def test_a_part_of_a_state_may_be_loaded_and_what_is_missing_is_dcps_error(tmp_path: Path) -> None:
    save(job(3), tmp_path, CheckpointWriter(options=QUICK))
    assert same(
        loaded({"model": {"half": job(0)["model"]["half"]}}, tmp_path, CheckpointReader())["model"]["half"],
        job(3)["model"]["half"],
    )
    error = cause(lambda: loaded({"other": torch.zeros(2)}, tmp_path, CheckpointReader()))
    assert "Missing key in checkpoint state_dict: other" in str(error)
    partial_load = dcp.DefaultLoadPlanner(allow_partial_load=True)
    assert loaded({"other": 5, "none": 1}, tmp_path, CheckpointReader(), planner=partial_load) == {
        "other": 5,
        "none": None,
    }


def test_tied_tensors_are_filled_once_and_must_be_stored_alike(tmp_path: Path) -> None:
    tied = torch.arange(4.0)
    save({"a": tied, "b": tied}, tmp_path / "tied", CheckpointWriter(options=QUICK))
    save({"a": tied, "b": tied + 1}, tmp_path / "apart", CheckpointWriter(options=QUICK))
    memory = torch.zeros(4)
    found = loaded({"a": memory, "b": memory}, tmp_path / "tied", CheckpointReader())
    assert found["a"] is memory and found["b"] is memory and same(memory, tied)
    assert isinstance(
        cause(lambda: loaded({"a": memory, "b": memory}, tmp_path / "apart", CheckpointReader())), ShapeError
    )


class Half(dcp.DefaultSavePlanner):
    """A planner that stores tensors in half precision under other names."""

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        super().set_up_planner({f"ema.{key}": value for key, value in state_dict.items()}, storage_meta, is_coordinator)

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        for item in plan.items:
            if item.tensor_data is not None:
                item.tensor_data.properties.dtype = torch.float16
        return plan

    def resolve_data(self, write_item: Any) -> Any:
        data: Any = super().resolve_data(write_item)
        return data if write_item.type is WriteItemType.BYTE_IO else data.half()


def test_planners_of_others_are_followed(tmp_path: Path) -> None:
    save({"w": torch.arange(3.0), "step": 4}, tmp_path, CheckpointWriter(options=QUICK), planner=Half())
    assert same(st.load_plain_tensors(tmp_path), {"ema.w": torch.arange(3.0).half()})
    found = loaded({"ema.w": torch.zeros(3), "ema.step": 0}, tmp_path, CheckpointReader())
    assert same(found, {"ema.w": torch.arange(3.0), "ema.step": 4})
    flat = dcp.DefaultSavePlanner(flatten_state_dict=False)
    save({"w": torch.ones(2), "conf": {"a": [1]}}, tmp_path / "flat", CheckpointWriter(options=QUICK), planner=flat)
    planner = dcp.DefaultLoadPlanner(flatten_state_dict=True)
    assert loaded({"conf": {"a": [0]}}, tmp_path / "flat", CheckpointReader(), planner=planner) == {"conf": {"a": [1]}}


@pytest.mark.parametrize("caching", [False, True])
def test_one_writer_saves_step_after_step(caching: bool, tmp_path: Path) -> None:
    writer, planner = CheckpointWriter(options=QUICK), dcp.DefaultSavePlanner(enable_plan_caching=caching)
    for step in (1, 2):
        save(job(step), tmp_path / str(step), writer, planner=planner)
    for step in (1, 2):
        assert same(loaded(job(0), tmp_path / str(step), CheckpointReader()), job(step))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["THREAD"])
def test_an_asynchronous_save_takes_the_state_of_its_call(kind: str, tmp_path: Path) -> None:
    state = job(3)
    how = dcp.state_dict_saver.AsyncCheckpointerType[kind]
    writer = CheckpointWriter(tmp_path, options=QUICK)
    future: Any = dcp.async_save(state, storage_writer=writer, no_dist=True, async_checkpointer_type=how)
    state["model"]["w"].zero_()
    getattr(future, "upload_completion", future).result()
    assert same(loaded(job(0), tmp_path, CheckpointReader()), job(3))


# What is refused


def test_what_a_save_refuses(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path, options=QUICK)
    save({"w": torch.zeros(2)}, None, writer)
    assert isinstance(cause(lambda: save({"w": torch.ones(2)}, None, writer)), AlreadyACheckpoint)
    assert isinstance(cause(lambda: save({"w": torch.ones(2)}, None, CheckpointWriter())), MetadataError)
    assert isinstance(cause(lambda: save({"f": Half}, tmp_path / "f", CheckpointWriter())), UnsupportedValue)
    with pytest.raises(WorldError, match="use_collectives=False"):
        save({"w": torch.ones(2)}, tmp_path / "alone", CheckpointWriter(), use_collectives=False)
    dtensor = STRIDED.dtensor(0)
    error = cause(lambda: save({"w": dtensor}, tmp_path / "strided", CheckpointWriter()))
    assert isinstance(error, UnsupportedValue) and "w: (Shard(dim=0)" in str(error)
    assert same(loaded({"w": torch.ones(2)}, tmp_path, CheckpointReader()), {"w": torch.zeros(2)})
    save({"w": torch.ones(2)}, None, CheckpointWriter(tmp_path, overwrite=True, options=QUICK))
    assert same(loaded({"w": torch.zeros(2)}, tmp_path, CheckpointReader()), {"w": torch.ones(2)})


def test_what_a_load_refuses(tmp_path: Path) -> None:
    assert isinstance(cause(lambda: loaded({"w": torch.zeros(2)}, tmp_path, CheckpointReader())), NotACheckpoint)
    shard = st.ShardedTensor.from_rank_offsets("a", torch.zeros(2))
    st.save({"x": shard, "a": 3}, tmp_path / "twice", options=QUICK)
    error = cause(lambda: loaded({"a": torch.zeros(2)}, tmp_path / "twice", CheckpointReader()))
    assert isinstance(error, TreeError) and "a" in str(error)
    st.save({"a": {"b": 1}, "a.b": 2}, tmp_path / "dots", options=QUICK)
    assert isinstance(cause(lambda: loaded({"a.b": 0}, tmp_path / "dots", CheckpointReader())), TreeError)


def test_parts_of_several_boxes_are_refused_where_dcp_loads_others(tmp_path: Path) -> None:
    save({"w": STRIDED.whole}, tmp_path, CheckpointWriter(options=QUICK))
    for rank, expected in STRIDED.dtensors().items():
        local = torch.full_like(expected.to_local(), -1.0)
        target = DTensor.from_local(
            local, expected.device_mesh, STRIDED.placements, shape=expected.shape, stride=expected.stride()
        )
        error = cause(partial(loaded, {"w": target}, tmp_path, CheckpointReader()))
        assert isinstance(error, UnsupportedValue) and "from_dtensors" in str(error), rank
        assert (local == -1).all()


def test_pickled_values_are_left_out_with_a_warning_and_read_where_that_is_asked_for(tmp_path: Path) -> None:
    allowed = st.SaveOptions(durable=False, allow_pickle=True)
    save({"w": torch.ones(2), "planner": Half}, tmp_path, CheckpointWriter(options=allowed))
    with pytest.warns(UserWarning, match="the common state cannot be read"):
        assert same(loaded({"w": torch.zeros(2)}, tmp_path, CheckpointReader()), {"w": torch.ones(2)})
    reader = CheckpointReader(options=st.LoadOptions(allow_pickle=True))
    assert loaded({"planner": None}, tmp_path, reader) == {"planner": Half}


# What DCP asks of a reader and a writer

ASKED: dict[type, dict[str, str]] = {
    dcp.StorageReader: {
        "reset": "self checkpoint_id",
        "read_metadata": "self",
        "set_up_storage_reader": "self metadata is_coordinator",
        "prepare_local_plan": "self plan",
        "prepare_global_plan": "self plans",
        "read_data": "self plan planner",
        "validate_checkpoint_id": "checkpoint_id",
    },
    dcp.StorageWriter: {
        "reset": "self checkpoint_id",
        "set_up_storage_writer": "self is_coordinator",
        "prepare_local_plan": "self plan",
        "prepare_global_plan": "self plans",
        "write_data": "self plan planner",
        "finish": "self metadata results",
        "validate_checkpoint_id": "checkpoint_id",
    },
}
"""Abstract methods, and their parameters without ``*args`` and ``**kwargs``."""


def check_contract(upstream: type, expected: Mapping[str, str]) -> None:
    """Raise where a class asks for other methods, or with other parameters, than the plug was written for."""
    where = f"{upstream.__module__}.{upstream.__qualname__} of torch {torch.__version__}"
    abstract = sorted(upstream.__abstractmethods__)  # type: ignore[attr-defined]
    assert abstract == sorted(expected), f"{where} has the abstract methods {abstract}; adapt shardtree/interop/dcp"
    for name, parameters in expected.items():
        signature = inspect.signature(getattr(upstream, name))
        named = [
            each.name
            for each in signature.parameters.values()
            if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
        ]
        assert named == parameters.split(), f"{where}: the signature is {name}{signature}; adapt shardtree/interop/dcp"


@pytest.mark.parametrize("upstream", ASKED, ids=lambda upstream: upstream.__name__)
def test_dcp_asks_for_what_the_plug_has(upstream: type) -> None:
    check_contract(upstream, ASKED[upstream])


def test_the_contract_names_the_signature_that_changed() -> None:
    changed = {**ASKED[dcp.StorageWriter], "finish": "self metadata"}
    with pytest.raises(AssertionError, match=r"StorageWriter of torch .*: the signature is finish\(self, metadata: "):
        check_contract(dcp.StorageWriter, changed)
    del changed["finish"]
    with pytest.raises(AssertionError, match=r"has the abstract methods \['finish', "):
        check_contract(dcp.StorageWriter, changed)


def test_the_room_imports_dcp_when_it_is_asked_for() -> None:
    code = (
        "import sys, shardtree.interop as room; name = 'torch.distributed.checkpoint.storage'; "
        "assert name not in sys.modules; room.dcp.CheckpointReader; assert name in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
