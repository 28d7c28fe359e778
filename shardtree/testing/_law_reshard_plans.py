"""The laws of resharding plans, element by element: each is written once, with itself, and as few move as can be."""

from __future__ import annotations

from collections import Counter
from itertools import product

import numpy as np

from ..layouts import ShardColumns
from ..plans import ReshardPlan, convertible

_Element = tuple[int, ...]
_Filled = dict[tuple[int, int], int]


def check_reshard_plan(plan: ReshardPlan) -> None:
    """Raise unless a plan fills its target, and moves no more than it must; and unless it says so itself.

    Filling: each element of each target shard is written once, with that element, from a shard that has it by then,
    on the rank that is said to have it. No more than it must: the bytes that go from rank to rank are those of the
    elements that ranks hold after and not before. The reference walks over every element, so keep shapes small.

    Args:
        plan: what moves.

    Raises:
        AssertionError: names the shard and the element, or the numbers that differ.

    Examples:
        >>> import torch, shardtree as st
        >>> whole = {"w": st.ShardedTensor.from_rank_offsets("w", torch.zeros(4))}
        >>> check_reshard_plan(st.plan_reshard({0: whole}, {0: whole, 1: whole}))
    """
    check_filled(plan)
    assert plan.check() == (), f"nothing is wrong, but the plan says {plan.check()[0]}"
    lacking = wanted_bytes(plan)
    least = sum(lacking.values())
    assert plan.bytes_moved == least, f"{plan.bytes_moved} bytes move, expected {least}"
    assert plan.lower_bound == least, f"the plan says that {plan.lower_bound} bytes must move, but {least} must"
    got = {rank: nbytes for rank, nbytes in plan.received.items() if nbytes}
    assert got == dict(lacking), f"ranks get {got}, expected {dict(lacking)}"
    links = plan.links
    for name, end, totals in (("sent", 0, plan.sent), ("received", 1, plan.received)):
        summed = {rank: sum(count for link, count in links.items() if link[end] == rank) for rank in plan.ranks}
        assert totals == summed, f"{name} is {totals}, and the links add up to {summed}"
    held = int((plan.target.elements * plan.target.item_size[plan.target.key]).sum())
    kept = plan.bytes_kept, sum(plan.kept.values())
    assert kept == (held - least,) * 2, f"{kept} bytes are said to stay, expected {held - least}"


def check_filled(plan: ReshardPlan) -> None:
    """Raise unless each element of each target shard is written once, with that element, from where it is by then.

    Args:
        plan: what moves.

    Raises:
        AssertionError: names the transfer, or the shard and the element.

    Examples:
        >>> import torch, shardtree as st
        >>> whole = st.ShardedTensor.from_rank_offsets("w", torch.zeros(3))
        >>> check_filled(st.plan_reshard([[whole], []], [[], [whole]]))
    """
    sources = [shard_elements(plan.source, row) for row in range(len(plan.source))]
    targets = [shard_elements(plan.target, row) for row in range(len(plan.target))]
    hops: _Filled = {}
    every = plan.transfers
    for row in np.argsort(every.hop, kind="stable").tolist():
        hop, source, target = int(every.hop[row]), int(every.source[row]), int(every.target[row])
        columns, elements = (plan.target, targets) if hop else (plan.source, sources)
        assert hop >= 0 and 0 <= source < len(columns) and 0 <= target < len(plan.target), f"{row} has no such shard"
        _check_said(plan, row, columns)
        places = _places(plan, row)
        assert places, f"transfer {row} is empty"
        for element, at, to in places:
            assert 0 <= at < len(elements[source]), f"transfer {row} reads beyond shard {source}"
            assert elements[source][at] == element, f"transfer {row} takes {elements[source][at]} for {element}"
            assert not hop or hops.get((source, at), hop) < hop, f"transfer {row} reads {element} too early"
            assert 0 <= to < len(targets[target]), f"transfer {row} writes beyond shard {target}"
            assert targets[target][to] == element, f"transfer {row} puts {element} at {targets[target][to]}"
            assert (target, to) not in hops, f"{element} of shard {target} is written twice"
            hops[target, to] = hop
    count = sum(map(len, targets))
    assert len(hops) == count, f"{len(hops)} elements are written, of {count}"


def _check_said(plan: ReshardPlan, row: int, columns: ShardColumns) -> None:
    """Raise unless ranks, key and bytes of a transfer are those of the shards and the box."""
    every, source, target = plan.transfers, int(plan.transfers.source[row]), int(plan.transfers.target[row])
    ranks = (int(every.from_rank[row]), int(every.to_rank[row]))
    expected = (int(columns.rank[source]), int(plan.target.rank[target]))
    assert ranks == expected, f"transfer {row} is said to go from rank to rank {ranks}, and goes {expected}"
    number = int(plan.target.key[target])
    key, kind = plan.target.keys[number], plan.target.kinds[number]
    one = int(columns.key[source])
    assert columns.keys[one] == key, f"transfer {row} mixes tensors"
    # At hop 0 what has another dtype is converted as it is taken; a target shard has its own already.
    assert convertible(columns.kinds[one].dtype, kind.dtype), f"transfer {row} mixes dtypes"
    assert int(every.key[row]) == number, f"transfer {row} is said to be of another tensor"
    size = int(np.prod(every.shape[row])) * kind.dtype.itemsize
    assert int(every.nbytes[row]) == size, f"transfer {row} has {size} bytes, not {every.nbytes[row]}"


def _places(plan: ReshardPlan, row: int) -> list[tuple[_Element, int, int]]:
    """Return each element of a transfer with its positions in the data of both shards."""
    every = plan.transfers
    found = []
    for place in product(*map(range, every.shape[row].tolist())):
        at = int(every.source_element[row] + np.dot(place, every.source_stride[row]))
        to = int(every.target_element[row] + np.dot(place, every.target_stride[row]))
        found.append((tuple((every.offset[row] + place).tolist()), at, to))
    return found


def shard_elements(columns: ShardColumns, row: int) -> list[_Element]:
    """Return the indices of a shard's elements in the global tensor, in the order of its memory.

    Examples:
        >>> import torch, shardtree as st
        >>> whole = st.ShardedTensor.from_rank_offsets("w", torch.zeros(3), (0, 1, 2))
        >>> shard_elements(st.shard_columns([whole]), 0)
        [(3,), (4,), (5,)]
    """
    begin, shape = columns.offset[row].tolist(), columns.shape[row].tolist()
    inside = list(product(*(range(low, low + size) for low, size in zip(begin, shape, strict=True))))
    start = int(columns.start[row])
    return inside if start < 0 else inside[start : int(columns.stop[row])]


def wanted_bytes(plan: ReshardPlan) -> Counter[int]:
    """Return how many bytes each rank holds after and not before, for those that lack any."""
    held = {(rank, key, one) for rank, key, one in _held(plan.source)}
    lacking: Counter[int] = Counter()
    sizes = {key: kind.dtype.itemsize for key, kind in zip(plan.target.keys, plan.target.kinds, strict=True)}
    for rank, key, _ in set(_held(plan.target)) - held:
        lacking[rank] += sizes[key]
    return lacking


def _held(columns: ShardColumns) -> list[tuple[int, str, _Element]]:
    return [
        (int(columns.rank[row]), columns.keys[int(columns.key[row])], one)
        for row in range(len(columns))
        for one in shard_elements(columns, row)
    ]
