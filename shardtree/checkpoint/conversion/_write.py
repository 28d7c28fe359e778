"""Writing a destination batch by batch, each as one rank of a save, and committing it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn

from ...errors import (
    CheckpointingException,
    StrategyError,
    TreeError,
    UnsafeFile,
    UnsupportedValue,
    WorldError,
    error_text,
)
from ...layouts import ShardColumns, join_columns, shard_columns
from ...mapping import ShardedObject, ShardedTensor
from ...storage import MemoryStorage, Storage, takes_late_requests
from ...strategies import AsyncRequest, PendingSave, SaveOptions, Strategies, StrategyAction
from ...trees import HOLE
from ...world import World
from .._dispatch import Backends, Choice, strategy_of
from ..saving._commit import save_request
from ._journal import Journal, RecordingStorage, announcer, recall, record, recorded, recording, remove_others
from ._plan import Batch, Plan
from ._source import StoredObject, expect_tensors

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
    """

    storage: Storage
    choices: tuple[Choice, Choice]
    backends: Backends
    strategies: Strategies | None
    options: SaveOptions


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
    save_request(save, (tuple(tensors), ()), {}, destination.choices, destination.backends, destination.strategies)


def write_batches(
    destination: Destination, journal: Journal, save_id: str, plan: Plan, common: Any, watched: Watched
) -> int:
    """Write and commit a destination, and return how many batches were there already.

    Args:
        destination: where to, and how.
        journal: has what earlier calls have written, and records what this one writes.
        save_id: the name of the save.
        plan: what is written, batch by batch.
        common: the common tree, with holes where shards were.
        watched: returns a shard whose elements are seen when they are read.
    """
    columns = join_columns([shard_columns(batch.tensors, rank) for rank, batch in enumerate(plan.batches)])
    request_of = partial(_request, destination, journal, save_id, plan.batches, common, columns, watched)
    # Made first and kept: the commit belongs to rank 0's request.
    first, _ = pair = request_of(0)
    results: list[Any] = []
    resumed, there = 0, recorded(journal)
    for rank, batch in enumerate(plan.batches):
        known = recall(journal, rank) if rank in there else HOLE
        resumed += known is not HOLE
        if known is HOLE:
            request, noted = request_of(rank) if rank else pair
            # Small reads of the batch are planned together, before the request makes them one by one.
            expect_tensors(plan.reader, batch.tensors)
            known = request.async_fn()
            record(journal, rank, known, noted.lengths, durable=destination.options.durable)
        results.append(known)
    first.commit(results)
    first.clean_up()
    if takes_late_requests(destination.storage):
        with suppress(CheckpointingException):  # the checkpoint counts by now
            remove_others(journal)
    for finalize in first.finalize_fns:
        finalize()
    return resumed


def _request(
    destination: Destination,
    journal: Journal,
    save_id: str,
    batches: Sequence[Batch],
    common: Any,
    columns: ShardColumns,
    watched: Watched,
    rank: int,
) -> tuple[AsyncRequest[Any], RecordingStorage]:
    """Return the request that writes a batch, and the storage that records its files."""
    noted = recording(destination.storage, announcer(journal, rank))
    pending = PendingSave(noted, save_id, Turn(rank, len(batches)), None, destination.options, columns)
    writes = tuple(map(watched, batches[rank].tensors)), tuple(map(_read, batches[rank].objects))
    request = save_request(pending, writes, common, destination.choices, destination.backends, destination.strategies)
    return request, noted


def _read(item: ShardedObject) -> ShardedObject:
    return replace(item, data=item.data.read()) if isinstance(item.data, StoredObject) else item
