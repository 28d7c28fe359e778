"""Shards made by columns are those that the constructor makes: equal, frozen, and of the same types."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardtree.core.mapping import _many, box_of, whole_tensors, with_data
from shardtree.mapping import ShardedTensor

DTYPES = [torch.int8, torch.float32, torch.bfloat16]
shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)
tensors = st.tuples(st.text(st.characters(codec="utf-8"), min_size=1, max_size=9), st.sampled_from(DTYPES), shapes)


@st.composite
def boxes(draw):
    key, dtype, whole = draw(tensors)
    offset = tuple(draw(st.integers(0, size)) for size in whole)
    shape = tuple(draw(st.integers(0, size - low)) for low, size in zip(offset, whole, strict=True))
    return key, draw(st.sampled_from([None, torch.zeros(shape, dtype=dtype)])), dtype, whole, offset, shape


def exactly(shard):
    """Every field with its type, those inside of tuples too: a NumPy integer equals an int, and isn't one."""
    found = [(field.name, getattr(shard, field.name)) for field in fields(shard) if field.name != "data"]
    return [(name, type(value), [*map(type, value)] if isinstance(value, tuple) else value) for name, value in found]


def check_same(made, built):
    assert made == built and hash(made) == hash(built) and repr(made) == repr(built)
    assert exactly(made) == exactly(built) and made.data is built.data
    assert replace(made) == built  # what the constructor is given again, it accepts


def whole(key, dtype, shape):
    return ShardedTensor(key, None, dtype, shape, shape, (0,) * len(shape), (1,) * len(shape))


def check_whole_tensors(cases):
    made = whole_tensors([key for key, _, _ in cases], [dtype for _, dtype, _ in cases], [row[2] for row in cases])
    for one, case in zip(made, cases, strict=True):
        check_same(one, whole(*case))


@given(st.lists(tensors, max_size=5))
def test_whole_tensors_are_what_the_constructor_makes(cases):
    check_whole_tensors(cases)


@given(boxes())
def test_a_box_is_what_the_constructor_makes(case):
    key, data, dtype, shape, offset, local_shape = case
    check_same(box_of(*case), ShardedTensor(key, data, dtype, local_shape, shape, offset, None))


@given(st.lists(tensors, max_size=5))
def test_with_data_is_replace(cases):
    shards = [replace(whole(*case), replica_id=(0, 1), allow_shape_mismatch=True) for case in cases]
    data = [torch.zeros(shape, dtype=dtype) for _, dtype, shape in cases]
    for made, shard, one in zip(with_data(shards, data), shards, data, strict=True):
        check_same(made, replace(shard, data=one))


def test_the_law_catches_a_field_left_out(monkeypatch):
    check_whole_tensors([("w", torch.int8, (2,))])
    names = tuple(name for name in _many._NAMES if name != "replica_id")
    monkeypatch.setattr(_many, "_NAMES", names)
    with pytest.raises(AttributeError):
        check_whole_tensors([("w", torch.int8, (2,))])


def test_the_law_catches_numbers_of_another_type():
    (made,) = whole_tensors(["w"], [torch.int8], [(True,)])
    assert made == whole("w", torch.int8, (1,))
    with pytest.raises(AssertionError):
        check_same(made, whole("w", torch.int8, (1,)))


def test_what_is_made_by_columns_is_frozen():
    (shard,) = whole_tensors(["w"], [torch.int8], [(2,)])
    with pytest.raises(FrozenInstanceError):
        shard.key = "v"
    with pytest.raises(FrozenInstanceError):
        box_of("w", None, torch.int8, (2,), (0,), (1,)).data = torch.zeros(1)
