"""Checks of the schedules and relays of resharding plans, which are tried on shards of numbered elements.

A schedule assigns the transfers of a plan to steps. A relay is a rank that passes received elements on to other ranks.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

import numpy as np

from ..core.geometry import Column
from ..core.layouts import ShardColumns
from ..live.resharding import ReshardPlan, Schedule, Transfers

_NOTHING = -1
_Wants = dict[tuple[int, int], dict[int, int]]  # (key, element) -> rank that needs it -> rank that sends it


def check_schedule(plan: ReshardPlan, schedule: Schedule) -> None:
    """Raise unless a schedule moves each element of its plan once, in the right order, and in few steps.

    In each step, the bytes that a rank sends and receives add up to at most `max_bytes_in_flight`. No pair of ranks
    waits in a step in which an element is ready and both have room for it. A relay passes on only what arrived in an
    earlier step. In the end, every target shard has the right elements. The reference visits every element, so keep
    shapes small.

    Args:
        plan: The plan.
        schedule: A schedule of the plan.

    Raises:
        AssertionError: The schedule is wrong; the error names the transfer, or the rank and the step.

    Examples:
        >>> import torch, shardtree as st
        >>> whole = {"w": st.ShardedTensor.from_rank_offsets("w", torch.zeros(4))}
        >>> plan = st.plan_reshard({0: whole}, {1: whole})
        >>> check_schedule(plan, plan.schedule(max_bytes_in_flight=8))
    """
    _check_pieces(plan.transfers, schedule)
    used = _used(schedule)
    for (step, rank), nbytes in used.items():
        assert nbytes <= schedule.max_bytes_in_flight, f"rank {rank} has {nbytes} bytes in flight in step {step}"
    _check_no_idle_pairs(plan, schedule, used)
    load: Counter[int] = Counter()
    for (_, rank), nbytes in used.items():
        load[rank] += nbytes
    largest = int(plan.target.item_size[plan.transfers.key[schedule.transfer]].max(initial=1))
    most, least = max(load.values(), default=0), schedule.max_bytes_in_flight - largest + 1
    hops = len(np.unique(plan.transfers.hop[schedule.transfer]))
    limit = 1 + 2 * most // least if hops < 2 else 2 + 3 * most // least
    assert schedule.steps <= limit, f"{schedule.steps} steps, expected at most {limit}"
    check_moved(plan, moved(plan, schedule))


def moved(plan: ReshardPlan, schedule: Schedule) -> list[Column]:
    """Run a plan and its schedule on source shards whose elements are numbers, and return the target shards.

    Args:
        plan: The plan.
        schedule: A schedule of the plan.

    Returns:
        The numbers of the elements of each target shard, -1 where nothing arrived, int64 (elements,).

    Examples:
        >>> import torch, shardtree as st
        >>> whole = st.ShardedTensor.from_rank_offsets("w", torch.zeros(3))
        >>> plan = st.plan_reshard([[whole], []], [[], [whole]])
        >>> [numbers.tolist() for numbers in moved(plan, plan.schedule(max_bytes_in_flight=8))]
        [[0, 1, 2]]
    """
    before = [element_numbers(plan.source, row, plan.target.keys) for row in range(len(plan.source))]
    after = [np.full(count, _NOTHING) for count in plan.target.elements.tolist()]
    transfers, is_local = plan.transfers, plan.transfers.from_rank == plan.transfers.to_rank
    for row in np.flatnonzero(is_local & (transfers.hop == 0)).tolist():
        source, target = _positions(transfers, row)
        after[transfers.target[row]][target] = before[transfers.source[row]][source]
    for step in range(schedule.steps):
        # All reads of a step come before its writes, as when ranks exchange buffers. So a relay that reads elements
        # which arrive in the same step is found.
        writes = []
        for piece in np.flatnonzero(schedule.step == step):
            row = int(schedule.transfer[piece])
            source, target = (at[schedule.start[piece] : schedule.stop[piece]] for at in _positions(transfers, row))
            memory = before if transfers.hop[row] == 0 else after
            writes.append((transfers.target[row], target, memory[transfers.source[row]][source]))
        for shard, target, values in writes:
            after[shard][target] = values
    for row in np.flatnonzero(is_local & (transfers.hop > 0)).tolist():  # in order of hops, as in every plan
        source, target = _positions(transfers, row)
        after[transfers.target[row]][target] = after[transfers.source[row]][source]
    return after


def check_moved(plan: ReshardPlan, after: list[Column]) -> None:
    """Raise unless target shards have the right elements, which are identified by their numbers.

    Args:
        plan: The plan of the target shards.
        after: Numbers of the elements of each target shard, as `moved` returns them.

    Raises:
        AssertionError: An element is wrong; the error names the element and its shard.

    Examples:
        >>> import torch, shardtree as st
        >>> whole = st.ShardedTensor.from_rank_offsets("w", torch.zeros(3))
        >>> plan = st.plan_reshard([[whole], []], [[], [whole]])
        >>> check_moved(plan, moved(plan, plan.schedule()))
    """
    for row, found in enumerate(after):
        expected = element_numbers(plan.target, row, plan.target.keys)
        wrong = np.flatnonzero(found != expected)
        where = f"element {wrong[0]} of target shard {row}" if wrong.size else ""
        assert not wrong.size, f"{where} is {found[wrong[0]]}, expected {expected[wrong[0]]}"


def check_relayed(plan: ReshardPlan, passed_on: ReshardPlan, *, shortest_cut: int = 1) -> None:
    """Raise unless a plan with relays moves the same elements as the plan without, each once from its source.

    Every rank must receive as many bytes as without relays. If k ranks need the same elements, each of these ranks must
    get 1 / k of the elements directly from a source. A source that serves n of the k ranks without relays must send
    n / k of the elements with relays. Deviations by a few rows of a box, or by a few times `shortest_cut`, are allowed.
    The check visits every element, so keep shapes small.

    Args:
        plan: The plan without relays.
        passed_on: The plan with relays.
        shortest_cut: Argument of `with_relays` for this plan.

    Raises:
        AssertionError: The plan with relays is wrong; the error names the ranks, or the element.

    Examples:
        >>> import torch, shardtree as st
        >>> def whole(rank): return {"w": st.ShardedTensor.from_rank_offsets("w", torch.zeros(4), replica_id=rank)}
        >>> plan = st.plan_reshard({0: whole(0)}, {1: whole(0), 2: whole(1)})
        >>> check_relayed(plan, st.plans.with_relays(plan, shortest_cut=1))
    """
    assert passed_on.bytes_moved == plan.bytes_moved, f"{passed_on.bytes_moved} bytes move, not {plan.bytes_moved}"
    assert passed_on.received == plan.received, f"ranks get {passed_on.received}, not {plan.received}"
    wants: _Wants = defaultdict(dict)
    for row, elements in _moving_elements(plan, hop=0):
        for element in elements:
            wants[element][int(plan.transfers.to_rank[row])] = int(plan.transfers.from_rank[row])
    crossings = Counter(element for _, elements in _moving_elements(passed_on, hop=0) for element in elements)
    for element in wants:
        assert crossings[element] == 1, f"element {element} leaves the sources {crossings[element]} times"
    _check_balanced(plan, passed_on, wants, shortest_cut)


def _check_balanced(plan: ReshardPlan, passed_on: ReshardPlan, wants: _Wants, shortest_cut: int) -> None:
    """Raise unless ranks that need the same elements get equal parts, and no source sends more than its share.

    `check_relayed` defines the share, n / k.

    Args:
        plan: The plan without relays.
        passed_on: The plan with relays.
        wants: For each element, the rank that sends it in `plan`, by the rank that needs it.
        shortest_cut: Argument of `with_relays` for this plan.
    """
    gets: dict[frozenset[int], Counter[int]] = defaultdict(Counter)
    sends, shares, groups = Counter[int](), defaultdict[int, float](float), set[frozenset[tuple[int, int]]]()
    for row, elements in _moving_elements(passed_on, hop=0):
        item = int(passed_on.transfers.nbytes[row]) // len(elements)
        for element in elements:
            gets[frozenset(wants[element])][int(passed_on.transfers.to_rank[row])] += item
            sends[int(passed_on.transfers.from_rank[row])] += item
            groups.add(frozenset(wants[element].items()))
            for sender in wants[element].values():
                shares[sender] += item / len(wants[element])
    rows = [plan.transfers.nbytes[row] // plan.transfers.shape[row].max() for row, _ in _moving_elements(plan, hop=0)]
    # Boxes are cut at whole rows, and not into parts smaller than `shortest_cut`, so that parts are only about equal.
    tolerance = 2 * (max(rows, default=0) + 1) + (4 * shortest_cut if shortest_cut > 1 else 0)
    for together, nbytes in gets.items():
        parts = [nbytes[rank] for rank in together]
        assert max(parts) - min(parts) <= tolerance, f"ranks {sorted(together)} get {parts} from the sources"
    for sender, amount in sends.items():
        limit = shares[sender] + tolerance * sum(source == sender for group in groups for _, source in group)
        assert amount <= limit, f"rank {sender} sends {amount} bytes, expected at most {limit}"


def element_numbers(columns: ShardColumns, row: int, keys: tuple[str, ...]) -> Column:
    """Return the numbers that identify a shard's elements, int64 (elements,).

    An element has the same number in every shard that contains it.

    Args:
        columns: The shards.
        row: Index of the shard in the columns.
        keys: Keys of the tensors that the numbers tell apart. Tensors with other keys are numbered as if they were one
            tensor.

    Examples:
        >>> import torch, shardtree as st
        >>> whole = st.ShardedTensor.from_rank_offsets("w", torch.zeros(3), (0, 1, 2))
        >>> element_numbers(st.layouts.shard_columns([whole]), 0, ("w",)).tolist()
        [3, 4, 5]
    """
    key = columns.keys[columns.key[row]]
    number = keys.index(key) if key in keys else len(keys)
    offset, shape = columns.offset[row], columns.shape[row]
    start = int(columns.start[row])
    part = slice(None) if start < 0 else slice(start, int(columns.stop[row]))
    return _numbers(number, offset, shape)[part]


def _numbers(key: int, offset: Column, shape: Column) -> Column:
    """Return integers that identify a box's elements among those of all tensors, in row-major order.

    Args:
        key: Index of the tensor's key.
        offset: Offset of the box in the tensor.
        shape: Shape of the box.
    """
    # Row-major indices in the global tensor won't do: a wrong shard may reach beyond it, and would get the numbers of
    # other elements.
    places = np.indices(shape.tolist()).reshape(len(shape), -1) + offset[:, None]
    return np.asarray(key * 10**15 + (places * 1000 ** np.arange(len(shape))[::-1, None]).sum(axis=0))


def _positions(transfers: Transfers, row: int) -> tuple[Column, Column]:
    """Return the flat positions of a transfer's elements in its source shard, and those in its target shard."""
    inside = np.indices(transfers.shape[row].tolist()).reshape(transfers.shape.shape[1], -1)
    source = transfers.source_element[row] + (inside * transfers.source_stride[row][:, None]).sum(axis=0)
    target = transfers.target_element[row] + (inside * transfers.target_stride[row][:, None]).sum(axis=0)
    return source, target


def _moving_elements(plan: ReshardPlan, hop: int) -> Iterator[tuple[int, list[tuple[int, int]]]]:
    transfers = plan.transfers
    moving = (transfers.hop == hop) & (transfers.from_rank != transfers.to_rank) & (transfers.nbytes > 0)
    for row in np.flatnonzero(moving).tolist():
        key = int(transfers.key[row])
        yield row, [(key, n) for n in _numbers(key, transfers.offset[row], transfers.shape[row]).tolist()]


def _check_pieces(transfers: Transfers, schedule: Schedule) -> None:
    """Raise unless a schedule's pieces tile each transfer between ranks, and have the transfer's ranks and bytes."""
    ends: dict[int, int] = {}
    for piece in np.lexsort((schedule.start, schedule.transfer)).tolist():
        row, start, stop = (int(column[piece]) for column in (schedule.transfer, schedule.start, schedule.stop))
        assert start == ends.get(row, 0) < stop, f"transfer {row}: a piece is [{start}, {stop})"
        ends[row] = stop
        size = transfers.nbytes[row] // np.prod(transfers.shape[row])
        fields = schedule.from_rank[piece], schedule.to_rank[piece], schedule.nbytes[piece]
        right = transfers.from_rank[row], transfers.to_rank[row], (stop - start) * size
        assert fields == right, f"transfer {row}: a piece says {fields}, expected {right}"
    moving = np.flatnonzero((transfers.from_rank != transfers.to_rank) & (transfers.nbytes > 0)).tolist()
    whole = {row: int(np.prod(transfers.shape[row])) for row in moving}
    assert ends == whole, f"transfers end at {ends}, expected {whole}"
    assert (np.diff(schedule.step, prepend=0) >= 0).all(), "steps are not ascending"


def _used(schedule: Schedule) -> Counter[tuple[int, int]]:
    """Return the sum of the bytes that a rank sends and receives in a step, by (step, rank)."""
    nbytes_in_flight: Counter[tuple[int, int]] = Counter()
    columns = (schedule.step, schedule.from_rank, schedule.to_rank, schedule.nbytes)
    for step, source, target, nbytes in zip(*(column.tolist() for column in columns), strict=True):
        nbytes_in_flight[step, source] += nbytes
        nbytes_in_flight[step, target] += nbytes
    return nbytes_in_flight


def _check_no_idle_pairs(plan: ReshardPlan, schedule: Schedule, used: Counter[tuple[int, int]]) -> None:
    """Raise if a rank could send an element in an earlier step, within the byte limit of sender and receiver."""
    hop, size = plan.transfers.hop[schedule.transfer], plan.target.item_size[plan.transfers.key[schedule.transfer]]
    last: dict[tuple[int, int, int], tuple[int, int]] = {}  # (hop, from, to): the last step, the largest element
    for piece in range(len(schedule)):
        pair = int(hop[piece]), int(schedule.from_rank[piece]), int(schedule.to_rank[piece])
        last[pair] = int(schedule.step[piece]), max(int(size[piece]), last.get(pair, (0, 0))[1])
    for (number, source, target), (end, item) in last.items():
        arrivals = [step for (earlier, _, to), (step, _) in last.items() if to == source and earlier < number]
        for step in range(max(arrivals, default=-1) + 1, end):
            room = schedule.max_bytes_in_flight - max(used[step, source], used[step, target])
            assert room < item, f"step {step}: ranks {source} and {target} have {room} bytes of room, and wait"
