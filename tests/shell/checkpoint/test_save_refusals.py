"""What a save refuses rather than store something else than it was given, and what it leaves behind when it fails."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import shardtree as st
from shardtree.core.trees import path_key
from shardtree.errors import CheckpointingException, TraceError, TreeError, UnsupportedValue
from shardtree.interop.dtensor._placed import ReadOptions, all_parts, placed_tensors
from tests.options import save_keywords
from tests.shell.checkpoint.parts import ALL_FORMATS, freed

shard = st.ShardedTensor.from_rank_offsets


def test_a_tensor_that_was_changed_after_its_shard_was_made_is_refused() -> None:
    folder, weight = st.storage.MemoryStorage(), torch.zeros(2, 3, dtype=torch.float16)
    tree = {"layer": [shard("w", weight)]}
    weight.t_()
    with pytest.raises(st.errors.ShapeError, match=r"tree\['layer'\]\[0\]: 'w' is \(2, 3\) float16, its data"):
        st.save(tree, folder)
    assert not folder.names()


@pytest.mark.parametrize("backend", ALL_FORMATS)
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


# Tensors without memory, and parameters that aren't initialised yet: refused by path, not read.


TREES = {
    "a plain tensor": {"a": [1, freed(torch.zeros(3))]},
    "a lazy module's": {"a": [1, torch.nn.LazyLinear(3).weight]},
    "in an object": {"a": [1, st.ShardedObject("o", {"x": freed(torch.zeros(3))}, (1,), (0,))]},
    "in a set": {"a": [1, {freed(torch.zeros(3))}]},
}


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
@pytest.mark.parametrize("later", [False, True])
def test_a_tensor_without_elements_is_refused(tree: Any, later: bool) -> None:
    folder = st.storage.MemoryStorage()
    with pytest.raises(UnsupportedValue, match=r"without allocated memory\n  tree\['a'\]\[1\]: (its storage|not init)"):
        st.save(tree, folder, async_sharded_save=later)
    assert not folder.names()


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
@pytest.mark.parametrize("use", [lambda tree: st.redistribute(tree, {}), lambda tree: st.plans.reshard([tree], [{}])])
def test_nor_is_it_moved(tree: Any, use: Any) -> None:
    with pytest.raises(UnsupportedValue, match=r"tensors without allocated memory\n  tree\['a'\]\[1\]"):
        use(tree)


@pytest.mark.parametrize("tree", [TREES["a plain tensor"], TREES["a lazy module's"]])
def test_it_is_not_cut_either(tree: Any) -> None:
    with pytest.raises(CheckpointingException, match=r"tree\['a'\]\[1\]"):
        st.shard(tree, st.Mesh(tp=2), st.PartitionSpec("tp"))


# Parameters and buffers that aren't initialised yet have no shape: every call that asks for one names their paths.

LAZY = {
    "a parameter": lambda: torch.nn.LazyLinear(3).weight,
    "a buffer": torch.nn.UninitializedBuffer,
    "a frozen parameter": lambda: torch.nn.UninitializedParameter(requires_grad=False),
}
STORED = st.storage.MemoryStorage()
st.save([shard("a.1", torch.ones(2)), shard("b", torch.ones(2))], STORED)


@pytest.mark.parametrize("kind", LAZY)
def test_a_target_that_is_not_initialised_is_refused_by_path(kind: str) -> None:
    tree = {"a": [1, LAZY[kind]()], "b": torch.zeros(2)}
    with pytest.raises(TreeError, match=r"load: tensors without a shape\n  tree\['a'\]\[1\]: an uninitialised"):
        st.load(tree, STORED)
    assert "tree['a'][1]: an uninitialised" in str(st.explain(tree, STORED))
    with pytest.raises(TraceError, match=r"the outputs are not a dict of tensors\n  'w': Uninitialized"):
        st.trace(lambda sources: {"w": LAZY[kind]()}, {"b": shard("b", torch.ones(2))})
    assert st.testing.outline(tree) == st.testing.outline({**tree, "b": torch.zeros(2)})


@pytest.mark.parametrize("kind", LAZY)
def test_what_is_not_initialised_differs_from_what_is(kind: str) -> None:
    tree, other, filled = ({"a": [1, each]} for each in (LAZY[kind](), LAZY[kind](), torch.ones(2)))
    assert not st.diff(tree, other)
    assert st.diff(tree, filled).mismatch == st.diff(filled, tree).mismatch == (("a", 1),)
    (problem,) = st.core.layouts.common_problems([tree, filled])
    assert str(problem).startswith("tree['a'][1]: rank 0 has Uninitialized")


def test_a_replicated_tensor_that_is_not_initialised_is_refused_by_path() -> None:
    reading = ReadOptions(path_key, object(), None, lambda key, tensor: True)
    with pytest.raises(TreeError, match=r"from_dtensors: tensors without a shape\n  tree\['a'\]\[1\]"):
        [*placed_tensors({"a": [1, torch.nn.LazyLinear(3).weight]}, reading, all_parts())]
