"""ReshardPlan: which bytes move from which rank to which when tensors change their layout, in columns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from ...core import limits
from ...core.deferred import notebook_html
from ...core.geometry import Column, check_type, group_sums, integer, joined_rows
from ...core.layouts import Problem, RankTrees, ShardColumns, tree_columns, trees_by_rank
from ...core.trees import build_factories, plain_matcher
from ...errors import MetadataError, error_text, plural, size_text
from ._check import check_gaps, check_kinds, check_mains, check_sizes, transfer_problems
from ._pieces import (
    cut_pieces,
    find_places,
    least_bytes,
    located_pieces,
    own_routes,
    repeat_routes,
    sent_routes,
    with_equal_axes,
)
from ._schedule import Schedule, schedule_transfers
from ._summary import (
    Provenance,
    cast_lines,
    link_lines,
    names_of_tensors,
    plan_parts,
    plan_text,
    tensor_origins,
    totals_table,
)
from ._transfers import Transfers as Transfers
from ._transfers import as_transfers

SHORTEST_CUT = 64 * 1024
"""Bytes. No part of a box that is cut is shorter: level to the byte would mean a message for each few elements."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ReshardPlan:
    """How tensors get from one layout into another. A value: nothing has moved yet.

    Every rank computes the same plan from the same layouts. Where a tensor has another dtype in the target, its sender
    converts it before sending: bytes are counted in the target's dtype.

    Attributes:
        source: the shards of all ranks before.
        target: the shards of all ranks after.
        transfers: what goes where, those that stay on their rank included; ordered by hop, to_rank, target, offset.
        names: keys of tensors by the other names that the target's trees have for them, where it was given as trees.

    Examples:
        >>> import torch, shardtree as st
        >>> whole = st.ShardedTensor.from_rank_offsets("w", torch.zeros(4, 2))
        >>> half = st.ShardedTensor.from_rank_offsets("w", torch.zeros(4, 1), (1, 1, 2))
        >>> plan = plan_reshard({0: [whole]}, {0: [whole], 5: [half]})
        >>> print(plan)
        2 transfers of 1 tensor: 16 B move (at least 16 B must), 32 B stay
        rank  sends  gets  keeps
           0   16 B   0 B   32 B
           5    0 B  16 B    0 B
         all   16 B  16 B   32 B
        1 link: 0 → 5 16 B
        >>> print(plan.explain("w"))
        'w' (4, 2) float32: 16 B move, 32 B stay
        rank        gets  bytes    from
           0  [0:4, 0:2]   32 B  itself
           5  [0:4, 1:2]   16 B  rank 0
        >>> plan.check(), plan.sent[0], plan.links
        ((), 16, {(0, 5): 16})
    """

    source: ShardColumns
    target: ShardColumns
    transfers: Transfers
    names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def casts(self) -> dict[str, tuple[torch.dtype, torch.dtype]]:
        """The dtypes before and after, by key, of tensors that are converted."""
        before = {key: kind.dtype for key, kind in zip(self.source.keys, self.source.kinds, strict=True)}
        after = zip(self.target.keys, self.target.kinds, strict=True)
        return {key: (before[key], kind.dtype) for key, kind in after if before[key] != kind.dtype}

    @property
    def bytes_moved(self) -> int:
        """How many bytes go from one rank to another."""
        moves = self.transfers.from_rank != self.transfers.to_rank
        return int(self.transfers.nbytes[moves].sum())

    @property
    def bytes_kept(self) -> int:
        """How many bytes stay on their rank."""
        return int(self.transfers.nbytes.sum()) - self.bytes_moved

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks that hold something before or after, ascending."""
        return tuple(np.union1d(self.source.rank, self.target.rank).tolist())

    @property
    def sent(self) -> dict[int, int]:
        """How many bytes each rank sends to others."""
        return self._by_rank(self.transfers.from_rank, moving=True)

    @property
    def received(self) -> dict[int, int]:
        """How many bytes each rank gets from others."""
        return self._by_rank(self.transfers.to_rank, moving=True)

    @property
    def kept(self) -> dict[int, int]:
        """How many bytes of what each rank holds afterwards it has itself."""
        return self._by_rank(self.transfers.to_rank, moving=False)

    def _by_rank(self, rank: Column, *, moving: bool) -> dict[int, int]:
        rows = (self.transfers.from_rank != self.transfers.to_rank) == moving
        ranks = np.array(self.ranks, dtype=np.int64)
        total = group_sums(np.searchsorted(ranks, rank[rows]), self.transfers.nbytes[rows], ranks.size)
        return dict(zip(ranks.tolist(), total.tolist(), strict=True))

    @property
    def links(self) -> dict[tuple[int, int], int]:
        """How many bytes go from one rank to another, by (from, to), where any do."""
        moves = np.flatnonzero(self.transfers.from_rank != self.transfers.to_rank)
        ranks = int(self.transfers.to_rank.max(initial=0)) + 1
        pairs = self.transfers.from_rank[moves] * ranks + self.transfers.to_rank[moves]
        links, number = np.unique(pairs, return_inverse=True)
        total = group_sums(number, self.transfers.nbytes[moves], links.size)
        return {divmod(link, ranks): count for link, count in zip(links.tolist(), total.tolist(), strict=True)}

    def leaving(self, ranks: Iterable[int]) -> int:
        """Return how many bytes go from a group of ranks to others.

        Args:
            ranks: the group, as in ``plan.leaving(range(16))`` for what 16 trainers send to engines.
        """
        group = np.array(sorted(set(ranks)), dtype=np.int64)
        leaves = np.isin(self.transfers.from_rank, group) & ~np.isin(self.transfers.to_rank, group)
        return int(self.transfers.nbytes[leaves].sum())

    def schedule(self, *, max_bytes_in_flight: int = limits.RESHARD_BYTES) -> Schedule:
        """Return the transfers in steps in which no rank sends and gets, in total, more than `max_bytes_in_flight`.

        Args:
            max_bytes_in_flight: at least the largest element.

        Raises:
            MetadataError: an element is larger than that, or it isn't an integer.
        """
        item_size = self.target.item_size[self.transfers.key]
        return schedule_transfers(self.transfers, item_size, max_bytes_in_flight=max_bytes_in_flight)

    @property
    def lower_bound(self) -> int:
        """The fewest bytes that any plan moves: those of what ranks hold after and not before, once for each rank.

        They are counted in the target's dtypes.
        """
        return least_bytes(self.source, self.target)

    def check(self) -> tuple[Problem, ...]:
        """Return all that is wrong with the plan: nothing, where each element of each target shard is written once.

        Checked from the layouts and the transfers alone, however they were made: that each box lies in the stated
        shards, at the stated places in their memory, on the stated ranks; that the boxes that go to a shard have as
        many elements as it and none in common; and that what is passed on has arrived before.
        """
        return transfer_problems(self.source, self.target, self.transfers)

    def explain(self, name: str) -> Provenance:
        """Return where each box of a tensor comes from, on every rank; its text is a table.

        Args:
            name: the tensor's key; or, where the target was given as trees, the place where they hold it (the path's
                entries, joined by dots), or the key of the factory that builds it, maybe with others.

        Raises:
            KeyMismatch: no shard of the target is of that tensor.
        """
        return tensor_origins(self.target, self.transfers, name, self.names, self.casts)

    def __repr__(self) -> str:
        counts = f"{plural(len(self.transfers), 'transfer')} of {plural(len(self.target.keys), 'tensor')}"
        return f"ReshardPlan({counts}: {size_text(self.bytes_moved)} move, {size_text(self.bytes_kept)} stay)"

    def _repr_html_(self) -> str:
        return notebook_html(self)

    def __str__(self) -> str:
        moves, stays, least = (size_text(count) for count in (self.bytes_moved, self.bytes_kept, self.lower_bound))
        counts = f"{plural(len(self.transfers), 'transfer')} of {plural(len(self.target.keys), 'tensor')}"
        heading = f"{counts}: {moves} move (at least {least} must), {stays} stay"
        table = totals_table(self.sent, self.received, self.kept)
        return "\n".join([heading, *table, *link_lines(self.links), *cast_lines(self.casts.values())])

    def to_json(self) -> str:
        """Return the plan as JSON text, for another process or program to execute; `from_json` reads it.

        docs/resharding.md describes the document. A field of it never changes its meaning: one that must is a new
        version.

        Examples:
            >>> import torch, shardtree as st
            >>> whole = st.ShardedTensor.from_rank_offsets("w", torch.zeros(4))
            >>> plan = plan_reshard({0: [whole]}, {1: [whole]})
            >>> ReshardPlan.from_json(plan.to_json()).links
            {(0, 1): 16}
        """
        return plan_text((self.source, self.target, self.transfers, self.names))

    @classmethod
    def from_json(cls, text: str) -> ReshardPlan:
        """Return the plan that `to_json` wrote; it is checked as by `check`.

        Raises:
            MetadataError: it isn't the text of a plan of this version, or the plan doesn't fill its target.
            ShapeError: a side has 2**62 bytes or more.
        """
        return cls(*plan_parts(text))

    def inverse(self) -> ReshardPlan:
        """Return the plan for the way back, from the target's layout into the source's; what is cast is cast back.

        Raises:
            KeyMismatch: the source has tensors that the target hasn't.
            ShapeError: a tensor's dtype can't be converted back, as integers that became fractions.
            IntegrityError: the target doesn't hold all that the source does.
        """
        # Planned anew, not with the arrows turned round: where several ranks got an element, one is enough to give it
        # back, and none where its owner still has it.
        # What this plan has cast is cast back, whatever lies beside it.
        return _planned(self.target, self.source, SHORTEST_CUT, cast=bool(self.casts), is_plain=self.casts.__contains__)


def plan_reshard(
    source: ShardColumns | RankTrees,
    target: ShardColumns | RankTrees,
    *,
    shortest_cut: int = SHORTEST_CUT,
    cast: bool = False,
    plain: Sequence[str] = (),
) -> ReshardPlan:
    """Return what has to move so that tensors get from one layout into another.

    What a rank holds already stays there. All else comes from a rank that has it, chosen among the replicas so that
    all send about as much; where needed for that, a box is cut and comes from several. Each element is received once by
    each rank that wants it, however many of its shards do. Ties break by key, place and rank, never by the order of
    rows, so that every rank computes the same plan, and none is exchanged.

    Tensors that only the source has are left out. Nothing is padded: global shapes are the same on both sides, and
    `allow_shape_mismatch` doesn't matter here. Nor is anything cast, unless asked for.

    Args:
        source: the shards of all ranks before: columns, or each rank's tree, by rank. Data isn't looked at, so
            metadata will do: what `without_data` leaves, or `load_tensors_metadata` says of a checkpoint.
        target: the shards of all ranks after, in the same numbering of ranks; groups may overlap, or be disjoint.
        shortest_cut: bytes; no box is cut between senders into parts that are shorter.
        cast: whether tensors get the target's dtypes, as `load` converts them, before they are sent.
        plain: patterns of keys of values that need no scales, as for `load`.

    Raises:
        TreeError: a side isn't a tree for each rank.
        KeyMismatch: the target has a tensor that the source hasn't; or a pattern fits nothing in the source.
        ShapeError: a tensor's global shape differs between them, or its dtype, and it isn't or can't be cast, or only
            with its scales; or a side has 2**62 bytes or more.
        MetadataError: `shortest_cut` isn't an integer.
        IntegrityError: main replicas of the source overlap or leave their tensor, or no rank holds what is asked for.

    Examples:
        >>> import torch, shardtree as st
        >>> def tree(rank, axis):
        ...     part = torch.zeros(2, 2).chunk(2, axis)[rank]
        ...     return {"w": st.ShardedTensor.from_rank_offsets("w", part, (axis, rank, 2))}
        >>> plan = plan_reshard([tree(0, 0), tree(1, 0)], [tree(0, 1), tree(1, 1)])
        >>> plan.bytes_moved, plan.bytes_kept, plan.links
        (8, 8, {(0, 1): 4, (1, 0): 4})
        >>> halved = [st.cast(tree(rank, 1), torch.bfloat16) for rank in (0, 1)]
        >>> plan_reshard([tree(0, 0), tree(1, 0)], halved, cast=True).bytes_moved
        4
    """
    before = _columns(source)
    is_plain = plain_matcher("plan_reshard", plain, lambda: before.keys)
    return _planned(before, target, shortest_cut, cast=cast, is_plain=is_plain)


def _planned(
    source: ShardColumns,
    target: ShardColumns | RankTrees,
    shortest_cut: int,
    *,
    cast: bool,
    is_plain: Callable[[str], bool],
) -> ReshardPlan:
    shortest = max(1, integer("plan_reshard", "shortest_cut", shortest_cut))
    names: dict[str, tuple[str, ...]] = {}
    if not isinstance(target, ShardColumns):
        trees = trees_by_rank(target, "plan_reshard")
        target = {rank: build_factories(tree, is_target=True)[0] for rank, tree in trees.items()}
        names = names_of_tensors((tree, target[rank]) for rank, tree in trees.items())
    before, after = with_equal_axes(source, _columns(target))
    check_kinds(before, after, cast=cast, is_plain=is_plain)
    check_sizes(before, after)
    check_mains(before, after)
    places = find_places(before, after)
    own, pieces = own_routes(places, after, cut_pieces(places, after))
    pieces = located_pieces(places, after, pieces)
    check_gaps(after, pieces)
    # After the check, and before senders are chosen: what a rank gets once mustn't count as a sender's load twice.
    repeats, pieces = repeat_routes(after, pieces)
    routes = sent_routes(places, after, pieces, shortest)
    return ReshardPlan(before, after, as_transfers(before, after, joined_rows([own, repeats, routes])), names)


def _columns(layout: ShardColumns | RankTrees) -> ShardColumns:
    return layout if isinstance(layout, ShardColumns) else tree_columns(layout)


# Peak memory of each rank.


def peak_bytes(plan: ReshardPlan, schedule: Schedule) -> dict[int, int]:
    """Return how many bytes of tensors each rank has at most, while a plan is carried out by a schedule.

    Counted are the data of all its source shards and of all its target shards, both held from beginning to end, and
    the buffers of the step in which it has most of them: what it sends in that step and what it gets, each once, and
    freed before the next step. So no rank has more than its shards and `max_bytes_in_flight`. Not counted is what an
    executor or a communication library takes beside that; and where target shards share the memory of source shards,
    they are counted twice.

    Args:
        plan: what moves.
        schedule: that plan's.

    Raises:
        MetadataError: the schedule is another plan's.

    Examples:
        >>> import torch, shardtree as st
        >>> def tree(rank, axis):
        ...     part = torch.zeros(2, 2).chunk(2, axis)[rank]
        ...     return {"w": st.ShardedTensor.from_rank_offsets("w", part, (axis, rank, 2))}
        >>> plan = st.plan_reshard([tree(0, 0), tree(1, 0)], [tree(0, 1), tree(1, 1)])
        >>> peak_bytes(plan, plan.schedule()), peak_bytes(plan, plan.schedule(max_bytes_in_flight=4))
        ({0: 24, 1: 24}, {0: 20, 1: 20})
    """
    check_type("peak_bytes", "plan", plan, ReshardPlan, "Pass what `plan_reshard` returns.")
    check_type("peak_bytes", "schedule", schedule, Schedule, "Pass what `plan.schedule()` returns.")
    _check_schedule(plan, schedule)
    ranks = np.array(plan.ranks, dtype=np.int64)
    sides = (plan.source, plan.target)
    shard_bytes = sum(group_sums(np.searchsorted(ranks, side.rank), side.nbytes, ranks.size) for side in sides)
    places = [np.searchsorted(ranks, column) for column in (schedule.from_rank, schedule.to_rank)]
    # Sparse rows of (step, rank): a table of all steps by all ranks would be far larger than the schedule.
    at, number = np.unique(schedule.step * ranks.size + np.stack(places), return_inverse=True)
    flying = group_sums(number.ravel(), np.tile(schedule.nbytes, 2), at.size)
    most = np.zeros(ranks.size, dtype=np.int64)
    if at.size:
        np.maximum.at(most, at % ranks.size, flying)
    return dict(zip(ranks.tolist(), (shard_bytes + most).tolist(), strict=True))


def _check_schedule(plan: ReshardPlan, schedule: Schedule) -> None:
    """Raise unless pieces belong to transfers of the plan, between the same ranks."""
    transfers, rows = plan.transfers, schedule.transfer
    if not rows.size or (
        rows.max() < len(transfers)
        and np.array_equal(transfers.from_rank[rows], schedule.from_rank)
        and np.array_equal(transfers.to_rank[rows], schedule.to_rank)
    ):
        return
    what, fix = "peak_bytes: the schedule is another plan's", "Pass plan.schedule(...) of the same plan."
    found, expected = f"{plural(len(schedule), 'piece')} of other transfers", "pieces of the plan's transfers"
    raise MetadataError(error_text(what, found=found, expected=expected, fix=fix))
