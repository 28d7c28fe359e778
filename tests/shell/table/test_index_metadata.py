"""What an index tells of its tensors, many at once: what each is by its key, and what a shard's constructor accepts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some

import shardtree as st
from shardtree.errors import CheckpointingException
from shardtree.shell.table.index import IndexMetadata, _file, index_problem
from tests.shell.checkpoint.parts import saved

DTYPES = [torch.int8, torch.float32, torch.bfloat16]
KEYS = [f"layers.{number:03d}.µ" for number in range(150)]


def tensors():
    shapes = [lambda number: (number % 5, 3), lambda number: (number % 7,), lambda _: (), lambda number: (2, 1, number)]
    return {key: torch.zeros(shapes[number % 4](number), dtype=DTYPES[number % 3]) for number, key in enumerate(KEYS)}


def objects():
    return [st.ShardedObject("rng", {"rank": rank}, (3,), (rank,)) for rank in range(3)]


SHARDS = [st.ShardedTensor.from_rank_offsets(*item) for item in tensors().items()]
FOLDER = saved(SHARDS + objects())
INDEX = st.open_checkpoint(FOLDER).metadata.index


def test_all_at_once_is_each_by_its_key():
    metadata = IndexMetadata(INDEX)
    assert [*metadata.items()] == [(key, metadata[key]) for key in metadata]
    assert [*metadata.values()] == [metadata[key] for key in metadata]
    assert len(metadata.items()) == len(metadata.values()) == len(metadata) == len(KEYS) + 3
    assert (KEYS[0], metadata[KEYS[0]]) in metadata.items() and (KEYS[0], None) not in metadata.items()
    assert st.load_sharded_metadata(FOLDER) == dict(metadata)
    assert list(st.load_tensors_metadata(FOLDER)) == KEYS
    opened = st.open_checkpoint(FOLDER)
    for (key, shard), value in zip(opened.items(), opened.values(), strict=True):
        assert shard.without_data() == value.without_data() == metadata[key]
        if key in KEYS:
            assert torch.equal(shard.data.read(), tensors()[key])
        else:
            assert shard.data == opened[key].data == {"rank": shard.global_offset[0]}
    assert opened.nested(separator="/").keys() >= {"rng"}


NUMBERS = some.sampled_from([-1, 0, 1, 2, 3, 4, 5, 2**31, 2**62, 2**63 - 1, -(2**63)])
COLUMNS = ("key_axes", "key_prepended", "key_dtype", "key_shape", "key_start")
changes = some.lists(some.tuples(some.sampled_from(COLUMNS), some.integers(0, 999), NUMBERS), min_size=1, max_size=2)


def changed(index, places):
    for name, place, value in places:
        column = np.array(getattr(index, name))
        column.flat[place % column.size] = value
        index = replace(index, **{name: column})
    return index


def check_refused_or_sound(problem, index):
    """Whatever numbers a file says: an index is refused, or the constructor accepts all that is made of it."""
    if problem(index) is None:
        for key, shard in IndexMetadata(index).items():
            assert key == shard.key and replace(shard) == shard


# Of few tensors, so that a change of any number is soon met.
SMALL = st.open_checkpoint(saved(SHARDS[:6])).metadata.index


def sure(index):
    try:
        return index_problem(index)
    except (CheckpointingException, UnicodeDecodeError, IndexError, ValueError) as error:
        return str(error)


@pytest.mark.slow
@settings(max_examples=300)
@given(changes, some.sampled_from([1, 2, 2**14]))
def test_any_number_is_refused_or_sound(places, rows):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_file, "_ROWS", rows)
        check_refused_or_sound(sure, changed(SMALL, places))


def test_the_law_catches_shapes_that_nobody_checks(monkeypatch):
    index = changed(SMALL, [("key_shape", SMALL.key_shape.size - 1, -1)])
    check_refused_or_sound(sure, index)
    monkeypatch.setattr(_file, "_keys", lambda *_: None)
    monkeypatch.setattr(_file, "_places", lambda _: None)
    with pytest.raises(CheckpointingException):
        check_refused_or_sound(sure, index)
