"""Writing and committing a destination: each batch is written like one rank of a save; processes share the batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Lock
from typing import Any, NoReturn

from ..core.layouts import ShardColumns, join_columns, shard_columns
from ..core.lazy import LazyTensor
from ..core.mapping import ShardedObject, ShardedTensor
from ..errors import (
    CheckpointingException,
    RemoteError,
    StrategyError,
    TreeError,
    UnsafeFile,
    UnsupportedValue,
    WorldError,
    error_text,
)
from ..shell.checkpoint import strategy_of
from ..shell.checkpoint.saving import Formats, Saver, steps_of_formats
from ..shell.storage import Storage, can, in_threads, threads_of
from ..shell.table import AsyncRequest, PendingSave, SaveOptions, StrategyAction
from ..shell.world import World, gather, on_rank_zero
from ..stores import MemoryStorage
from ._journal import Journal, announcer, record, recording, remove_others, results_of
from ._passage import Passage, ReadTurn
from ._plan import Plan
from ._single import SingleFile
from ._source import StoredObject

# One process plays the ranks of a save in turn, a batch each: so every format streams with its ordinary save functions.


_NO_MESSAGES = "Use a save function that calls neither send nor recv."


class Turn(World):
    """The world in which one process plays one rank of many; collectives act as if all ranks sent the same value.

    Examples:
        >>> turn = Turn(2, 4)
        >>> turn, turn.broadcast("here"), turn.all_gather(1)
        (<Turn: rank 2 of 4>, 'here', [1, 1, 1, 1])
    """

    __slots__ = ()

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size, 0.0)

    def all_gather(self, value: Any) -> list[Any]:
        """Return a list with the value once for each rank."""
        return [value] * self.size

    def broadcast(self, value: Any, root: int = 0) -> Any:
        """Return the value."""
        return value

    def barrier(self) -> None:
        """Do nothing."""

    def all_to_all(self, values: Sequence[Any]) -> list[Any]:
        """Return the values that this rank would receive if all ranks sent the same."""
        return [values[self.rank]] * self.size

    def send(self, value: Any, to: int) -> NoReturn:
        """Raise WorldError: no other rank is there to receive."""
        raise WorldError(error_text(f"send(to={to}): a conversion runs one rank at a time", fix=_NO_MESSAGES))

    def recv(self, source: int) -> NoReturn:
        """Raise WorldError: no other rank is there to send."""
        raise WorldError(error_text(f"recv(source={source}): a conversion runs one rank at a time", fix=_NO_MESSAGES))


@dataclass(frozen=True, slots=True, eq=False)
class ConversionTarget:
    """The storage and the format of a conversion's result.

    Attributes:
        storage: Storage of the folder.
        formats: Formats of the shards and of the common state.
        options: Options for writing.
        single: File to which the folder's model is moved at the end; None if the folder is the result.
    """

    storage: Storage
    formats: Formats
    options: SaveOptions
    single: SingleFile | None = None


def rehearse_common(destination: ConversionTarget, common: Any) -> None:
    """Raise an error if the destination's format can't hold a common state, by writing it to memory.

    For a format that can't write a common state by itself, nothing is checked here: only the commit may raise.

    Raises:
        UnsupportedValue: The format can't hold it, or can't without pickling.
    """
    formats = destination.formats
    save_common = strategy_of(StrategyAction.SAVE_COMMON, formats.choices[1], formats.backends[1], formats.strategies)
    options = replace(destination.options, durable=False)
    try:
        save_common(PendingSave(MemoryStorage(), "save-rehearsal", Turn(0, 1), None, options), common)
    except StrategyError:
        return
    except (UnsupportedValue, TreeError, UnsafeFile) as error:
        error.add_note("convert: leave_out=['common'] converts without the common state, transform_common= changes it")
        raise


def rehearse_tensors(destination: ConversionTarget, tensors: Sequence[ShardedTensor], common: Any) -> None:
    """Raise an error if the destination's format can't hold one of the tensors; their save is prepared but not run.

    Args:
        destination: Storage and format of the destination.
        tensors: All shards of the destination.
        common: Common state, some of which may go to the files of tensors.

    Raises:
        StrategyError: The format can't be written at all.
        UnsupportedValue: The format lacks a dtype.
    """
    save = PendingSave(MemoryStorage(), "save-rehearsal", Turn(0, 1), None, destination.options, shard_columns(tensors))
    steps_of_formats(replace(save, common=common), (tuple(tensors), ()), destination.formats)


_BatchRequest = tuple[AsyncRequest[Any], set[str], ReadTurn]

_AT_ONCE = 4  # batches per rank: one is read, and the others are sent or recorded


@dataclass(slots=True, eq=False)
class Batches:
    """The batches of a destination, which several threads may write.

    Attributes:
        destination: Storage and format of the destination.
        journal: Journal that records written batches.
        save_id: Name of the save.
        plan: Plan of the conversion.
        common: Common tree, with holes in place of shards.
        passage: `Passage` that fingerprints the elements read from the source.
        state: The format's own state from the latest request, passed to the next request; None before the first.
        first: Request of batch 0 on rank 0; None before it is made.
    """

    destination: ConversionTarget
    journal: Journal
    save_id: str
    plan: Plan
    common: Any
    passage: Passage
    state: Any = None
    first: _BatchRequest | None = None
    columns: ShardColumns = field(init=False)
    _gate: Lock = field(default_factory=Lock)
    _lock: Lock = field(default_factory=Lock)

    def __post_init__(self) -> None:
        parts = [shard_columns(batch.tensors, rank) for rank, batch in enumerate(self.plan.batches)]
        self.columns = join_columns(parts)

    def prepare(self, number: int) -> _BatchRequest:
        """Return ``(request, names, turn)`` for a batch; calling the request's `async_fn` writes the batch.

        This adds the names of the written files to the set `names`. The batch is read during `turn`:
        its first read waits until no other batch is being read.
        """
        batch, target, count = self.plan.batches[number], self.destination, len(self.plan.batches)
        lazy = [shard.data for shard in batch.tensors if isinstance(shard.data, LazyTensor)]
        # Small reads of the batch are planned together, before the request makes them one by one.
        turn = ReadTurn(self._gate, partial(self.plan.reader.expect, lazy), sum(data.numel() for data in lazy))
        writes = tuple(self.passage.watch(shard, turn) for shard in batch.tensors), tuple(map(_read, batch.objects))
        recorder, names = recording(target.storage, announcer(self.journal, number))
        pending = PendingSave(recorder, self.save_id, Turn(number, count), None, target.options, self.columns)
        pending = replace(pending, common=self.common, state=self.state)
        try:
            request = Saver(pending, target.formats, steps_of_formats(pending, writes, target.formats)).request()
        except UnsupportedValue as error:
            keys = sorted({item.key for item in batch.objects})
            if keys:
                text = repr(keys) if len(keys) <= _MOST_KEYS else "[...]"
                error.add_note(f"convert: leave_out={text} converts without these objects")
            raise
        self.state = request.state
        return request, names, turn

    def write(self, number: int) -> Any:
        """Write a batch, record it, and return the result that the commit needs."""
        with self._lock:
            request, names, turn = self.first if self.first is not None and not number else self.prepare(number)
        try:
            with _own_error():
                result = request.async_fn()
        finally:
            turn.end()
        self.plan.reader.check()
        record(self.journal, number, result, names, durable=self.destination.options.durable)
        return result


def write_batches(batches: Batches, world: World) -> int:
    """Write and commit a destination, and return the number of batches that were already written; collective.

    Args:
        batches: Batches of the destination.
        world: World of the ranks that share them.
    """
    plan, journal = batches.plan, batches.journal
    results: dict[int, Any] = {}

    def look() -> list[int]:
        # The request of batch 0 is made first and kept, since it commits; therefore rank 0 writes batch 0.
        batches.first = batches.prepare(0)
        results.update(results_of(journal, len(plan.batches)))
        if 0 in results:
            batches.first[-1].end()  # a format may have read something for its request, which isn't run
        return sorted(results)

    def write(numbers: Sequence[int]) -> dict[int, Any]:
        return dict(zip(numbers, in_threads(batches.write, numbers, at_once), strict=True))

    # If each step of a batch is a request, other batches proceed meanwhile: they wait only for their turn to be read.
    ends = (batches.destination.storage, plan.reader.tree.checkpoint.storage)
    at_once = max(threads_of(storage, None, _AT_ONCE) or 1 for storage in ends)
    earlier = on_rank_zero(world, "convert: look at the journal", look)
    todo = sorted({*range(len(plan.batches))} - {*earlier})
    for hands in deal([(number, plan.batches[number].nbytes) for number in todo], world.size):
        for part in gather(world, "convert: write", partial(write, hands[world.rank])):
            results.update(part if world.rank == 0 else {})  # other ranks don't keep results that only the commit needs
    on_rank_zero(world, "convert: commit", partial(_commit, batches, results))
    return len(earlier)


def _commit(batches: Batches, results: Mapping[int, Any]) -> None:
    assert batches.first is not None
    request, *_ = batches.first
    batches.plan.reader.check()  # on behalf of all ranks: this one opened the source
    with _own_error():
        request.commit([results[number] for number in range(len(results))])
        request.clean_up()
    if can(batches.destination.storage).late_requests:
        with suppress(CheckpointingException):  # the checkpoint counts by now
            remove_others(batches.journal)
    for finalize in request.finalize_fns:
        finalize()


_ROUND = 16  # batches of a rank between two collectives, in which ranks learn of failures


def deal(pieces: Sequence[tuple[int, int]], ranks: int) -> list[list[list[int]]]:
    """Return the numbers of the batches that each rank handles, as ``result[round][rank]``.

    A round is the work between two collectives, at most ``16 * ranks`` batches. They are divided among the ranks in
    order, balanced by bytes. Batch 0 is always rank 0's.

    Args:
        pieces: (number, bytes) of each batch, in order.
        ranks: Number of ranks that share the batches.

    Examples:
        >>> deal([(0, 5), (1, 1), (2, 1), (3, 3)], 2)
        [[[0], [1, 2, 3]]]
        >>> deal([(number, 1) for number in range(40)], 1) == [[[*range(16)]], [[*range(16, 32)]], [[*range(32, 40)]]]
        True
    """
    rounds = []
    for start in range(0, len(pieces), _ROUND * ranks):
        part = pieces[start : start + _ROUND * ranks]
        total = sum(nbytes for _, nbytes in part)
        hands: list[list[int]] = [[] for _ in range(ranks)]
        before = 0
        for place, (number, nbytes) in enumerate(part):
            # A batch's rank follows from the position of its middle byte, or from its number if all batches are without
            # bytes.
            share_of = (2 * before + nbytes) * ranks // (2 * total) if total else place * ranks // len(part)
            hands[min(share_of, ranks - 1) if number else 0].append(number)
            before += nbytes
        rounds.append(hands)
    return rounds


@contextmanager
def _own_error() -> Iterator[None]:
    """Return a context that replaces a RemoteError by its cause.

    One process plays all ranks of a save here, so that the cause is its own error, and says more.
    """
    try:
        yield
    except RemoteError as error:
        if error.__cause__ is None:
            raise
        raise error.__cause__ from None


_MOST_KEYS = 5  # a model has an object of the same name in each layer: a pattern names them better than a list


def _read(item: ShardedObject) -> ShardedObject:
    return replace(item, data=item.data.read()) if isinstance(item.data, StoredObject) else item
