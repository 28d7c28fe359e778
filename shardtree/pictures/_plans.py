"""Pictures of plans: traffic between ranks and its lower bound, a tensor's layouts before and after, and steps."""

from __future__ import annotations

import itertools

import numpy as np

from ..core.geometry import Column, group_sums
from ..errors import plural, size_text
from ..live.resharding import ReshardPlan, Schedule
from ._layouts import checked_key
from ._picture import TONES, Bar, Bars, Cell, Entry, Picture, Plane
from ._regions import group_count
from ._style import rank_words
from ._tensors import RANKS, faults_legend, plane_of, tensor_sheets, tones_of

_MOST_RANKS = 16
"""Largest number of rows and of columns of a heat map; with more ranks, several share a row."""
_MOST_REGIONS = 64
_MOST_STEPS = 24


def plan_picture(plan: ReshardPlan, key: str | None = None) -> Picture:
    """Return the picture of a plan: a tensor's layout before and after, the traffic between ranks, and its lower bound.

    Args:
        plan: The plan to draw.
        key: Key of the tensor whose layouts are shown, or another name that `plan.explain` takes; by default, the
            tensor with the most bytes to move.

    Raises:
        KeyMismatch: The target has no such tensor.

    Examples:
        >>> from shardtree.layouts import Mesh, P, abstract, shard
        >>> from shardtree.plans import plan_reshard
        >>> import torch
        >>> rows = shard({"w": torch.zeros(4, 4)}, Mesh(dp=2), P("dp"))
        >>> plan = plan_reshard(rows, abstract({"w": torch.zeros(4, 4)}, Mesh(tp=2), P(None, "tp")))
        >>> (before, after), (links, totals) = plan_picture(plan).rows
        >>> [cell.title for cell in links.cells]
        ['rank 0 keeps 16 B', 'rank 0 to rank 1: 16 B', 'rank 1 to rank 0: 16 B', 'rank 1 keeps 16 B']
    """
    nbytes, least = plan.bytes_moved, plan.lower_bound
    counts = f"{plural(len(plan.target.keys), 'tensor')} on {plural(len(plan.ranks), 'rank')}"
    title = f"{counts}: {size_text(nbytes)} move, at least {size_text(least)} must"
    stays = plan.bytes_kept
    totals = Bars(
        "bytes",
        (
            Bar("move", nbytes, size_text(nbytes), "h6", f"{nbytes:,} bytes go from one rank to another"),
            Bar("must move", least, size_text(least), "h3", f"no plan moves fewer than {least:,} bytes"),
            Bar("stay", stays, size_text(stays), "kept", f"{stays:,} bytes stay on their rank"),
        ),
    )
    legend = (Entry("kept", "stays on its rank"),)
    links = (_links(plan), totals)
    if not plan.target.keys:
        return Picture(title, (links,), (), legend)
    moves = plan.transfers.from_rank != plan.transfers.to_rank
    total = group_sums(plan.transfers.key[moves], plan.transfers.nbytes[moves], len(plan.target.keys))
    keys = (plan.target.keys[int(total.argmax())],) if key is None else _keys(plan, key)
    layouts = [_layouts(plan, each) for each in keys]
    faults = dict.fromkeys(entry for planes in layouts for entry in faults_legend(planes))
    return Picture(title, (*layouts, links), (), (*legend, *faults), is_step=True)


def _keys(plan: ReshardPlan, name: str) -> tuple[str, ...]:
    """Return the keys of the stored tensors that a name stands for; a factory may store one tensor as several."""
    names = {**plan.names, **{key: (key,) for key in plan.target.keys}}
    return names[checked_key(tuple(names), name)]


def _layouts(plan: ReshardPlan, key: str) -> tuple[Plane, ...]:
    """Return drawings of a tensor's layouts before and after the plan; a rank has the same tone in both."""
    sides = [
        tensor_sheets(columns, key, most=_MOST_REGIONS) if key in columns.keys else []
        for columns in (plan.source, plan.target)
    ]
    tones = tones_of([sheet for side in sides for sheet in side])
    kind = plan.target.kinds[plan.target.keys.index(key)]
    headings = ((f"{key!r} {kind}, before", f"{key!r}, before"), ("after", ""))
    return tuple(
        plane_of(sheet, tones, RANKS, heading=heading, short_heading=short)
        for (heading, short), side in zip(headings, sides, strict=True)
        for sheet in side[:1]
    )


def _links(plan: ReshardPlan) -> Plane:
    """Return the heat map of the traffic between ranks; many ranks are merged into groups of consecutive ranks."""
    ranks = np.array(plan.ranks, dtype=np.int64)
    groups = group_count(max(ranks.size, 1), _MOST_RANKS)
    moves = plan.transfers
    edges = np.linspace(0, ranks.size, groups + 1).round().astype(np.int64)
    band = np.repeat(np.arange(groups), np.diff(edges))
    rows, columns = (band[np.searchsorted(ranks, column)] for column in (moves.from_rank, moves.to_rank))
    goes = moves.from_rank != moves.to_rank
    traffic = group_sums((rows[goes], columns[goes]), moves.nbytes[goes], (groups, groups))
    stays = group_sums(columns[~goes], moves.nbytes[~goes], groups)
    names = [ranks[low:high] for low, high in itertools.pairwise(edges)]
    cells = _heat_cells(traffic, stays, names)
    labels = tuple(rank_words(each).removeprefix("ranks ").removeprefix("rank ") for each in names)
    grouping = f", in groups of {ranks.size // groups}" if groups < ranks.size else ""
    return Plane(f"who sends to whom{grouping}", cells, groups, groups, 1.0, "to rank", "from rank", labels, labels)


def _heat_cells(traffic: Column, stays: Column, names: list[Column]) -> tuple[Cell, ...]:
    most, count, cells = int(traffic.max(initial=0)), len(names), []
    for row, column in np.argwhere((traffic > 0) | ((np.eye(count) > 0) & (stays > 0))).tolist():
        amount, whom = int(traffic[row, column]), rank_words(names[row])
        parts = [f"{whom} to {rank_words(names[column])}: {size_text(amount)}"] if amount else []
        if row == column and stays[row]:
            verb = "keeps" if names[row].size == 1 else "keep"
            parts.append(
                f"{whom} {verb} {size_text(int(stays[row]))}" if not parts else f"{size_text(int(stays[row]))} stay"
            )
        tone = f"h{-(-amount * TONES // most)}" if amount else "kept"
        place = (column / count, row / count, (column + 1) / count, (row + 1) / count)
        label, mark = (size_text(amount), str(-(-amount * 9 // most))) if amount else ("", "=")
        cells.append(Cell(*place, tone, "; ".join(parts), (label, label.replace(" ", "")) if label else (), mark))
    return tuple(cells)


def schedule_picture(schedule: Schedule) -> Picture:
    """Return the picture of a schedule: the bytes that move in each step, and the most that a rank has in flight.

    Examples:
        >>> from shardtree.mapping import ShardedTensor
        >>> from shardtree.plans import plan_reshard
        >>> import torch
        >>> whole = {"w": ShardedTensor.from_rank_offsets("w", torch.zeros(5))}
        >>> schedule = plan_reshard({0: whole}, {1: whole}).schedule(max_bytes_in_flight=12)
        >>> [bar.title for bar in schedule_picture(schedule).rows[0][0].bars]
        ['step 0 moves 12 B', 'step 1 moves 8 B']
    """
    nbytes = group_sums(schedule.step, schedule.nbytes, schedule.steps)
    first = nbytes[:_MOST_STEPS].tolist()
    bars = tuple(
        Bar(f"step {step}", amount, size_text(amount), "h6", f"step {step} moves {size_text(amount)}")
        for step, amount in enumerate(first)
    )
    left = schedule.steps - len(first)
    total, most = size_text(int(nbytes.sum())), size_text(schedule.max_bytes_in_flight)
    title = f"{plural(schedule.steps, 'step')}: {total} move, of a rank at most {most} at once"
    notes = (f"And {plural(left, 'step')} more.",) if left > 0 else ()
    return Picture(title, ((Bars("bytes that move", bars),),) if bars else (), notes)
