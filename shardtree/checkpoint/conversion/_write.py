"""Writing a destination batch by batch, each as one rank of a save, shared out over processes; and committing it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn

from ...errors import (
    CheckpointingException,
    RemoteError,
    StrategyError,
    TreeError,
    UnsafeFile,
    UnsupportedValue,
    WorldError,
    error_text,
)
from ...layouts import ShardColumns, join_columns, shard_columns
from ...mapping import ShardedObject, ShardedTensor
from ...storage import MemoryStorage, Storage, can
from ...strategies import AsyncRequest, PendingSave, SaveOptions, Strategies, StrategyAction
from ...trees import HOLE
from ...world import World, gather, on_rank_zero
from .._dispatch import Backends, Choice, strategy_of
from ..saving._commit import save_request
from ..saving._start import RunningSave
from ._journal import Journal, announcer, recall, record, recorded, recording, remove_others
from ._plan import Batch, Plan
from ._single import SingleFile
from ._source import StoredObject

# One process plays the ranks of a save in turn, a batch each: so every format streams with its ordinary save functions.


class Turn(World):
    """One rank's turn. All ranks would send the same values, so collectives are identities.

    Examples:
        >>> turn = Turn(2, 4)
        >>> turn, turn.broadcast("here"), turn.all_gather(1)
        (<Turn: rank 2 of 4>, 'here', [1, 1, 1, 1])
    """

    __slots__ = ()

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size, 0.0)

    def all_gather(self, value: Any) -> list[Any]:
        """Return the value for every rank."""
        return [value] * self.size

    def broadcast(self, value: Any, root: int = 0) -> Any:
        """Return the value."""
        return value

    def barrier(self) -> None:
        """Do nothing."""

    def all_to_all(self, values: Sequence[Any]) -> list[Any]:
        """Return what this rank would receive if all ranks sent the same."""
        return [values[self.rank]] * self.size

    def send(self, value: Any, to: int) -> NoReturn:
        """Raise: no other rank is there to receive."""
        raise WorldError(error_text(f"send(to={to}): the ranks of a conversion take turns"))

    def recv(self, source: int) -> NoReturn:
        """Raise: no other rank is there to send."""
        raise WorldError(error_text(f"recv(source={source}): the ranks of a conversion take turns"))


Watched = Callable[[ShardedTensor], ShardedTensor]


@dataclass(frozen=True, slots=True, eq=False)
class Destination:
    """Where a conversion writes to, and in which format.

    Attributes:
        storage: the folder.
        choices: the formats of the shards and of the common state, as the caller named them.
        backends: the backends of these choices.
        strategies: the dispatch table; None for the process's.
        options: how it is written.
        single: the file that is wanted of the folder; None for the folder itself.
    """

    storage: Storage
    choices: tuple[Choice, Choice]
    backends: Backends
    strategies: Strategies | None
    options: SaveOptions
    single: SingleFile | None = None


def rehearse_common(destination: Destination, common: Any) -> None:
    """Raise if the destination's format can't hold a common state, which is written to memory alone.

    A format whose common state can't be written alone raises only at the commit, which can be tried again without it.

    Raises:
        UnsupportedValue: it can't, or can't without pickling.
    """
    save_common = strategy_of(
        StrategyAction.SAVE_COMMON, destination.choices[1], destination.backends[1], destination.strategies
    )
    options = replace(destination.options, durable=False)
    try:
        save_common(PendingSave(MemoryStorage(), "save-rehearsal", Turn(0, 1), None, options), common)
    except StrategyError:
        return
    except (UnsupportedValue, TreeError, UnsafeFile) as error:
        error.add_note("convert: leave_out=['common'] converts without the common state, transform_common= changes it")
        raise


def rehearse_tensors(destination: Destination, tensors: Sequence[ShardedTensor]) -> None:
    """Raise if the destination's format can't hold one of the tensors; their save is prepared and not run.

    Raises:
        StrategyError: the format can't be written at all.
        UnsupportedValue: it lacks a dtype.
    """
    save = PendingSave(MemoryStorage(), "save-rehearsal", Turn(0, 1), None, destination.options, shard_columns(tensors))
    writes, chosen = (tuple(tensors), ()), (destination.choices, destination.backends, destination.strategies)
    save_request(save, RunningSave(), writes, {}, *chosen)


def write_batches(
    destination: Destination, journal: Journal, save_id: str, plan: Plan, common: Any, watched: Watched, world: World
) -> int:
    """Write and commit a destination, and return how many batches were there already; every rank calls it.

    Args:
        destination: where to, and how.
        journal: has what earlier calls have written, and records what this one writes.
        save_id: the name of the save.
        plan: what is written, batch by batch.
        common: the common tree, with holes where shards were.
        watched: returns a shard whose elements are seen when they are read.
        world: the ranks that share out the batches.
    """
    count, durable = len(plan.batches), destination.options.durable
    columns = join_columns([shard_columns(batch.tensors, rank) for rank, batch in enumerate(plan.batches)])
    state: Any = None

    def request_of(number: int) -> _Prepared:
        nonlocal state
        # From batch to batch: what a format computes of all batches' layout, it computes once.
        made = _request(destination, journal, save_id, plan.batches, common, columns, state, watched, number)
        state = made[0].state
        return made

    first: list[_Prepared] = []
    results: dict[int, Any] = {}

    def look() -> list[int]:
        # Made first and kept: the commit belongs to the request of batch 0, which is rank 0's for that.
        first.append(request_of(0))
        known = {number: recall(journal, number) for number in recorded(journal) & {*range(count)}}
        results.update((number, result) for number, result in known.items() if result is not HOLE)
        return sorted(results)

    def write(numbers: Sequence[int]) -> dict[int, Any]:
        prepared = (first[0] if not number else request_of(number) for number in numbers)
        return dict(_written(plan, journal, numbers, prepared, durable=durable))

    done = on_rank_zero(world, "convert: look at the journal", look)
    todo = sorted({*range(count)} - {*done})
    for dealt in deal([(number, plan.batches[number].nbytes) for number in todo], world.size):
        for written in gather(world, "convert: write", partial(write, dealt[world.rank])):
            results.update(written if world.rank == 0 else {})  # others don't keep what only the commit needs
    commit = partial(_commit, destination, journal, first, results)
    on_rank_zero(world, "convert: commit", commit)
    return len(done)


_Prepared = tuple[AsyncRequest[Any], set[str]]


def _written(
    plan: Plan, journal: Journal, numbers: Sequence[int], prepared: Iterable[_Prepared], *, durable: bool
) -> Iterator[tuple[int, Any]]:
    """Write batches, each when its turn comes, and yield their numbers and results."""
    for number, (request, names) in zip(numbers, prepared, strict=True):
        # Small reads of the batch are planned together, before the request makes them one by one.
        plan.reader.expect(shard.data for shard in plan.batches[number].tensors)
        with _own_error():
            result = request.async_fn()
        record(journal, number, result, names, durable=durable)
        yield number, result


def _commit(destination: Destination, journal: Journal, first: Sequence[_Prepared], results: Mapping[int, Any]) -> None:
    ((request, _),) = first
    with _own_error():
        request.commit([results[number] for number in range(len(results))])
        request.clean_up()
    if can(destination.storage).late_requests:
        with suppress(CheckpointingException):  # the checkpoint counts by now
            remove_others(journal)
    for finalize in request.finalize_fns:
        finalize()


_ROUND = 16  # batches of a rank between two meetings: the others learn of a failure then, and nobody waits for long


def deal(sized: Sequence[tuple[int, int]], ranks: int) -> list[list[list[int]]]:
    """Return what each rank does in each round: runs of neighbours, level by bytes. The first is always rank 0's.

    Args:
        sized: (number, bytes) of each piece of work, in order.
        ranks: how many share them out.

    Examples:
        >>> deal([(0, 5), (1, 1), (2, 1), (3, 3)], 2)
        [[[0], [1, 2, 3]]]
        >>> deal([(number, 1) for number in range(40)], 1) == [[[*range(16)]], [[*range(16, 32)]], [[*range(32, 40)]]]
        True
    """
    rounds = []
    for start in range(0, len(sized), _ROUND * ranks):
        part = sized[start : start + _ROUND * ranks]
        total = sum(nbytes for _, nbytes in part)
        hands: list[list[int]] = [[] for _ in range(ranks)]
        before = 0
        for place, (number, nbytes) in enumerate(part):
            # By where its middle lies; batches without bytes, as of objects, are dealt out by their number.
            share_of = (2 * before + nbytes) * ranks // (2 * total) if total else place * ranks // len(part)
            hands[min(share_of, ranks - 1) if number else 0].append(number)
            before += nbytes
        rounds.append(hands)
    return rounds


@contextmanager
def _own_error() -> Iterator[None]:
    """Raise the cause of a RemoteError: one process plays all ranks of a save, and its own error says more."""
    try:
        yield
    except RemoteError as error:
        if error.__cause__ is None:
            raise
        raise error.__cause__ from None


def _request(
    destination: Destination,
    journal: Journal,
    save_id: str,
    batches: Sequence[Batch],
    common: Any,
    columns: ShardColumns,
    state: Any,
    watched: Watched,
    rank: int,
) -> _Prepared:
    """Return the request that writes a batch, and the names of the files that it has written."""
    noted, names = recording(destination.storage, announcer(journal, rank))
    turn = Turn(rank, len(batches))
    pending = PendingSave(noted, save_id, turn, None, destination.options, columns, state=state)
    writes = tuple(map(watched, batches[rank].tensors)), tuple(map(_read, batches[rank].objects))
    try:
        request = save_request(
            pending, RunningSave(), writes, common, destination.choices, destination.backends, destination.strategies
        )
    except UnsupportedValue as error:
        keys = sorted({item.key for item in batches[rank].objects})
        if keys:
            named = repr(keys) if len(keys) <= _MOST_NAMED else "[...]"
            error.add_note(f"convert: leave_out={named} converts without these objects")
        raise
    return request, names


_MOST_NAMED = 5  # a model has an object of the same name in each layer: a pattern names them better than a list


def _read(item: ShardedObject) -> ShardedObject:
    return replace(item, data=item.data.read()) if isinstance(item.data, StoredObject) else item
