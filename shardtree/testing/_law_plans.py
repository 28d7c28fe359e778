"""The laws of load plans, writes and layouts, checked by counting bytes and elements."""

from __future__ import annotations

from itertools import product

import numpy as np
import torch

from ..layouts import ShardColumns, check_access, join_columns, shard_columns
from ..plans import LoadPlan, Runs, StoredChunks, Strided
from ._bits import assemble, first_difference
from ._layouts import Layout, cut
from ._tensors import random_bits


def check_load_plan(requests: ShardColumns, chunks: StoredChunks, plan: LoadPlan) -> None:
    """Raise unless a plan fills every requested byte once, from the right byte of the right file, and reads no more.

    The reference visits every element, so keep shapes small.

    Args:
        requests: the shards to fill.
        chunks: what is stored; chunks may not overlap.
        plan: what `plan_load` returned.

    Raises:
        AssertionError: names the shard and the byte.

    Examples:
        >>> import torch, shardtree as st
        >>> half = st.layouts.shard_columns([st.ShardedTensor.from_rank_offsets("w", torch.zeros(2), (0, 1, 2))])
        >>> at = np.array([0])
        >>> stored = StoredChunks(at, at[:, None], at[:, None] + 4, at - 1, at - 1, at, at)
        >>> check_load_plan(half, stored, st.plans.plan_load(half, stored))
    """
    expected = _expected_sources(requests, chunks)
    found: dict[tuple[int, int], tuple[int, int]] = {}
    for target, source in (*_run_bytes(plan.runs), *_strided_bytes(plan.strided)):
        assert target not in found, f"byte {target[1]} of shard {target[0]} is read twice"
        found[target] = source
    for target in expected.keys() | found.keys():
        where, right = found.get(target), expected.get(target)
        assert where == right, f"byte {target[1]} of shard {target[0]} comes from {where}, and is stored at {right}"
    assert plan.bytes_read == len(expected), f"the plan says {plan.bytes_read} bytes, and needs {len(expected)}"
    sizes = requests.item_size[requests.key].tolist()
    held = np.bincount([shard for shard, _ in expected], minlength=len(requests)).tolist()
    assert plan.covered.tolist() == [count // size for count, size in zip(held, sizes, strict=True)], "covered is wrong"


def check_writes(columns: ShardColumns, ranks: int, writes: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> None:
    """Raise unless each shard with a main replica is written once, by a rank that holds it, and writes are balanced.

    Balanced: of the shards that are held by the same ranks, no rank writes more than the mean plus the largest shard.

    Args:
        columns: all ranks' shards.
        ranks: the number of ranks.
        writes: which rows are written.

    Raises:
        AssertionError: names the shard or the ranks.

    Examples:
        >>> import torch, shardtree as st
        >>> columns = st.layouts.shard_columns([st.ShardedTensor.from_rank_offsets("w", torch.zeros(2))])
        >>> check_writes(columns, 1, st.plans.level_writes(columns, 1))
    """
    # The limit is what dealing out shards greedily guarantees; an optimal balance would be a packing problem.
    size = columns.elements * columns.item_size[columns.key]
    rows: dict[tuple[object, ...], list[int]] = {}
    for row in range(len(columns)):
        box = columns.offset[row].tolist(), columns.shape[row].tolist(), int(columns.start[row]), int(columns.stop[row])
        rows.setdefault((columns.keys[int(columns.key[row])], *map(str, box)), []).append(row)
    loads: dict[frozenset[int], list[np.ndarray[tuple[int], np.dtype[np.int64]]]] = {}
    for place, held in rows.items():
        written = [row for row in held if writes[row]]
        wanted = int(any(columns.main[row] for row in held))
        assert len(written) == wanted, f"{place} is written {len(written)} times, expected {wanted}"
        holders = frozenset(int(columns.rank[row]) for row in held)
        for row in written:
            loads.setdefault(holders, []).append(np.eye(ranks, dtype=np.int64)[columns.rank[row]] * size[row])
    for holders, each in loads.items():
        load, largest = np.sum(each, axis=0), max(int(part.max()) for part in each)
        limit = load.sum() / len(holders) + largest
        assert load.max() <= limit, f"ranks {sorted(holders)} write {load[sorted(holders)].tolist()}, at most {limit}"


def _elements(columns: ShardColumns | StoredChunks, row: int, axes: int) -> list[tuple[int, ...]]:
    """Return the indices of a shard's or chunk's elements, in memory order."""
    offset, shape = columns.offset[row].tolist(), columns.shape[row].tolist()
    offset, shape = [0] * (axes - len(offset)) + offset, [1] * (axes - len(shape)) + shape
    inside = list(product(*(range(low, low + size) for low, size in zip(offset, shape, strict=True))))
    start = int(columns.start[row])
    return inside if start < 0 else inside[start : int(columns.stop[row])]


def _expected_sources(requests: ShardColumns, chunks: StoredChunks) -> dict[tuple[int, int], tuple[int, int]]:
    """Return, for each requested byte (shard, byte) that is stored, its (file, byte)."""
    axes = max(requests.offset.shape[1], chunks.offset.shape[1])
    # A table of every stored element: no arithmetic on boxes and strides, which is what is under test.
    stored: dict[tuple[int, tuple[int, ...]], tuple[int, int]] = {}
    for row in range(len(chunks.key)):
        size = int(requests.item_size[chunks.key[row]])
        for number, element in enumerate(_elements(chunks, row, axes)):
            stored[int(chunks.key[row]), element] = int(chunks.file[row]), int(chunks.byte[row]) + number * size
    found: dict[tuple[int, int], tuple[int, int]] = {}
    for row in range(len(requests)):
        key, size = int(requests.key[row]), int(requests.item_size[requests.key[row]])
        for number, element in enumerate(_elements(requests, row, axes)):
            if (key, element) in stored:
                file, byte = stored[key, element]
                found |= {(row, number * size + i): (file, byte + i) for i in range(size)}
    return found


def _run_bytes(runs: Runs) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    columns = (runs.file, runs.byte, runs.target, runs.target_byte, runs.length)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return [((to, at + i), (file, byte + i)) for file, byte, to, at, length in rows for i in range(length)]


def _strided_bytes(pieces: Strided) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    found = []
    for row in range(len(pieces.file)):
        file, to, size = (int(column[row]) for column in (pieces.file, pieces.target, pieces.item_size))
        for place in np.ndindex(*pieces.shape[row].tolist()):
            byte = int(pieces.byte[row]) + int(np.dot(place, pieces.stride[row])) * size
            at = int(pieces.target_byte[row]) + int(np.dot(place, pieces.target_stride[row])) * size
            found += [((to, at + i), (file, byte + i)) for i in range(size)]
    return found


# The law of layouts.


def check_layout(layout: Layout) -> None:
    """Raise unless main replicas tile the tensor, and all pieces have the right elements.

    Args:
        layout: of a tensor that is small enough to be checked element by element.

    Raises:
        IntegrityError: an element has no main replica, or several.
        AssertionError: a piece has other elements.

    Examples:
        >>> from shardtree.testing import even_layout
        >>> check_layout(even_layout((4, 6), 3, axis=1))
    """
    whole = random_bits(layout.global_shape, torch.int16, 1)
    trees = [cut(layout, "w", whole, rank) for rank in range(layout.ranks)]
    check_access(join_columns([shard_columns(tree, rank) for rank, tree in enumerate(trees)]))
    differ = first_difference(assemble(trees)["w"], whole)
    assert differ is None, differ
