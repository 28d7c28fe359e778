"""check_commutes: right transforms pass in any layout, and what looks at its own shard alone is caught."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some

import shardtree as st
from shardtree.lenses import as_factory, transposed
from shardtree.mapping import ShardedTensor
from shardtree.testing import check_commutes, meshes, partition_specs, random_bits, tensors

STATE = {"w": torch.arange(48.0).view(8, 6), "b": torch.arange(8.0), "step": 3}


def with_factory(tree: Any) -> Any:
    return {**tree, "w": as_factory(tree["w"], transposed())}


RIGHT: dict[str, Callable[[Any], Any]] = {
    "names": st.bind(st.rename, {"w": "weight"}),
    "dtypes": st.bind(st.cast, torch.bfloat16),
    "elements": partial(st.map_data, lambda data: data * 2),
    "a lens": with_factory,
    "another step": lambda tree: {**tree, "step": tree["step"] + 1},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RIGHT)
def test_right_transforms_commute_with_resharding(name: str) -> None:
    check_commutes(RIGHT[name], STATE)


def test_a_transform_that_refuses_some_layouts_commutes_in_others() -> None:
    split = st.bind(st.transforms.split_tensor, "w", ["gate", "up"], sizes=[4, 4])
    columns = [(st.Mesh(tp=ranks), {"w": st.PartitionSpec(None, "tp")}) for ranks in (1, 2, 3)]
    check_commutes(split, {"w": STATE["w"]}, layouts=columns)
    with pytest.raises(st.errors.ShapeError, match="'w' is cut along axis 0"):
        check_commutes(split, STATE)


@settings(max_examples=20)
@given(data=some.data())
def test_in_any_layouts_that_are_drawn(data: some.DataObject) -> None:
    state = {"w": data.draw(tensors(dtype=torch.float32))}
    pairs = []
    for _ in range(2):
        mesh = data.draw(meshes(max_ranks=4))
        pairs.append((mesh, data.draw(partition_specs(tuple(state["w"].shape), mesh))))
    check_commutes(st.bind(st.prefix, "model."), state, layouts=pairs)


def counting_rows(tree: Any) -> Any:
    return {**tree, "rows": tree["w"].local_shape[0]}


def changing(tree: Any) -> Any:
    tree["w"].data.mul_(1)
    return tree


WRONG: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a local mean": (partial(st.map_data, lambda data: data - data.mean()), r"to 2 ranks by rows: rank 0: 'b' at tree"),
    "values": (counting_rows, r"to 2 ranks by rows: rank 0: tree\['rows'\]: found 8, expected 4"),
    "its argument": (changing, "changing changed its argument 0"),
}


@pytest.mark.parametrize("name", WRONG)
def test_the_law_catches(name: str) -> None:
    transform, message = WRONG[name]
    with pytest.raises(AssertionError, match=message):
        check_commutes(transform, STATE)


def test_given_layouts_are_named() -> None:
    pairs = [(st.Mesh(dp=2), st.PartitionSpec("dp")), (st.Mesh(tp=2), st.PartitionSpec())]
    with pytest.raises(
        AssertionError, match=r"from Mesh\(dp=2\) PartitionSpec\('dp'\) to Mesh\(tp=2\) PartitionSpec\(\)"
    ):
        check_commutes(WRONG["a local mean"][0], {"w": random_bits((4,), torch.float32)}, layouts=pairs)


@given(data=some.data())
def test_simple_specs_cut_evenly_along_one_axis_each(data: some.DataObject) -> None:
    mesh = data.draw(meshes(simple=True))
    shape = data.draw(some.sampled_from([(), (4,), (6, 4), (5, 12, 2)]))
    spec = data.draw(partition_specs(shape, mesh, simple=True))
    assert list(mesh.ranks) == list(range(mesh.size))
    assert not spec.at and all(axis is None or isinstance(axis, str) for axis in spec.entries)
    trees = st.shard({"w": torch.zeros(shape)}, mesh, spec)
    shards = [leaf for tree in trees for _, leaf in st.trees.leaves_with_paths(tree)]
    assert all(isinstance(leaf, ShardedTensor) for leaf in shards)
    assert (len(shards), len({leaf.local_shape for leaf in shards})) == (mesh.size, 1)
