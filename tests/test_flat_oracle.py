"""Flat ranges against numpy: select elements by brute force, and compare what narrowing and placing give."""

from __future__ import annotations

import itertools
from math import prod

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardtree.core.geometry import narrow_flat_range
from shardtree.mapping import ShardedTensor
from tests.core.trees.samples import assert_caught


@st.composite
def flat_narrowings(draw):
    """(local_shape, start, stop, dim, narrow_start, length)."""
    shape = tuple(draw(st.lists(st.integers(0, 4), min_size=1, max_size=4)))
    start, stop = sorted(draw(st.tuples(*[st.integers(0, prod(shape))] * 2)))
    dim = draw(st.integers(0, len(shape) - 1))
    first, last = sorted(draw(st.tuples(*[st.integers(0, shape[dim])] * 2)))
    return shape, start, stop, dim, first, last - first


def expected_runs(shape, start, stop, dim, first, length):
    """Walk over the data element by element; begin a run wherever one of both places jumps."""
    kept = np.full(shape, -1)
    index = (slice(None),) * dim + (slice(first, first + length),)
    kept[index] = np.arange(kept[index].size).reshape(kept[index].shape)
    pairs = [(i, int(place)) for i, place in enumerate(kept.reshape(-1)[start:stop]) if place >= 0]
    runs = []
    for i, place in pairs:
        if runs and runs[-1][0].stop == i and runs[-1][1].stop == place:
            runs[-1] = slice(runs[-1][0].start, i + 1), slice(runs[-1][1].start, place + 1)
        else:
            runs.append((slice(i, i + 1), slice(place, place + 1)))
    return tuple(runs)


def agrees_with_numpy(narrow, case):
    assert narrow(*case) == expected_runs(*case)


@given(flat_narrowings())
def test_narrowed_flat_range_is_what_numpy_selects(case):
    agrees_with_numpy(narrow_flat_range, case)


def _keeps_places_of_the_wide_box(shape, start, stop, dim, first, length):
    runs = narrow_flat_range(shape, start, stop, dim, first, length)
    return tuple((part, slice(part.start + start, part.stop + start)) for part, _ in runs)


def test_numpy_catches_a_wrong_narrowing():
    assert_caught(agrees_with_numpy, _keeps_places_of_the_wide_box, flat_narrowings())


@st.composite
def flat_grids(draw):
    """(cell's shape, pieces along each axis, prepended axes, inner bounds of the flat ranges of every cell)."""
    counts = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    prepended = draw(st.integers(0, len(counts)))
    cell = tuple(draw(st.lists(st.integers(0, 3), min_size=len(counts) - prepended, max_size=len(counts) - prepended)))
    bounds = sorted(draw(st.lists(st.integers(0, prod(cell)), max_size=3)))
    return cell, counts, prepended, [0, *bounds, prod(cell)]


def flat_shards(whole, cell, counts, prepended, bounds, make=ShardedTensor.from_rank_offsets_flat):
    """Cut a global array into cells, and the cells into flat ranges."""
    for place in np.ndindex(*counts):
        box = (1,) * prepended + cell
        index = tuple(slice(i * size, (i + 1) * size) for i, size in zip(place, box, strict=True))
        elements = whole[index].reshape(-1)
        cuts = [(axis, i, count) for axis, (i, count) in enumerate(zip(place, counts, strict=True)) if count > 1]
        for start, stop in itertools.pairwise(bounds):
            yield make(
                "w", elements[start:stop], cell, *cuts, flattened_range=slice(start, stop), prepend_axis_num=prepended
            )


def assembled(shards, global_shape):
    """Put flat shards where they say that they lie; elements that none or several hold become -1."""
    whole, times = np.full(global_shape, -1), np.zeros(global_shape, dtype=int)
    for shard in shards:
        box, seen = np.array(whole[shard.global_slice()]), np.array(times[shard.global_slice()])
        assert box.shape == shard.local_shape
        box.reshape(-1)[shard.flattened_range] = shard.data.numpy()
        seen.reshape(-1)[shard.flattened_range] += 1
        whole[shard.global_slice()], times[shard.global_slice()] = box, seen
    return np.where(times == 1, whole, -1)


def _numbered(cell, counts, prepended):
    shape = tuple(size * count for size, count in zip((1,) * prepended + cell, counts, strict=True))
    return torch.arange(prod(shape)).reshape(shape)


def flat_shards_tile(make, grid):
    cell, counts, prepended, _bounds = grid
    whole = _numbered(cell, counts, prepended)
    shards = list(flat_shards(whole, *grid, make=make))
    assert all(shard.global_shape == tuple(whole.shape) for shard in shards)
    assert np.array_equal(assembled(shards, whole.shape), whole.numpy())


@given(flat_grids())
def test_flat_shards_of_a_grid_put_together_are_the_tensor(grid):
    flat_shards_tile(ShardedTensor.from_rank_offsets_flat, grid)


def test_tiling_catches_a_shifted_flat_range():
    def shifted(key, data, shape, *cuts, flattened_range, **others):
        start = 0 if flattened_range.start else flattened_range.start
        flat = slice(start, start + len(data))
        return ShardedTensor.from_rank_offsets_flat(key, data, shape, *cuts, flattened_range=flat, **others)

    assert_caught(flat_shards_tile, shifted, flat_grids())


def narrowed_shards_tile(narrow, case):
    grid, dim, first, length = case
    cell, counts, prepended, _ = grid
    whole, axis = _numbered(cell, counts, prepended), dim + prepended
    kept = np.concatenate(
        [piece.narrow(axis, first, length).numpy() for piece in whole.chunk(counts[axis], axis)], axis
    )
    parts = []
    for shard in flat_shards(whole, *grid):
        own, memory = narrow(shard, dim, first, length), shard.data.untyped_storage().data_ptr()
        assert all(part.data.untyped_storage().data_ptr() == memory for part in own)
        parts += own
    assert all(part.global_shape == kept.shape for part in parts)
    assert np.array_equal(assembled(parts, kept.shape), kept)


@st.composite
def grid_narrowings(draw):
    grid = draw(flat_grids().filter(lambda grid: grid[0] and all(grid[0])))
    dim = draw(st.integers(0, len(grid[0]) - 1))
    first, last = sorted(draw(st.tuples(*[st.integers(0, grid[0][dim])] * 2)))
    return grid, dim, first, last - first


@given(grid_narrowings())
def test_narrowed_flat_shards_put_together_are_the_narrowed_pieces(case):
    narrowed_shards_tile(ShardedTensor.narrow, case)


def test_tiling_catches_a_lost_run():
    assert_caught(narrowed_shards_tile, lambda *at: ShardedTensor.narrow(*at)[:1], grid_narrowings())
