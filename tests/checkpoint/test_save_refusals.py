"""What a save refuses rather than store something else than it was given, and what it leaves behind when it fails."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

import shardtree as st
from shardtree.strategies import is_save_folder
from tests.options import save_keywords

shard = st.ShardedTensor.from_rank_offsets


def recast(weight: torch.Tensor) -> st.ShardedTensor:
    made = shard("w", weight)
    weight.data = weight.data.to(torch.bfloat16)
    return made


def transposed(weight: torch.Tensor) -> st.ShardedTensor:
    made = shard("w", weight)
    weight.t_()
    return made


@pytest.mark.parametrize("change", [recast, transposed])
def test_a_tensor_that_was_changed_after_its_shard_was_made_is_refused(change: Any) -> None:
    folder = st.storage.MemoryStorage()
    with pytest.raises(st.errors.ShapeError, match=r"tree\['layer'\]\[0\]: 'w' is \(2, 3\) float16, its data"):
        st.save({"layer": [change(torch.zeros(2, 3, dtype=torch.float16))]}, folder)
    assert not folder.names()


@pytest.mark.parametrize("change", [recast, transposed])
def test_a_tensor_that_is_changed_before_a_request_runs_is_refused(change: Any) -> None:
    weight = torch.zeros(2, 3, dtype=torch.float16)
    folder = st.storage.MemoryStorage()
    request = st.save(
        {"w": shard("w", weight)}, folder, async_sharded_save=True, options=st.SaveOptions(snapshot=False)
    )
    change(weight)
    with pytest.raises(st.errors.ShapeError, match="changed while it waited"):
        request.execute_sync()
    assert not st.is_checkpoint(folder)


def freed(weight: torch.Tensor) -> torch.Tensor:
    """Return a tensor without its memory, as FSDP leaves those that others hold meanwhile."""
    weight.untyped_storage().resize_(0)
    return weight


@pytest.mark.parametrize("kind", [torch.Tensor.detach, torch.nn.Parameter])
@pytest.mark.parametrize("keyword", [{}, {"sharded_strategy": ("torch_dist", 1)}, {"async_sharded_save": True}])
def test_a_tensor_whose_storage_was_freed_is_refused(kind: Any, keyword: Any) -> None:
    folder = st.storage.MemoryStorage()
    tree = {"v": shard("v", torch.ones(2)), "w": shard("w", freed(kind(torch.ones(2, 3))[1:]))}
    with pytest.raises(st.CheckpointingException, match=r"without data\n  'w' at tree\['w'\], whose storage is freed"):
        st.save(tree, folder, **save_keywords(**keyword))
    assert not folder.names()


@pytest.mark.parametrize(
    "backend", [("safetensors", 1), ("torch_dist", 1), ("dcp", 1), ("zarr", 3), ("huggingface", 1)]
)
def test_a_tensor_whose_storage_is_freed_before_a_request_runs_is_refused(backend: tuple[str, int]) -> None:
    if backend[0] == "zarr":
        pytest.importorskip("zarr")
    folder, weights = st.storage.MemoryStorage(), [torch.ones(2, 3), torch.ones(2, 3)]
    tree = {key: shard(key, weight) for key, weight in zip("vw", weights, strict=True)}
    strategy = {"sharded_strategy": backend, "async_sharded_save": True, "snapshot": False}
    request = st.save(tree, folder, **save_keywords(**strategy))
    freed(weights[1])
    with pytest.raises(st.errors.ShapeError, match="the storage of 'w' is freed"):
        request.execute_sync()
    assert not st.is_checkpoint(folder)


def test_a_tensor_without_elements_needs_no_memory() -> None:
    folder = st.storage.MemoryStorage()
    st.save({"w": shard("w", torch.ones(0, 3))}, folder)
    assert st.load_plain_tensors(folder)["w"].shape == (0, 3)


def test_a_lazy_tensor_is_held_to_its_shard_too() -> None:
    folder = st.storage.MemoryStorage()
    st.save({"w": shard("w", torch.ones(4, dtype=torch.float16))}, folder)
    lazy = dict(st.open_checkpoint(folder))
    with pytest.raises(st.errors.ShapeError, match="cast"):
        st.map_data(lambda data: data.to(torch.bfloat16), lazy)
    with pytest.raises(st.errors.ShapeError, match="dtype"):
        replace(lazy["w"], data=lazy["w"].data.float())
    cast = st.cast(lazy, torch.bfloat16)
    st.save(cast, copy := st.storage.MemoryStorage())
    assert st.load_plain_tensors(copy)["w"].tolist() == [1.0] * 4


@dataclass
class Options:
    inner: Any


@pytest.mark.parametrize(
    "hide",
    [
        lambda leaf: argparse.Namespace(x=leaf),
        lambda leaf: Options({"deep": [leaf]}),
        lambda leaf: frozenset([leaf]),
        lambda leaf: st.ShardedObject("o", [leaf], (1,), (0,)),
    ],
)
@pytest.mark.parametrize("leaf", [shard("w", torch.ones(2)), st.LocalNonpersistentObject(3)])
def test_a_shard_hidden_in_a_value_is_refused(hide: Any, leaf: Any) -> None:
    with pytest.raises(st.errors.UnsupportedValue, match=r"save: shards or tensors hidden in values\n.*tree\['a'\]"):
        st.save({"a": hide(leaf)}, st.storage.MemoryStorage())


def test_values_without_shards_are_not_refused() -> None:
    folder = st.storage.MemoryStorage()
    st.save({"a": argparse.Namespace(x=[1, {"b": {2}}]), "o": st.ShardedObject("o", {1: (2,)}, (1,), (0,))}, folder)
    assert st.load_common_state_dict(folder) == {"a": argparse.Namespace(x=[1, {"b": {2}}])}


def test_a_committed_request_is_not_run_again() -> None:
    weight, folder = torch.zeros(4), st.storage.MemoryStorage()
    request = st.save({"w": shard("w", weight)}, folder, async_sharded_save=True)
    request.execute_sync()
    weight += 1
    with pytest.raises(st.errors.CheckpointReplaced):
        request.execute_sync()
    assert st.load_plain_tensors(folder)["w"].tolist() == [0.0] * 4
    assert st.verify(folder) == ()


def beyond(part: int) -> st.ShardedTensor:
    data = torch.arange(4.0)
    return st.ShardedTensor("w", data, data.dtype, (4,), (7,), (4 * part,), None, allow_shape_mismatch=True)


@pytest.mark.parametrize(
    ("shards", "message"),
    [([beyond(0), beyond(1)], "beyond the global shape"), ([shard("w", torch.ones(2))] * 2, "more than one")],
)
def test_what_could_not_be_opened_is_not_committed(shards: list[st.ShardedTensor], message: str) -> None:
    folder = st.storage.MemoryStorage()
    st.save({"old": shard("old", torch.ones(3))}, folder)
    with pytest.raises(st.errors.IntegrityError, match=message):
        st.save(shards, folder, validate_access_integrity=False, overwrite=True)
    assert list(st.load_plain_tensors(folder)) == ["old"]


class FullDisk(OSError):
    pass


def test_a_failed_save_leaves_nothing_and_can_be_tried_again() -> None:
    full = [True]

    def progress(size: int) -> None:
        if full[0]:
            raise FullDisk("no space left")

    folder = st.storage.MemoryStorage()
    tree = {"w": shard("w", torch.arange(1000))}
    request = st.save(tree, folder, async_sharded_save=True, options=st.SaveOptions(progress=progress))
    with pytest.raises(FullDisk):
        request.execute_sync()
    assert not any(is_save_folder(name) for name in folder.names())
    full[0] = False
    request.execute_sync()
    assert st.verify(folder) == () and st.load_plain_tensors(folder)["w"].sum() == 499500


def test_a_failed_overwrite_removes_its_own_files_alone() -> None:
    folder = st.storage.MemoryStorage()
    st.save({"w": shard("w", torch.arange(3))}, folder)
    before = folder.names()

    def fail(size: int) -> None:
        raise FullDisk("no space left")

    with pytest.raises(FullDisk):
        st.save({"w": shard("w", torch.arange(9))}, folder, overwrite=True, options=st.SaveOptions(progress=fail))
    assert folder.names() == before and st.verify(folder) == ()


def test_an_async_save_takes_the_common_state_as_it_is_when_called() -> None:
    folder = st.storage.MemoryStorage()
    common = {"tensor": torch.zeros(2), "space": argparse.Namespace(x=1), "list": [1]}
    request = st.save(common, folder, async_sharded_save=True)
    common["tensor"] += 1
    common["space"].x = 2
    common["list"].append(2)
    request.execute_sync()
    stored = st.load_common_state_dict(folder)
    assert stored["tensor"].tolist() == [0, 0] and stored["space"].x == 1 and stored["list"] == [1]


def test_a_tree_that_is_too_deep_or_holds_itself_is_refused() -> None:
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    loop: list[Any] = []
    loop.append(loop)
    for tree in (deep, loop):
        with pytest.raises(st.errors.TreeError):
            st.save({"a": tree}, st.storage.MemoryStorage())
