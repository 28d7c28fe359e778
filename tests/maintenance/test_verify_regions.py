"""Which elements a damaged byte range holds, and that many threads find what one finds."""

from __future__ import annotations

import threading
import tracemalloc
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some

import shardtree as st
from shardtree.maintenance import bounding_box
from shardtree.shell.storage import BLOCK_BYTES
from tests.shell.checkpoint.parts import FORMATS, saved_by
from tests.shell.checkpoint.parts import files as walk
from tests.shell.table.folders import Files, flipped, folder_of

ROWS, COLUMNS = 600, 700
WHOLE = torch.arange(ROWS * COLUMNS, dtype=torch.int32).reshape(ROWS, COLUMNS)


# The smallest box.

SHAPES = some.lists(some.integers(1, 4), min_size=0, max_size=4).map(tuple)

Box = tuple[tuple[int, ...], tuple[int, ...]]


def check_smallest(find: Callable[[tuple[int, ...], int, int], Box], shape: tuple[int, ...], ends: list[int]) -> None:
    first, last = min(ends) % prod(shape), max(ends) % prod(shape)
    first, last = min(first, last), max(first, last)
    places = np.array(np.unravel_index(np.arange(first, last + 1), shape)) if shape else np.zeros((0, 1))
    expected = (tuple(places.min(axis=1).tolist()), tuple((places.max(axis=1) + 1).tolist()))
    assert find(shape, first, last) == expected


ENDS = some.lists(some.integers(0, 255), min_size=2, max_size=2)


@given(SHAPES, ENDS)
def test_the_box_is_the_smallest_that_holds_the_range(shape: tuple[int, ...], ends: list[int]) -> None:
    check_smallest(bounding_box, shape, ends)


def test_the_law_of_boxes_catches_one_of_the_two_ends() -> None:
    def ends_alone(shape: tuple[int, ...], first: int, last: int) -> Box:
        low, high = (tuple(int(at) for at in np.unravel_index(end, shape)) for end in (first, last))
        return low, tuple(at + 1 for at in high)

    with pytest.raises(AssertionError):
        check_smallest(ends_alone, (3, 4), [2, 5])


# Regions.


def rows(rank: int) -> st.ShardedTensor:
    return st.ShardedTensor.from_rank_offsets("w", WHOLE.chunk(2)[rank], (0, rank, 2))


def columns(rank: int) -> st.ShardedTensor:
    return st.ShardedTensor.from_rank_offsets("w", WHOLE.chunk(2, dim=1)[rank].contiguous(), (1, rank, 2))


def flat(rank: int) -> st.ShardedTensor:
    places = slice(0, 100_001) if rank == 0 else slice(100_001, WHOLE.numel())
    part = WHOLE.reshape(-1)[places].clone()
    return st.ShardedTensor.from_rank_offsets_flat("w", part, (ROWS, COLUMNS), flattened_range=places)


LAYOUTS = {
    f"{layout.__name__} {backend[0]}": (layout, backend)
    for layout in (rows, columns, flat)
    for backend in FORMATS
    if layout is not flat or backend[0] == "safetensors"
}


def files_of(layout: Callable[[int], st.ShardedTensor], backend: Any) -> Files:
    folder = saved_by([{"w": layout(rank)} for rank in range(2)], sharded_strategy=backend)
    return {name: folder.read(name) for name in walk(folder)}


def inside(region: st.strategies.Region) -> torch.Tensor:
    """Return which elements of the tensor a region names."""
    flags = torch.zeros(ROWS, COLUMNS, dtype=torch.bool)
    box = flags[tuple(slice(*ends) for ends in zip(region.begin, region.end, strict=True))]
    if region.flat is None:
        box[...] = True
    else:
        box.view(-1)[slice(*region.flat)] = True  # the box is whole rows here
    return flags


def check_named(damage: tuple[st.strategies.Damage, ...], differs: torch.Tensor) -> None:
    """Every element that differs lies in a region, and regions name no more than blocks and whole chunks hold."""
    named = torch.zeros(ROWS, COLUMNS, dtype=torch.bool)
    for one in damage:
        assert {region.key for region in one.regions} <= set(one.keys)
        for region in one.regions:
            named |= inside(region)
    assert differs.any() and not (differs & ~named).any()


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_elements_that_changed_lie_in_the_regions(layout: str) -> None:
    files = files_of(*LAYOUTS[layout])
    name = max(files, key=lambda name: len(files[name]))

    @settings(max_examples=5, deadline=None)
    @given(some.integers(3000, len(files[name]) - 3000))
    def law(byte: int) -> None:
        folder = folder_of(flipped(files, name, 8 * byte + 4))
        loaded = st.load_plain_tensors(folder, options=st.LoadOptions(verify=None))["w"]
        damage = st.verify(folder)
        check_named(damage, loaded != WHOLE)
        if "safetensors" in name:
            (block,) = damage
            assert block.file == name and block.begin <= byte < block.end <= block.begin + BLOCK_BYTES

    law()


def test_the_law_of_regions_catches_another_chunks_region() -> None:
    files = files_of(rows, FORMATS[0])
    name = max(files, key=lambda name: len(files[name]))
    folder = folder_of(flipped(files, name, 8 * 400_000 + 4))
    differs = st.load_plain_tensors(folder, options=st.LoadOptions(verify=None))["w"] != WHOLE
    (damage,) = st.verify(folder)
    check_named((damage,), differs)
    other = st.strategies.Region("w", (599, 0), (600, 700))
    with pytest.raises(AssertionError):
        check_named(
            (st.strategies.Damage(damage.file, damage.what, damage.begin, damage.end, ("w",), (other,)),), differs
        )


def test_a_flat_block_names_its_range() -> None:
    files = files_of(flat, FORMATS[0])
    name = next(name for name in files if "00000-of" in name)
    (damage,) = st.verify(folder_of(flipped(files, name, 8 * 9)))
    assert "the file's header lies in" in damage.what
    (region,) = damage.regions
    assert (region.begin, region.end) == ((0, 0), (ROWS, COLUMNS))
    assert region.flat is not None and region.flat[0] == 0


def test_a_missing_file_names_all_that_it_held() -> None:
    for layout, backend in LAYOUTS.values():
        files = files_of(layout, backend)
        name = max(files, key=lambda name: len(files[name]))
        rest = {other: data for other, data in files.items() if other != name}
        damage = st.verify(folder_of(rest))
        assert [(one.file, one.keys, len(one.regions)) for one in damage] == [(name, ("w",), 1)]


# Threads.


@pytest.mark.parametrize("backend", FORMATS, ids=lambda backend: str(backend[0]))
def test_more_threads_find_the_same_and_tell_the_same(backend: Any) -> None:
    files = files_of(rows, backend)
    broken = {name: data[:-9] + b"X" + data[-8:] if len(data) > 10_000 else data for name, data in files.items()}
    for content in (files, broken):
        found, told = [], []
        for threads in (1, 2, 5):
            seen: list[int] = []
            found.append(st.verify(folder_of(content), options=st.LoadOptions(threads=threads, progress=seen.append)))
            told.append(sum(seen))
            assert min(seen) >= 0
        assert found[0] == found[1] == found[2]
        assert told[0] == told[1] == told[2] == sum(map(len, files.values()))


def test_progress_is_told_by_one_thread_at_a_time() -> None:
    inside, most = [0], [0]

    def progress(_: int) -> None:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        threading.Event().wait(0.001)
        inside[0] -= 1

    st.verify(folder_of(files_of(rows, FORMATS[0])), options=st.LoadOptions(threads=4, progress=progress))
    assert most == [1]


@pytest.mark.parametrize("backend", FORMATS[:2], ids=lambda backend: str(backend[0]))
def test_a_large_file_takes_little_memory(backend: Any, tmp_path: Path) -> None:
    whole = torch.zeros(48 * 2**20, dtype=torch.uint8)
    st.save(
        {"w": st.ShardedTensor.from_rank_offsets("w", whole)},
        tmp_path / "a",
        backend,
        options=st.SaveOptions(durable=False),
    )
    tracemalloc.start()
    try:
        assert st.verify(tmp_path / "a", options=st.LoadOptions(threads=2)) == ()
        assert tracemalloc.get_traced_memory()[1] < 24 * 2**20
    finally:
        tracemalloc.stop()
