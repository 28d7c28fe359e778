"""What an index tells of many tensors at once, compared with asking for each of them by itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardtree.core.geometry import Column
from shardtree.core.layouts import select_rows
from shardtree.core.plans import StoredChunks
from shardtree.errors import UnsupportedValue
from shardtree.layouts import TensorKind, shard_columns
from shardtree.mapping import ShardedTensor
from shardtree.shell.table.index import Index, _columns, build_index, chunks_of, text_columns, texts
from shardtree.shell.table.index._columns import stored_alike
from shardtree.storage import StoredFile
from tests.core.layouts.test_shard_columns import any_shards
from tests.core.trees.samples import assert_caught


@st.composite
def asked(draw: st.DrawFn) -> tuple[Index, list[int]]:
    """Return an index, of some of whose keys no chunk is there, and the numbers of some keys in any order."""
    shards = draw(any_shards(st.text("aµ𝄞/.", min_size=1, max_size=3)))
    rows = draw(st.lists(st.sampled_from(range(len(shards))), unique=True)) if shards else []
    columns = select_rows(shard_columns(shards), np.array(rows, dtype=np.int64))
    byte = np.arange(len(columns), dtype=np.int64) * 64
    index = build_index(columns, np.zeros_like(byte), byte, files=[StoredFile("f", 2**62)])
    numbers = draw(st.permutations(range(len(columns.keys))))
    kept = draw(st.integers(0, len(numbers)))
    return index, sorted(numbers[:kept]) if draw(st.booleans()) else numbers[:kept]


@st.composite
def asked_of_the_future(draw: st.DrawFn) -> tuple[Index, list[int]]:
    """Return what `asked` does, of an index that may have a dtype which nobody knows here."""
    index, numbers = draw(asked())
    names = texts(index.dtype_text, index.dtype_start)
    if names and draw(st.booleans()):
        names[draw(st.integers(0, len(names) - 1))] = "float31"
    text, start = text_columns(names)
    return replace(index, dtype_text=text, dtype_start=start), numbers


Kinds = Callable[[Index, list[int]], list[TensorKind]]


def outcome(kinds: Kinds, index: Index, numbers: list[int]) -> Any:
    try:
        return [(kind, [*map(type, kind.global_shape)]) for kind in kinds(index, numbers)]
    except UnsupportedValue as error:
        return str(error)


def each_by_itself(index: Index, numbers: list[int]) -> list[TensorKind]:
    return [index.kind(number) for number in numbers]


def are_kinds_of_each(kinds: Kinds, case: tuple[Index, list[int]]) -> None:
    assert outcome(kinds, *case) == outcome(each_by_itself, *case)


@pytest.mark.slow
@settings(max_examples=100)
@given(asked_of_the_future())
def test_kinds_of_many_are_the_kinds_of_each(case: tuple[Index, list[int]]) -> None:
    are_kinds_of_each(Index.kinds, case)


def in_the_indexs_order(index: Index, numbers: list[int]) -> list[TensorKind]:
    return index.kinds(sorted(numbers))


def test_the_law_of_kinds_catches() -> None:
    assert_caught(are_kinds_of_each, in_the_indexs_order, asked_of_the_future())


Alike = Callable[[Index, Column, list[TensorKind]], bool]


@st.composite
def compared(draw: st.DrawFn) -> tuple[Index, list[int], list[TensorKind]]:
    """Return an index, the numbers of some keys or of none, and kinds that may be other ones than are stored."""
    index, numbers = draw(asked_of_the_future())
    kinds = []
    for place, number in enumerate(numbers):
        try:
            kind = index.kind(number)
        except UnsupportedValue:
            kind = TensorKind(torch.int8, (1,), 0)
        change = draw(st.sampled_from(["", "", "", "dtype", "size", "axis", "prepended", "number"]))
        if change == "number":
            numbers = [*numbers[:place], -1, *numbers[place + 1 :]]
        shape = {"size": (*kind.global_shape[:-1], 77), "axis": (1, *kind.global_shape)}.get(change, kind.global_shape)
        dtype = torch.complex128 if change == "dtype" else kind.dtype
        kinds.append(TensorKind(dtype, shape, kind.prepend_axis_num + (change == "prepended")))
    return index, numbers, kinds


def tells_what_is_alike(alike: Alike, case: tuple[Index, list[int], list[TensorKind]]) -> None:
    index, numbers, kinds = case
    stored = outcome(each_by_itself, index, [number for number in numbers if number >= 0])
    whole = not isinstance(stored, str) and len(stored) == len(kinds)
    pairs = zip(stored, kinds, strict=True) if whole else ()
    same = all((one.dtype, one.global_shape) == (kind.dtype, kind.global_shape) for (one, _), kind in pairs)
    assert alike(index, np.array(numbers, dtype=np.int64), kinds) == (whole and same)


@pytest.mark.slow
@settings(max_examples=200)
@given(compared())
def test_what_is_stored_alike_is_told_by_columns(case: tuple[Index, list[int], list[TensorKind]]) -> None:
    tells_what_is_alike(stored_alike, case)


def whatever_axes(index: Index, numbers: Column, kinds: list[TensorKind]) -> bool:
    axes = np.array(index.key_axes)
    axes[numbers] = [len(kind.global_shape) for kind in kinds]
    return stored_alike(replace(index, key_axes=axes), numbers, kinds)


@pytest.mark.slow
def test_the_law_of_what_is_alike_catches() -> None:
    assert_caught(tells_what_is_alike, whatever_axes, compared())


def test_what_is_larger_than_any_number_of_an_index_is_not_alike() -> None:
    columns = shard_columns([ShardedTensor.from_rank_offsets("w", torch.zeros(2))])
    index = build_index(columns, np.zeros(1, np.int64), np.zeros(1, np.int64), files=[StoredFile("f", 8)])
    assert not stored_alike(index, np.zeros(1, np.int64), [TensorKind(torch.float32, (2**63,), 0)])


Take = Callable[[Index, Column], StoredChunks]


def chunks_key_by_key(index: Index, numbers: list[int]) -> dict[str, list[Any]]:
    rows = [(place, row) for place, number in enumerate(numbers) for row in np.flatnonzero(index.chunk_key == number)]
    names = [field.name for field in fields(StoredChunks) if field.name != "key"]
    columns = {name: [getattr(index, f"chunk_{name}")[row].tolist() for _, row in rows] for name in names}
    return {"key": [place for place, _ in rows], **columns}


def are_chunks_of_each(take: Take, case: tuple[Index, list[int]]) -> None:
    index, numbers = case
    found = take(index, np.array(numbers, dtype=np.int64))
    columns = {field.name: getattr(found, field.name) for field in fields(StoredChunks)}
    assert {column.dtype for column in columns.values()} == {np.dtype(np.int64)}
    assert {name: column.tolist() for name, column in columns.items()} == chunks_key_by_key(index, numbers)


@pytest.mark.slow
@settings(max_examples=200)
@given(asked())
def test_chunks_of_many_are_the_chunks_of_each(case: tuple[Index, list[int]]) -> None:
    are_chunks_of_each(chunks_of, case)


def from_the_first_to_the_last(first: Column, count: Column) -> slice:
    return slice(int(first.min(initial=0)), int((first + count).max(initial=0)))


def whatever_order(first: Column, count: Column) -> Column | slice:
    """Take a slice where as many rows as are asked for lie from the first to the last."""
    span = from_the_first_to_the_last(first, count)
    return span if span.stop - span.start == count.sum() else _rows_of(first, count)


_rows_of = _columns._rows_of


@pytest.mark.slow
def test_the_law_of_chunks_catches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_columns, "_rows_of", whatever_order)
    assert_caught(are_chunks_of_each, chunks_of, asked())
