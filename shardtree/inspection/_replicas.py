"""check_replicas: the comparison of a tensor's replicas on all ranks, or of the copies in a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from os import PathLike
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch

from ..core import limits
from ..core.ambient import shielded
from ..core.codec import row_major_bits
from ..core.fingerprints import bytes_total, piece_total, shard_totals, unlike_replicas
from ..core.geometry import box_slices, slices
from ..core.layouts import ShardColumns, join_columns, place_text, shard_columns, tensor_shards
from ..core.mapping import ShardedTensor
from ..core.offences import offence_text
from ..core.plans import held_places
from ..errors import TreeError, error_text, rank_text, shorten
from ..shell.checkpoint import given_options, open_at, sharded_backend, sharded_metadata
from ..shell.storage import Directory, Storage, in_threads
from ..shell.table import Copies, LoadOptions, Resolution, Strategies, StrategyAction, find_strategy
from ..shell.world import World, agree, current_world, gather, on_rank_zero, one_process, share
from ._differences import ValueDifference, joint_difference, value_difference

T = TypeVar("T")
Holders = tuple[int, ...] | tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ReplicaDifference:
    """Copies of a part of a tensor that equal each other, but differ from the main replica.

    Attributes:
        key: Key of the tensor.
        holders: Ranks or files that hold these copies.
        than: Ranks or files that hold the main replica or a copy equal to it. In a checkpoint, the first copy counts as
            the main replica.
        box: Part of the tensor, as a text.
        values: Difference of the elements, with the main replica's on the left; its `first` is an index in the whole
            tensor. None if dtypes or shapes differ, or one side has no elements.
    """

    where: ClassVar[str] = ""  # empty, since `what` names the box
    fix: ClassVar[str] = ""

    key: str
    holders: Holders
    than: Holders
    box: str
    values: ValueDifference | None

    __str__ = offence_text

    @property
    def what(self) -> str:
        """The ranks or files whose copies differ from the main replica, and the difference, as a text."""
        what, values = _unlike(self.holders, self.than), self.values
        if values is None:
            return f"{what}: no elements, or another dtype or shape"
        ulps = "" if values.ulps is None else f" ({values.ulps} ulp)"
        largest = "" if values.largest is None else f", by at most {values.largest}{ulps}"
        amount = f"{values.count} of {values.elements} in {self.box}{largest}"
        return f"{what}: {amount}; the first at {values.first}: {values.right} and {values.left}"


def unlike_text(columns: ShardColumns, rows: Sequence[int], main: Sequence[int]) -> str:
    """Return a line about ranks that hold other elements of a tensor than the main replica's ranks.

    Args:
        columns: Shards of all ranks.
        rows: Rows of the differing replicas.
        main: Rows of the main replica and of replicas equal to it.
    """
    key = columns.keys[int(columns.key[rows[0]])]
    return f"{key!r}: {_unlike(_ranks(columns, rows), _ranks(columns, main))}"


def _ranks(columns: ShardColumns, rows: Sequence[int]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(columns.rank[rows].tolist()))


def _unlike(holders: Holders, than: Holders) -> str:
    if holders == than:
        return f"{_holders(holders)} holds it twice, with different elements"
    verb = "holds" if len(holders) == 1 else "hold"
    return f"{_holders(holders)} {verb} other elements than {_holders(than)}"


def _holders(holders: Holders) -> str:
    numbers = [each for each in holders if isinstance(each, int)]
    return rank_text(numbers) if numbers else ", ".join(shorten(map(repr, holders)))


def tree_shards(doing: str, tree: Any) -> list[ShardedTensor]:
    """Return the tensor shards in a tree, also those that its factories build.

    Raises:
        TreeError: The argument isn't a tree.
    """
    if not isinstance(tree, (dict, list, tuple)):
        expected = "a dict, list or tuple of shards, or a checkpoint's path, URL or Storage"
        heading = f"{doing}: the argument is neither a tree nor a checkpoint"
        raise TreeError(error_text(heading, found=type(tree).__name__, expected=expected))
    return tensor_shards(tree)


@shielded
def check_replicas(
    tree: Any | Directory,
    *,
    world: Any = None,
    strategies: Strategies | None = None,
    options: LoadOptions | None = None,
) -> tuple[ReplicaDifference, ...]:
    """Compare the replicas of a tree's tensors bit for bit, and return the differences; every rank calls it.

    Ranks send a checksum of each shard that they share. Only if checksums differ, the main replica's elements are sent,
    piece by piece, to one rank of each group with equal checksums. `SaveOptions(check_replicas=True)` calls this before
    a save.

    Args:
        tree: Dicts, lists and tuples of shards, factories and plain values, each rank's own. Shards of the same box are
            compared, such as those of data-parallel ranks, or layer norms of tensor-parallel ranks. Or a path, URL or
            `Storage` of a checkpoint whose format gives each rank a file with its own copies; rank 0 compares these.
        world: World of the ranks that take part; by default torch.distributed's default group, or else this process
            alone.
        strategies: Dispatch table, for a checkpoint.
        options: Options for reading a checkpoint: only `parameter_names` and `types` are used.

    Returns:
        A difference for each group of ranks whose elements differ from the main replica's, the same on all ranks;
        nothing if all are equal. Its text names the ranks, the number of elements, the difference, and the first
        element.

    Raises:
        TreeError: The argument is neither a tree nor a checkpoint.
        IntegrityError: Ranks disagree about a tensor's dtype or shape.
        NotACheckpoint: There is no checkpoint at the path.

    Examples:
        >>> import torch, shardtree as st
        >>> def drifted(world):
        ...     norm = torch.ones(4)
        ...     norm[2] += 2**-23 * (world.rank == 1)
        ...     shard = st.ShardedTensor.from_rank_offsets("norm", norm, replica_id=world.rank)
        ...     return check_replicas([shard], world=world)
        >>> (one,) = st.simulate(3, drifted)[0]
        >>> one.key, one.holders, one.than, one.values.count, one.values.first, one.values.ulps
        ('norm', (1,), (0, 2), 1, (2,), 1)
    """
    ranks = current_world(world)
    if isinstance(tree, (str, PathLike, Storage)):
        return on_rank_zero(ranks, "check_replicas: read", partial(_differing_copies, tree, strategies, options))
    shards = agree(ranks, "check_replicas: find the shards", partial(tree_shards, "check_replicas", tree))
    parts = gather(ranks, "check_replicas: describe shards", partial(shard_columns, shards, ranks.rank))
    return differing_replicas(ranks, lambda: (join_columns(parts), shards))


Join = Callable[[], tuple[ShardColumns, Sequence[ShardedTensor]]]


def differing_replicas(world: World, join: Join) -> tuple[ReplicaDifference, ...]:
    """Return the differing replicas of all ranks' shards; collective. If none differ, it takes one all-gather.

    Args:
        world: World of the ranks that take part.
        join: Function that returns the shards of all ranks as columns, sorted by rank, and this rank's shards
            themselves, in the same order.
    """

    def sum_shards() -> tuple[ShardColumns, Sequence[ShardedTensor], Any]:
        columns, shards = join()
        local = np.flatnonzero(columns.rank == world.rank)
        place, places = held_places(columns)
        # A shard that no other rank holds has no counterpart, so no pass over its memory is needed.
        shared = np.flatnonzero(np.bincount(place, minlength=places)[place[local]] > 1)
        sums = np.zeros(local.size, dtype=np.uint64)
        sums[shared] = shard_totals([shards[number] for number in shared.tolist()], partial(in_threads, piece_total))
        return columns, shards, sums

    (columns, shards, _), sums = share(world, "check_replicas: sum", sum_shards, itemgetter(2))
    unlike = unlike_replicas(columns, np.concatenate(sums))
    pairs = [(groups[0], group) for groups in unlike for group in groups[1:]]
    if not pairs:
        return ()
    local = dict(zip(np.flatnonzero(columns.rank == world.rank).tolist(), shards, strict=True))
    values, failures = _pair_differences(world, columns, local, pairs)
    by_rank = gather(world, "check_replicas: compare", partial(_unless, failures, values))
    differences = {number: value for differences_of_rank in by_rank for number, value in differences_of_rank.items()}
    return tuple(_replica_difference(columns, pair, differences[number]) for number, pair in enumerate(pairs))


Pair = tuple[list[int], list[int]]


def _unless(failures: Sequence[Exception], values: T) -> T:
    if failures:
        raise failures[0]
    return values


def _pair_differences(
    world: World, columns: ShardColumns, own: Mapping[int, ShardedTensor], pairs: Sequence[Pair]
) -> tuple[dict[int, ValueDifference], list[Exception]]:
    """Compare differing replicas element by element; collective.

    Args:
        world: World of the ranks that take part.
        columns: Shards of all ranks.
        own: This rank's shards, by row of `columns`.
        pairs: Pairs ``(main, others)``: rows of replicas that equal the main replica, and rows of replicas that equal
            each other but differ from it. The first replica in `main` is sent to the rank of the first one in `others`,
            and compared there.

    Returns:
        ``(differences, failures)``: the differences that this rank found, by index in `pairs`, and its errors.
    """
    differences: dict[int, ValueDifference] = {}
    failures: list[Exception] = []
    for number, (main, others) in enumerate(pairs):
        giver, taker = main[0], others[0]
        sender, receiver = columns.rank[[giver, taker]].tolist()
        nbytes = int(columns.elements[giver] * columns.item_size[columns.key[giver]])
        for begin in range(0, nbytes, limits.CHECKED_BYTES):
            size = min(limits.CHECKED_BYTES, nbytes - begin)
            bits = {
                row: _attempt(failures, partial(_bits, own[row], begin, size)) for row in (giver, taker) if row in own
            }
            # A rank that failed sends zeros, since the receiver waits for data.
            bits_by_receiver = {receiver: bits.get(giver)} if giver in own and sender != receiver else {}
            outgoing = {
                to: torch.zeros(size, dtype=torch.uint8, device="cpu") if message is None else message
                for to, message in bits_by_receiver.items()
            }
            is_told = taker in own and sender != receiver
            incoming = {sender: torch.empty(size, dtype=torch.uint8, device="cpu")} if is_told else {}
            world.exchange(outgoing, incoming)
            if taker in own and not failures:
                ends = incoming.get(sender, bits.get(giver)), bits[taker]
                part = _attempt(failures, partial(_difference, own[taker], *ends, begin // own[taker].dtype.itemsize))
                if part is not None:
                    before = differences.get(number)
                    differences[number] = part if before is None else joint_difference(before, part)
    return differences, failures


def _attempt(failures: list[Exception], fn: Callable[[], T]) -> T | None:
    try:
        return fn()
    except Exception as error:
        failures.append(error)
        return None


def _bits(shard: ShardedTensor, begin: int, size: int) -> torch.Tensor:
    return row_major_bits(shard.data)[begin : begin + size]


def _difference(shard: ShardedTensor, main: Any, other: Any, begin: int) -> ValueDifference | None:
    left, right = main.view(shard.dtype), other.view(shard.dtype)
    difference = value_difference(shard.key, left, right, limits.CHECKED_BYTES, _ignore)
    return None if difference is None else replace(difference, first=(begin + difference.first[0],))


def _ignore(nbytes: int) -> None:
    pass


def _replica_difference(columns: ShardColumns, pair: Pair, values: ValueDifference) -> ReplicaDifference:
    row = pair[0][0]
    key, start, stop = (int(column[row]) for column in (columns.key, columns.start, columns.stop))
    axes = len(columns.kinds[key].global_shape)
    box = box_slices(columns.offset[row], columns.shape[row], axes)
    inside = (
        np.unravel_index(values.first[0] + max(start, 0), tuple(span.stop - span.start for span in box)) if axes else ()
    )
    first = tuple(int(span.start + index) for span, index in zip(box, inside, strict=True))
    values = replace(values, first=first, elements=int(columns.elements[row]))
    than, holders = (_ranks(columns, rows) for rows in pair)
    place = place_text(box, slice(start, stop) if start >= 0 else None)
    return ReplicaDifference(columns.keys[key], holders, than, place, values)


def _differing_copies(
    directory: Directory, strategies: Strategies | None, options: LoadOptions | None
) -> tuple[ReplicaDifference, ...]:
    """Return the differing copies in a checkpoint whose format stores each rank's copies in a file of its own.

    Only one part of a tensor is in memory at a time. For other formats, the result is empty.
    """
    checkpoint = open_at(directory, one_process(), given_options("open", options, LoadOptions), strategies)
    row = find_strategy(StrategyAction.RESOLVE, *sharded_backend(checkpoint.fields), strategies=strategies)
    # Only keys are listed: for states in buckets, the metadata itself would raise an error if copies differ.
    keys = sharded_metadata(checkpoint, None, None, strategies).keys() if row is not None else ()
    resolution: Resolution | None = None if row is None else row(checkpoint, keys, True)
    if resolution is None or resolution.copies is None:
        return ()
    return tuple(difference for copies in resolution.copies() for difference in _unlike_copies(copies))


def _unlike_copies(copies: Copies) -> Iterator[ReplicaDifference]:
    groups: dict[Any, tuple[list[str], ValueDifference | None]] = {}
    first = copies.held[0][1]()
    for name, read in copies.held:
        data = read()
        kind = None if data is None else (data.dtype, tuple(data.shape), bytes_total(row_major_bits(data)))
        if kind not in groups:
            is_like = kind is not None and kind[:2] == (first.dtype, tuple(first.shape))
            how = value_difference(copies.key, first, data, limits.CHECKED_BYTES, _ignore) if is_like else None
            if how is not None:
                at = tuple(low + index for low, index in zip(copies.offset, how.first, strict=True))
                how = replace(how, first=at, elements=first.numel())
            groups[kind] = [], how
        groups[kind][0].append(name)
    than, *others = groups.values()
    box = place_text(slices(copies.offset, first.shape))
    for names, how in others:
        yield ReplicaDifference(copies.key, tuple(names), tuple(than[0]), box, how)
