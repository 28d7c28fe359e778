"""Shards as columns: what a row says, how ranks' columns are joined, and shards taken apart into boxes."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from math import prod

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardtree.core.layouts import select_rows, shard_boxes
from shardtree.errors import IntegrityError
from shardtree.layouts import ShardColumns, TensorKind, join_columns, shard_columns
from shardtree.mapping import ShardedTensor
from shardtree.testing import STORABLE_DTYPES, Layout, cut, layouts, shapes
from tests.core.trees.samples import assert_caught

LAYOUTS = st.tuples(shapes(max_axes=3, sizes=(1, 2, 3, 5, 0)), st.integers(1, 4)).flatmap(lambda args: layouts(*args))


def held(layout: Layout, key: str = "w") -> list[list[ShardedTensor]]:
    """Return each rank's shards of a tensor whose elements count up."""
    whole = torch.arange(prod(layout.global_shape)).view(layout.global_shape)
    return [cut(layout, key, whole, rank) for rank in range(layout.ranks)]


@given(LAYOUTS)
def test_boxes_of_a_shard_hold_its_elements_in_order(layout: Layout) -> None:
    """Read the boxes from the whole tensor: in order, they must be the shards' own data."""
    whole = torch.arange(prod(layout.global_shape)).view(layout.global_shape)
    shards = [shard for rank in held(layout) for shard in rank]
    columns = shard_columns(shards)
    boxes = shard_boxes(columns.offset, columns.shape, columns.start, columns.stop)
    whole = whole.view((1,) * (columns.offset.shape[1] - whole.ndim) + layout.global_shape)
    for row, shard in enumerate(shards):
        own = np.flatnonzero(boxes.shard == row)
        found: list[int] = []
        for box in own:
            assert boxes.position[box] == len(found)
            spans = zip(boxes.offset[box].tolist(), boxes.shape[box].tolist(), strict=True)
            found += whole[tuple(slice(low, low + size) for low, size in spans)].reshape(-1).tolist()
        assert found == shard.data.reshape(-1).tolist()
    assert boxes.shard.tolist() == sorted(boxes.shard.tolist())


@given(LAYOUTS, st.randoms(use_true_random=False))
def test_selecting_rows_commutes_with_describing_them(layout: Layout, random: object) -> None:
    shards = held(layout)[0]
    order = list(range(len(shards)))
    random.shuffle(order)  # type: ignore[attr-defined]
    one, other = (
        select_rows(shard_columns(shards), np.array(order, dtype=np.int64)),
        shard_columns([shards[row] for row in order]),
    )
    for name in ("key", "offset", "shape", "start", "stop", "rank", "main"):
        assert getattr(one, name).tolist() == getattr(other, name).tolist()


def test_prepended_axes_must_agree() -> None:
    one = ShardedTensor.from_rank_offsets("w", torch.zeros(2), prepend_axis_num=1)
    other = ShardedTensor.from_rank_offsets("w", torch.zeros(1, 2))
    with pytest.raises(IntegrityError, match="with 1 prepended"):
        join_columns([shard_columns([one]), shard_columns([other], 1)])


@st.composite
def any_shards(draw: st.DrawFn, keys: st.SearchStrategy[str]) -> list[ShardedTensor]:
    """Return shards without data of a few tensors: any text for a key, any dtype, boxes and flat ranges."""
    dtypes = st.sampled_from(STORABLE_DTYPES)
    kinds = draw(st.dictionaries(keys, st.tuples(dtypes, shapes(max_axes=3, sizes=(1, 2, 3, 0, 2**40))), max_size=4))
    held = []
    for key, (dtype, shape) in kinds.items():
        most = next((axis for axis, size in enumerate(shape) if not size), len(shape))
        prepended = draw(st.integers(0, most))
        held += [draw(a_shard(key, dtype, shape, prepended)) for _ in range(draw(st.integers(1, 3)))]
    return draw(st.permutations(held))


@st.composite
def a_shard(
    draw: st.DrawFn, key: str, dtype: torch.dtype, shape: tuple[int, ...], prepended: int
) -> st.SearchStrategy[ShardedTensor]:
    offset = tuple(draw(st.integers(0, max(size - 1, 0))) for size in shape)
    room = [size - low for size, low in zip(shape, offset, strict=True)][prepended:]
    box = tuple(draw(st.integers(0, most)) for most in room)
    flat = None
    if draw(st.booleans()):
        flat = slice(*sorted(draw(st.tuples(*[st.integers(0, prod(box))] * 2))))
    replica = draw(st.sampled_from([0, 1, (0, 0), (0, 2)]))
    return ShardedTensor(key, None, dtype, box, shape, offset, None, replica, prepended, flattened_range=flat)


ANY_TEXT = st.text(st.characters(exclude_categories=()), min_size=1)  # halves of surrogate pairs too
SHARDS = any_shards(ANY_TEXT)
COLUMNS = ("key", "offset", "shape", "start", "stop", "rank")


def shown(columns: ShardColumns) -> dict[str, object]:
    """Return all that columns say, with the dtypes and shapes that they say it in."""
    fields = {name: getattr(columns, name) for name in (*COLUMNS, "main")}
    arrays = {name: (array.dtype.name, array.shape, array.tolist()) for name, array in fields.items()}
    kinds = [(type(kind), repr(kind)) for kind in columns.kinds]
    return {"keys": columns.keys, "kinds": (type(columns.kinds), kinds), **arrays}


def slowly(shards: list[ShardedTensor], rank: int) -> dict[str, object]:
    """Return what `shown` gives for columns that are made shard by shard."""
    keys = tuple(sorted({shard.key for shard in shards}))
    axes = max([1, *(len(shard.global_shape) for shard in shards)])
    rows: dict[str, list[object]] = {name: [] for name in (*COLUMNS, "main")}
    said = {}
    for shard in shards:
        box, flat = (1,) * shard.prepend_axis_num + shard.local_shape, shard.flattened_range
        left = axes - len(box)
        said[shard.key] = repr(TensorKind(shard.dtype, shard.global_shape, shard.prepend_axis_num))
        rows["key"].append(keys.index(shard.key))
        rows["offset"].append([0] * left + list(shard.global_offset))
        rows["shape"].append([1] * left + list(box))
        rows["start"].append(-1 if flat is None else flat.start)
        rows["stop"].append(-1 if flat is None else flat.stop)
        rows["rank"].append(rank)
        rows["main"].append(shard.replica_id in (0, (0, 0)))
    shape = {"offset": (len(shards), axes), "shape": (len(shards), axes)}
    arrays = {
        name: ("bool" if name == "main" else "int64", shape.get(name, (len(shards),)), values)
        for name, values in rows.items()
    }
    return {"keys": keys, "kinds": (tuple, [(TensorKind, said[key]) for key in keys]), **arrays}


def are_made_shard_by_shard(describe: Callable[..., ShardColumns], shards: list[ShardedTensor], rank: int) -> None:
    assert shown(describe(shards, rank)) == slowly(shards, rank)


@pytest.mark.slow
@settings(max_examples=100)
@given(SHARDS, st.integers(0, 5))
def test_columns_are_what_is_made_shard_by_shard(shards: list[ShardedTensor], rank: int) -> None:
    are_made_shard_by_shard(shard_columns, shards, rank)


def of_one_dtype(columns: ShardColumns) -> ShardColumns:
    return replace(columns, kinds=tuple(replace(kind, dtype=columns.kinds[0].dtype) for kind in columns.kinds))


def without_ranges(columns: ShardColumns) -> ShardColumns:
    none = np.full(len(columns), -1, dtype=np.int64)
    return replace(columns, start=none, stop=none)


@pytest.mark.parametrize("fault", [of_one_dtype, without_ranges])
def test_the_law_of_columns_catches(fault: Callable[[ShardColumns], ShardColumns]) -> None:
    assert_caught(
        are_made_shard_by_shard, lambda shards, rank: fault(shard_columns(shards, rank)), SHARDS, st.integers(0, 5)
    )


def are_the_same_elsewhere(send: Callable[[ShardColumns], ShardColumns], shards: list[ShardedTensor]) -> None:
    columns = shard_columns(shards, 3)
    assert shown(send(columns)) == shown(columns)


def pickled(columns: ShardColumns) -> ShardColumns:
    sent: ShardColumns = pickle.loads(pickle.dumps(columns))
    return sent


@pytest.mark.slow
@settings(max_examples=100)
@given(SHARDS)
def test_columns_that_are_sent_are_the_same(shards: list[ShardedTensor]) -> None:
    are_the_same_elsewhere(pickled, shards)


def test_the_law_of_sending_catches() -> None:
    assert_caught(are_the_same_elsewhere, lambda columns: without_ranges(pickled(columns)), SHARDS)


@given(SHARDS, st.randoms(use_true_random=False))
def test_keys_of_which_no_row_is_left_are_sent_too(shards: list[ShardedTensor], random: object) -> None:
    rows = [row for row in range(len(shards)) if random.random() < 0.5]  # type: ignore[attr-defined]
    columns = select_rows(shard_columns(shards), np.array(rows, dtype=np.int64))
    assert shown(pickled(columns)) == shown(columns)


@st.composite
def disagreeing(draw: st.DrawFn) -> list[ShardedTensor]:
    """Return shards of which some say another dtype of their tensor."""
    shards = draw(any_shards(st.sampled_from("ab")))
    others = draw(st.lists(st.sampled_from([torch.int8, torch.float64, None, None]), min_size=9, max_size=9))
    pairs = zip(shards, others[: len(shards)], strict=True)
    return [shard if dtype is None else replace(shard, dtype=dtype) for shard, dtype in pairs]


def names_the_keys_that_differ(describe: Callable[..., ShardColumns], shards: list[ShardedTensor]) -> None:
    said = {(shard.key, shard.dtype) for shard in shards}
    wrong = [key for key in "ab" if sum(key == other for other, _ in said) > 1]
    try:
        describe(shards)
        found = []
    except IntegrityError as error:
        found = [key for key in "ab" if f"\n  '{key}': " in str(error)]
    assert found == wrong


@settings(max_examples=100)
@given(disagreeing())
def test_all_keys_are_named_whose_shards_differ(shards: list[ShardedTensor]) -> None:
    names_the_keys_that_differ(shard_columns, shards)


def test_the_law_of_differences_catches_a_look_at_the_first_and_the_last() -> None:
    def hasty(shards: list[ShardedTensor]) -> ShardColumns:
        firsts = {shard.key: shard for shard in reversed(shards)}
        lasts = {shard.key: shard for shard in shards}
        return shard_columns([*firsts.values(), *lasts.values()])

    assert_caught(names_the_keys_that_differ, hasty, disagreeing())
