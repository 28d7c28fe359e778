"""The leaves: what they accept, what they refuse and how, and that every change is a new value."""

from __future__ import annotations

import copy
import pickle
from dataclasses import FrozenInstanceError, fields, replace
from math import prod

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardtree.errors import MetadataError, ShapeError
from shardtree.mapping import (
    LocalNonpersistentObject,
    ShardedBase,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)
from tests.core.trees.samples import assert_caught

keys = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12)
replicas = st.integers(0, 3) | st.lists(st.integers(0, 3), max_size=3).map(tuple)


@st.composite
def cells(draw):
    """A shard that is a cell of a regular grid of a numbered tensor, and that tensor."""
    counts = tuple(draw(st.lists(st.integers(1, 3), max_size=3)))
    prepended = draw(st.integers(0, len(counts)))
    rest = len(counts) - prepended
    local = tuple(draw(st.lists(st.integers(0, 3), min_size=rest, max_size=rest)))
    shape = tuple(size * count for size, count in zip((1,) * prepended + local, counts, strict=True))
    whole = torch.arange(prod(shape)).reshape(shape)
    place = tuple(draw(st.integers(0, count - 1)) for count in counts)
    box = tuple(slice(i * size, (i + 1) * size) for i, size in zip(place, (1,) * prepended + local, strict=True))
    cuts = [(axis, i, count) for axis, (i, count) in enumerate(zip(place, counts, strict=True))]
    data = whole[box].reshape(local)
    shard = ShardedTensor.from_rank_offsets(
        draw(keys), data, *draw(st.permutations(cuts)), replica_id=draw(replicas), prepend_axis_num=prepended
    )
    return shard, whole


def values(leaf):
    return [getattr(leaf, field.name) for field in fields(leaf) if field.name != "data"]


# -- laws of ShardedTensor


def slice_finds_data(global_slice, case):
    shard, whole = case
    assert shard.global_shape == tuple(whole.shape)
    assert torch.equal(whole[global_slice(shard)], shard.data)


@given(cells())
def test_global_slice_finds_the_data_in_the_global_tensor(case):
    slice_finds_data(ShardedTensor.global_slice, case)


def test_that_law_catches_offsets_taken_for_sizes():
    def broken(shard):
        return tuple(slice(0, stop) for stop in shard.global_offset)

    assert_caught(slice_finds_data, broken, cells())


@given(cells())
def test_the_constructor_changes_nothing_that_is_normal(case):
    shard, *_ = case
    again = ShardedTensor(*[getattr(shard, field.name) for field in fields(shard)])
    assert again == shard
    assert hash(again) == hash(shard)
    assert pickle.loads(pickle.dumps(shard.without_data())) == shard.without_data()
    assert values(copy.deepcopy(shard)) == values(shard)


@given(cells())
def test_lists_and_array_integers_become_tuples_of_ints(case):
    shard, *_ = case
    loose = replace(
        shard,
        local_shape=torch.Size(shard.local_shape),
        global_shape=list(shard.global_shape),
        global_offset=np.array(shard.global_offset, dtype=np.int64),
        axis_fragmentations=[np.int32(count) for count in shard.axis_fragmentations],
        replica_id=list(shard.replica_id) if isinstance(shard.replica_id, tuple) else np.int64(shard.replica_id),
    )
    assert loose == shard
    for name in ("local_shape", "global_shape", "global_offset", "axis_fragmentations"):
        assert type(getattr(loose, name)) is tuple
        assert all(type(number) is int for number in getattr(loose, name))


def equality_is_identity(equal, shard):
    assert equal(shard, replace(shard))
    assert not equal(shard, replace(shard, data=shard.data.clone()))
    assert not equal(shard, shard.without_data())
    assert not equal(shard, replace(shard, key=shard.key + "'"))


@given(cells())
def test_equal_means_equal_metadata_and_the_same_data(case):
    equality_is_identity(lambda a, b: a == b, case[0])
    assert case[0] != case[0].data.numel()


@pytest.mark.slow
def test_that_law_catches_equality_by_elements():
    def by_elements(a, b):
        return a.data is not None and b.data is not None and values(a) == values(b) and torch.equal(a.data, b.data)

    assert_caught(equality_is_identity, by_elements, cells().map(lambda case: case[0]))


@given(cells(), st.data())
def test_narrow_gives_the_view_that_torch_gives_and_changes_nothing(case, data):
    shard, *_ = case
    if not shard.local_shape:
        return
    dim = data.draw(st.integers(-len(shard.local_shape), len(shard.local_shape) - 1))
    size, axis = shard.local_shape[dim], dim % len(shard.local_shape) + shard.prepend_axis_num
    first, last = sorted(data.draw(st.tuples(*[st.integers(0, size)] * 2)))
    before, version = replace(shard), shard.data._version
    if size == 0 and shard.global_shape[axis]:
        pytest.fail("a zero-size cell of a regular grid has a zero-size global axis")
    [narrowed] = shard.narrow(dim, first, last - first)
    assert torch.equal(narrowed.data, shard.data.narrow(dim, first, last - first))
    assert narrowed.data.untyped_storage().data_ptr() == shard.data.untyped_storage().data_ptr()
    assert narrowed.global_shape[axis] == shard.axis_fragmentations[axis] * (last - first)
    assert narrowed.axis_fragmentations == shard.axis_fragmentations
    assert [n.without_data() for n in shard.without_data().narrow(dim, first, last - first)] == [
        narrowed.without_data()
    ]
    assert shard == before
    assert shard.data._version == version


@given(cells())
def test_init_data_fills_only_what_is_empty(case):
    shard, *_ = case
    assert shard.init_data("cpu") is shard
    empty = shard.without_data()
    filled = empty.init_data(torch.device("cpu"), torch.ones)
    assert empty.data is None
    assert torch.equal(filled.data, torch.ones(shard.local_shape, dtype=shard.dtype))
    assert filled.without_data() == empty


# -- what is accepted


@pytest.mark.parametrize("data", [None, (4, 2), "anything", object()], ids=["none", "shape", "text", "object"])
def test_what_is_not_a_tensor_is_not_looked_at(data):
    assert ShardedTensor("w", data, torch.float32, (4, 2), (4, 2), (0, 0), (1, 1)).data is data


def test_a_zero_size_axis_has_a_place_only_where_it_is_not_cut():
    data = torch.zeros(0, 2)
    assert ShardedTensor.from_rank_offsets("e", data, (1, 1, 3)).local_chunk_offset_in_global() == (0, 1)
    with pytest.raises(ShapeError, match=r"a box with elements"):
        ShardedTensor.from_rank_offsets("e", data, (0, 1, 3)).local_chunk_offset_in_global()


def test_flat_ranges_lose_a_step_of_one_and_array_integers():
    shard = ShardedTensor("w", None, torch.int8, (4,), (4,), (0,), None, flattened_range=slice(np.int64(1), 3, 1))
    assert shard.flattened_range == slice(1, 3)
    assert type(shard.flattened_range.start) is int
    hash(shard)


def test_leaves_are_frozen_and_hold_no_dict():
    shard = ShardedTensor.from_rank_offsets("w", torch.zeros(2))
    with pytest.raises(FrozenInstanceError):
        shard.key = "v"
    assert not hasattr(shard, "__dict__")
    assert isinstance(shard, ShardedBase)
    with pytest.raises(TypeError):
        ShardedBase()


# -- the other leaves


@st.composite
def objects(draw):
    shape = tuple(draw(st.lists(st.integers(1, 12), max_size=3)))
    offset = tuple(draw(st.integers(0, size - 1)) for size in shape)
    key = draw(keys | st.sampled_from(["a/b_c", "_", "/", "x/shard_0_1", "a/shard_", "shard_0.1_2.3/y_", "\n"]))
    return ShardedObject(key, None, shape, offset, draw(replicas))


def unique_key_comes_back(parse, leaf):
    assert parse(leaf.unique_key, leaf.replica_id) == leaf


@given(objects())
def test_a_unique_key_tells_the_whole_object(leaf):
    unique_key_comes_back(ShardedObject.empty_from_unique_key, leaf)


def test_that_law_catches_parsing_from_the_left():
    def from_the_left(unique_key, replica_id):
        leaf = ShardedObject.empty_from_unique_key(unique_key, replica_id)
        return replace(leaf, key=unique_key.partition("/")[0] or "nothing")

    assert_caught(unique_key_comes_back, from_the_left, objects())


def test_objects_compare_by_identity_of_data_and_are_hashable():
    data = {"unhashable": []}
    leaf = ShardedObject("o", data, [2], [1], [0, 1])
    assert leaf == ShardedObject("o", data, (2,), (1,), (0, 1))
    assert leaf != ShardedObject("o", dict(data), (2,), (1,), (0, 1))
    assert len({leaf, replace(leaf), leaf.without_data()}) == 2
    assert leaf.without_data().data is None


def test_a_factory_hands_over_what_it_holds():
    data = torch.zeros(3)
    factory = ShardedTensorFactory("f", data, lambda *given: given, lambda tree: tree, [0, 1], slice(0, 3, 1))
    assert factory == replace(factory)
    assert factory != replace(factory, merge_fn=print)
    assert {factory: 1}[replace(factory)] == 1
    assert factory.without_data().data is None
    with pytest.raises(MetadataError, match="merge_fn"):
        ShardedTensorFactory("f", data, print, None)


def test_a_nonpersistent_object_gives_its_value_back():
    value = [1]
    wrapped = LocalNonpersistentObject(value)
    assert wrapped.unwrap() is value
    assert wrapped == LocalNonpersistentObject(value)
    assert wrapped != LocalNonpersistentObject([1])
    assert hash(wrapped) == hash(LocalNonpersistentObject(value))
