"""ReshardPlan: the bytes that move between ranks when tensors change their layout, in columns."""

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
"""Lower bound of the size of a cut box's parts, in bytes. Exactly equal loads would need too many short messages."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ReshardPlan:
    """A plan that moves tensors from one layout into another. It is a value: nothing has moved yet.

    Every rank computes the same plan from the same layouts. Where a tensor has another dtype in the target, its sender
    converts it before sending, so bytes are counted in the target's dtype.

    Attributes:
        source: Shards of all ranks before the resharding.
        target: Shards of all ranks after the resharding.
        transfers: All transfers, including those within a rank, ordered by hop, to_rank, target, offset.
        names: Keys of tensors by other names, for `explain`. Such a name is the path of a tensor or factory in the
            target's trees, or the key of a factory. Empty if the target was passed as columns.

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
        """Dtypes before and after, by key, of tensors that are converted."""
        before = {key: kind.dtype for key, kind in zip(self.source.keys, self.source.kinds, strict=True)}
        after = zip(self.target.keys, self.target.kinds, strict=True)
        return {key: (before[key], kind.dtype) for key, kind in after if before[key] != kind.dtype}

    @property
    def bytes_moved(self) -> int:
        """Bytes that move between ranks."""
        moves = self.transfers.from_rank != self.transfers.to_rank
        return int(self.transfers.nbytes[moves].sum())

    @property
    def bytes_kept(self) -> int:
        """Bytes that stay on their rank."""
        return int(self.transfers.nbytes.sum()) - self.bytes_moved

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks that hold shards before or after the resharding, ascending."""
        return tuple(np.union1d(self.source.rank, self.target.rank).tolist())

    @property
    def sent(self) -> dict[int, int]:
        """Bytes that each rank sends to others."""
        return self._by_rank(self.transfers.from_rank, moving=True)

    @property
    def received(self) -> dict[int, int]:
        """Bytes that each rank receives from others."""
        return self._by_rank(self.transfers.to_rank, moving=True)

    @property
    def kept(self) -> dict[int, int]:
        """Bytes that each rank copies from its own shards."""
        return self._by_rank(self.transfers.to_rank, moving=False)

    def _by_rank(self, rank: Column, *, moving: bool) -> dict[int, int]:
        rows = (self.transfers.from_rank != self.transfers.to_rank) == moving
        ranks = np.array(self.ranks, dtype=np.int64)
        total = group_sums(np.searchsorted(ranks, rank[rows]), self.transfers.nbytes[rows], ranks.size)
        return dict(zip(ranks.tolist(), total.tolist(), strict=True))

    @property
    def links(self) -> dict[tuple[int, int], int]:
        """Bytes that one rank sends to another, by (from, to); pairs of ranks that send nothing are left out."""
        moves = np.flatnonzero(self.transfers.from_rank != self.transfers.to_rank)
        ranks = int(self.transfers.to_rank.max(initial=0)) + 1
        pairs = self.transfers.from_rank[moves] * ranks + self.transfers.to_rank[moves]
        links, number = np.unique(pairs, return_inverse=True)
        total = group_sums(number, self.transfers.nbytes[moves], links.size)
        return {divmod(link, ranks): count for link, count in zip(links.tolist(), total.tolist(), strict=True)}

    def leaving(self, ranks: Iterable[int]) -> int:
        """Return the bytes that a group of ranks sends to ranks outside it.

        Args:
            ranks: Ranks of the group, such as ``range(16)`` for 16 trainers that send to engines.
        """
        group = np.array(sorted(set(ranks)), dtype=np.int64)
        leaves = np.isin(self.transfers.from_rank, group) & ~np.isin(self.transfers.to_rank, group)
        return int(self.transfers.nbytes[leaves].sum())

    def schedule(self, *, max_bytes_in_flight: int = limits.RESHARD_BYTES) -> Schedule:
        """Return the transfers in steps in which no rank sends and receives more than `max_bytes_in_flight` in total.

        Args:
            max_bytes_in_flight: Upper bound of a rank's bytes in one step; at least the size of the largest element.

        Raises:
            MetadataError: The bound isn't an integer, or an element is larger than it.
        """
        item_size = self.target.item_size[self.transfers.key]
        return schedule_transfers(self.transfers, item_size, max_bytes_in_flight=max_bytes_in_flight)

    @property
    def lower_bound(self) -> int:
        """Fewest bytes that any plan moves: each element that a rank lacks in the source counts once for that rank.

        Bytes are counted in the target's dtypes.
        """
        return least_bytes(self.source, self.target)

    def check(self) -> tuple[Problem, ...]:
        """Return all problems of the plan; none if each element of each target shard is written once.

        The check uses only the layouts and the transfers, however they were made. Each box must lie in the stated
        shards, at the stated positions in their memory, on the stated ranks; the boxes that go to a shard must have as
        many elements as the shard, and none in common; and relayed data must have arrived before.
        """
        return transfer_problems(self.source, self.target, self.transfers)

    def explain(self, name: str) -> Provenance:
        """Return the origin of each box of a tensor, on every rank; its text is a table.

        Args:
            name: Key of the tensor. If the target was passed as trees, also the tensor's path (entries joined by dots),
                or a factory's key, which stands for all tensors that the factory builds.

        Raises:
            KeyMismatch: No shard of the target belongs to such a tensor.
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

        docs/resharding.md describes the document. A field never changes its meaning: if one must, the document gets a
        new version.

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
        """Return the plan that `to_json` wrote, after checking it as `check` does.

        Raises:
            MetadataError: The text isn't a plan of this version, or the plan doesn't fill its target.
            ShapeError: A side has 2**62 bytes or more.
        """
        return cls(*plan_parts(text))

    def inverse(self) -> ReshardPlan:
        """Return the plan for the way back, from the target's layout into the source's, with cast tensors cast back.

        Raises:
            KeyMismatch: The source has tensors that the target lacks.
            ShapeError: A tensor's dtype can't be converted back, such as integers that became fractions.
            IntegrityError: The target doesn't hold all elements of the source.
        """
        # The way back is planned anew, not with reversed transfers: if several ranks received an element, one of them
        # is enough to send it back, and none is needed if its owner still has it. Tensors that this plan casts are cast
        # back, whatever other tensors there are.
        return _planned(self.target, self.source, SHORTEST_CUT, cast=bool(self.casts), is_plain=self.casts.__contains__)


def plan_reshard(
    source: ShardColumns | RankTrees,
    target: ShardColumns | RankTrees,
    *,
    shortest_cut: int = SHORTEST_CUT,
    cast: bool = False,
    plain: Sequence[str] = (),
) -> ReshardPlan:
    """Return the plan that moves tensors from one layout into another.

    Elements that a rank holds already stay there. All others come from a rank that has them. Among replicas, the
    senders are chosen so that all send about as much, and a box may be cut to come from several ranks. A rank receives
    an element once, even if several of its shards want it. Ties break by key, position and rank, never by the order of
    rows, so that every rank computes the same plan, and no plan is exchanged.

    Tensors that only the source has are left out. Global shapes must be the same on both sides: there is no padding,
    and `allow_shape_mismatch` has no effect here. Dtypes must be equal too unless `cast` is true.

    Args:
        source: Shards of all ranks before the resharding: columns, or each rank's tree, by rank. Data isn't used, so
            metadata is enough: the result of `without_data`, or of `load_tensors_metadata` for a checkpoint.
        target: Shards of all ranks after the resharding, with the same numbering of ranks; the groups of ranks may
            overlap or be disjoint.
        shortest_cut: Lower bound in bytes of the parts into which a box is cut between senders.
        cast: Whether tensors are converted to the target's dtypes, as `load` does, before they are sent.
        plain: Patterns of keys whose values may be converted without their stored scales, as for `load`.

    Raises:
        TreeError: A side isn't a tree for each rank.
        KeyMismatch: The target has a tensor that the source lacks, or a pattern matches nothing in the source.
        ShapeError: A tensor's global shape differs; or its dtype differs and isn't cast, can't be cast, or needs its
            scales; or a side has 2**62 bytes or more.
        MetadataError: `shortest_cut` isn't an integer.
        IntegrityError: Main replicas of the source overlap or exceed their tensor, or no rank holds some wanted
            elements.

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
    kept_routes, pieces = own_routes(places, after, cut_pieces(places, after))
    pieces = located_pieces(places, after, pieces)
    check_gaps(after, pieces)
    # Repeats are found after the check and before senders are chosen: a rank receives such elements once, so they
    # mustn't count twice in a sender's load.
    repeats, pieces = repeat_routes(after, pieces)
    routes = sent_routes(places, after, pieces, shortest)
    return ReshardPlan(before, after, as_transfers(before, after, joined_rows([kept_routes, repeats, routes])), names)


def _columns(layout: ShardColumns | RankTrees) -> ShardColumns:
    return layout if isinstance(layout, ShardColumns) else tree_columns(layout)


# Peak memory of each rank.


def peak_bytes(plan: ReshardPlan, schedule: Schedule) -> dict[int, int]:
    """Return each rank's peak memory for tensors while a schedule of the plan is carried out, in bytes.

    It includes the data of all its source and target shards, both held from beginning to end, and the buffers of the
    largest step: the rank's sent and received messages, each once, freed before the next step. So no rank needs more
    than its shards and the schedule's `max_bytes_in_flight`. Other memory of an executor or a communication library
    isn't included. Target shards that share the memory of source shards are counted twice.

    Args:
        plan: The plan.
        schedule: A schedule of that plan.

    Raises:
        MetadataError: The schedule belongs to another plan.

    Examples:
        >>> import torch, shardtree as st
        >>> def tree(rank, axis):
        ...     part = torch.zeros(2, 2).chunk(2, axis)[rank]
        ...     return {"w": st.ShardedTensor.from_rank_offsets("w", part, (axis, rank, 2))}
        >>> plan = st.plan_reshard([tree(0, 0), tree(1, 0)], [tree(0, 1), tree(1, 1)])
        >>> peak_bytes(plan, plan.schedule()), peak_bytes(plan, plan.schedule(max_bytes_in_flight=4))
        ({0: 24, 1: 24}, {0: 20, 1: 20})
    """
    check_type("peak_bytes", "plan", plan, ReshardPlan, "Pass the result of `plan_reshard`.")
    check_type("peak_bytes", "schedule", schedule, Schedule, "Pass the result of `plan.schedule()`.")
    _check_schedule(plan, schedule)
    ranks = np.array(plan.ranks, dtype=np.int64)
    sides = (plan.source, plan.target)
    shard_bytes = sum(group_sums(np.searchsorted(ranks, side.rank), side.nbytes, ranks.size) for side in sides)
    places = [np.searchsorted(ranks, column) for column in (schedule.from_rank, schedule.to_rank)]
    # Rows of (step, rank) are sparse: a table of all steps by all ranks would be far larger than the schedule.
    at, number = np.unique(schedule.step * ranks.size + np.stack(places), return_inverse=True)
    flying = group_sums(number.ravel(), np.tile(schedule.nbytes, 2), at.size)
    most = np.zeros(ranks.size, dtype=np.int64)
    if at.size:
        np.maximum.at(most, at % ranks.size, flying)
    return dict(zip(ranks.tolist(), (shard_bytes + most).tolist(), strict=True))


def _check_schedule(plan: ReshardPlan, schedule: Schedule) -> None:
    """Raise an error unless each piece of the schedule belongs to a transfer of the plan between the same ranks."""
    transfers, rows = plan.transfers, schedule.transfer
    if not rows.size or (
        rows.max() < len(transfers)
        and np.array_equal(transfers.from_rank[rows], schedule.from_rank)
        and np.array_equal(transfers.to_rank[rows], schedule.to_rank)
    ):
        return
    heading, fix = "peak_bytes: the schedule was not made from this plan", "Pass the result of this plan's `schedule`."
    found = f"{plural(len(schedule), 'piece')}, some of which belong to no transfer of this plan"
    expected = "only pieces of transfers of this plan"
    raise MetadataError(error_text(heading, found=found, expected=expected, fix=fix))
