"""Steps 5 and 6 of a save: each rank writes its files; rank 0 writes the index and publishes the checkpoint."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ....errors import AlreadyACheckpoint, CheckpointReplaced, OutcomeUnknown, error_text
from ...storage import (
    Claim,
    NewFolder,
    SaveReport,
    can,
    is_claimed,
    locked,
    owner_note,
    release,
    remove_folder,
    sync_folder,
    take_refusals,
)
from ...table import (
    METADATA_FILE,
    OWNER_FILE,
    AsyncRequest,
    PendingSave,
    Strategies,
    abandoning,
    check_alone,
    check_unchanged,
    make_save_folder,
    replace_metadata,
)
from ...world import step
from ._clean_up import clean_up
from ._formats import Fields, Formats, FormatSteps
from ._replace import check_same, swap_folders
from ._start import beside, end, is_recognized

logger = logging.getLogger("shardtree")


@dataclass(slots=True, eq=False)
class Saver:
    """One rank's share of a running save, from the first write to the clean-up, or until it is abandoned.

    Every rank calls `write`; only rank 0 calls `index` and `publish`. A save that fails is abandoned: its files are
    removed, and it is never committed.

    Attributes:
        pending: Description of the save that the formats' functions get: its storage, name, ranks and options.
        formats: The formats of the shards and of the common state.
        steps: Functions and requests of the formats, which write the shards, the indexes and the common state.
        claim: Claim that marks this save as alive for other saves of the same process; only on rank 0.
        folder: Folder that rank 0 made at the destination; `write` waits until it is on the medium. None on all other
            ranks, and if no folder has to be waited for.
        has_run: Whether `write` was called before.
        has_written: Whether files of `write` may exist: it has begun to write, and `abandon` hasn't removed them since.
        common: Function that waits for the thread in which `write` writes the common state, and returns the state's
            fields of metadata.json; None without such a thread.
        look: Function that raises if another checkpoint has appeared at the destination: `index` begins this search, in
            a thread if it takes network requests, and `publish` waits for it. None if no search was begun.
    """

    pending: PendingSave
    formats: Formats
    steps: FormatSteps
    claim: Claim | None = None
    folder: NewFolder | None = None
    has_run: bool = False
    has_written: bool = False
    common: Callable[[], Fields] | None = None
    look: Callable[[], None] | None = None

    def request(self) -> AsyncRequest[Any]:
        """Return the request that performs this rank's share of the save; nothing is written yet."""
        requests = self.steps.requests
        return AsyncRequest(
            world=self.pending.world,
            async_fn=self.write,
            index=self.index,
            publish=self.publish,
            finalize_fns=tuple(fn for request in requests for fn in request.finalize_fns),
            abandon=self.abandon,
            folder=self.pending.destination,
            clean_up=self.clean_up,
            state=requests[0].state,
        )

    def write(self) -> tuple[Any, ...]:
        """Write this rank's files without a collective, and return the results of the formats' requests, in order."""
        pending, steps, alone = self.pending, self.steps, not self.formats.in_save_folder
        is_conditional = can(pending.storage).replace_if is not None
        # A committed request must not run again: its files are the checkpoint by then. If publishing is conditional,
        # the first run can skip this look.
        if self.has_run or not is_conditional:
            with _lost_to_another(pending):
                check_unchanged(pending.storage, pending.before)
        if pending.world.rank == 0:
            self._claim_again(alone=alone)
        elif alone and self.has_run and pending.replaced is None:
            check_alone(pending.storage, pending.save_id)
        self.has_run = True
        # The look follows the claim: from now on no other save with fixed names can begin, and so none is published.
        if steps.recognizes or alone:
            _check_no_other(pending, self.formats.strategies)
        self.has_written = True
        if steps.recognizes or pending.world.rank != 0 or not is_conditional:
            results = tuple(request.async_fn() for request in steps.requests)
        else:
            # The common state is small, so writing it concurrently with the uploads takes no additional time.
            with ThreadPoolExecutor(1) as thread:
                with suppress(RuntimeError):  # during the interpreter's shutdown no thread starts; `index` writes it
                    self.common = thread.submit(steps.save_common).result
                results = tuple(request.async_fn() for request in steps.requests)
        if self.folder is not None:
            # The new folder's entry must be on the medium before the end of the write.
            self.folder.wait()
        return results

    def _claim_again(self, *, alone: bool) -> None:
        """Make the save's folder and claim again if an earlier execution of the request failed and removed them.

        Called only on rank 0, before it writes.

        Args:
            alone: Whether to refuse if another save is in progress, because files of both would have the same names.
        """
        pending, durable = self.pending, self.pending.options.durable
        if pending.replaced is not None:
            check_same(pending.replaced, self.formats.strategies)
        if is_claimed(pending.save_id):
            return
        if pending.replaced is not None:
            pending.replaced.sibling.make(owner_note(pending.save_id), durable=durable)
        self.claim = make_save_folder(pending.storage, pending.save_id, durable=durable, alone=alone)

    def index(self, results: Sequence[tuple[Any, ...]]) -> Fields:
        """Write the formats' indexes and the common state, and return the fields of metadata.json; on rank 0.

        Args:
            results: Results of `write`, one tuple for each rank.
        """
        pending, look = self.pending, partial(_check_no_other, self.pending, self.formats.strategies)
        if self.steps.publish is not None:
            # Files with fixed names may belong to another save by now; index and common state would overwrite them.
            with step("save: look for another checkpoint"):
                look()
        elif pending.before is None:
            # If this look takes a request, publishing is conditional, and detects later changes.
            self.look = beside(pending.storage, look)
        (sharded, version), (common, common_version) = self.formats.backends
        fields = {"sharded_backend": sharded, "sharded_backend_version": version}
        fields |= {"common_backend": common, "common_backend_version": common_version}
        with step("save: index"):
            fields |= self.steps.index(results)
        with step("save: common state"):
            written, self.common = self.common, None  # a second run writes it here
            fields |= (written or self.steps.save_common)()
        return fields

    def publish(self, fields: Fields) -> None:
        """Make the folder a checkpoint; the last step, on rank 0."""
        pending = self.pending
        # The owner's note is usually removed after the commit: until then it excludes other saves with fixed names, and
        # tells whether a killed save is dead. A save that replaces a folder has another note, in the sibling folder.
        if pending.replaced is not None:
            pending.storage.remove(f"{pending.save_id}/{OWNER_FILE}")
        # Every name must be on the medium before the rename that publishes: after a power failure, the file system may
        # have kept that rename and lost earlier changes.
        if pending.options.durable:
            sync_folder(pending.storage, pending.save_id)
            sync_folder(pending.storage)
        try:
            # The lock makes the second of two simultaneous saves see the first one's checkpoint.
            with locked(pending.destination):
                self._publish_locked(fields)
        except OutcomeUnknown:
            # The save has ended: a later save, which invalidates this one's request, may remove its files.
            release(pending.save_id)
            raise

    def _publish_locked(self, fields: Fields) -> None:
        pending, publish, strategies = self.pending, self.steps.publish, self.formats.strategies
        look, self.look = self.look, None
        if publish is not None:
            check_unchanged(pending.storage, pending.before)
            publish(fields)
            remove_folder(pending.storage, pending.save_id)
        elif look is not None:
            look()
        elif pending.before is None or can(pending.storage).replace_if is None:
            _check_no_other(pending, strategies)
        # A format with a PUBLISH row needs no metadata.json, unless a second backend must be named.
        is_single = fields["common_backend"] == fields["sharded_backend"]
        if publish is None or not (is_single or pending.storage.length(METADATA_FILE) is not None):
            with _lost_to_another(pending):
                replace_metadata(pending.storage, pending.before, fields, durable=pending.options.durable)
        if pending.replaced is not None:
            swap_folders(pending, pending.replaced, fields, strategies)

    def abandon(self) -> None:
        """Remove the files that surely belong to this save, and end the save. Never raises."""
        pending, requests = self.pending, self.steps.requests
        try:
            # Files with fixed names may belong to another save, unless this one wrote them and still excludes others.
            if self.formats.in_save_folder or pending.replaced is not None:
                _abandon_all(requests)
            elif self.has_written:
                self.has_written = False
                with abandoning(pending.storage.where()), _keeping_others_away(pending):
                    _abandon_all(requests)
        finally:
            if self.claim is not None:
                end(pending)

    def clean_up(self) -> None:
        """Remove obsolete files after the commit, and call the function `SaveOptions.report`."""
        requests = self.steps.requests
        clean_up(self.pending, self.formats.strategies, removes_saves=any(item.removes_saves for item in requests))
        for request in requests:
            request.clean_up()
        self._report()  # last, since cleaning up syncs folders too

    def _report(self) -> None:
        """Call `SaveOptions.report`, if any, with the requests that the file system refused to this rank."""
        pending = self.pending
        replaced = () if pending.replaced is None else (pending.replaced.storage,)
        report = SaveReport(take_refusals(pending.storage, *replaced))
        if pending.options.report is None:
            return
        try:
            pending.options.report(report)
        except Exception:
            # Raising would look like a failure of the save, but the checkpoint is published.
            logger.exception("save: %r is saved, but SaveOptions(report=...) raised", pending.storage.where())


def _check_no_other(pending: PendingSave, strategies: Strategies | None) -> None:
    """Raise if a checkpoint has appeared at the destination since the save began, with or without metadata.json."""
    look = partial(is_recognized, pending.storage, strategies)
    is_there = beside(pending.storage, look) if pending.before is None else bool
    with _lost_to_another(pending):
        check_unchanged(pending.storage, pending.before)
    if is_there():
        fix = "Run only one save to a folder at a time, and execute each AsyncRequest only once."
        raise CheckpointReplaced(error_text(f"save: {pending.storage.where()!r} holds a checkpoint by now", fix=fix))


@contextmanager
def _lost_to_another(pending: PendingSave) -> Iterator[None]:
    """Turn CheckpointReplaced in the context into AlreadyACheckpoint if the save may not replace checkpoints.

    On storages without conditional writes the error stays as it is.
    """
    try:
        yield
    except CheckpointReplaced as error:
        if pending.overwrite or can(pending.storage).replace_if is None:
            raise
        fix = "Save to another folder, or pass overwrite=True to replace the checkpoint once the new one is complete."
        heading = f"save: {pending.storage.where()!r} holds another save's checkpoint by now"
        raise AlreadyACheckpoint(error_text(heading, fix=fix)) from error


def _abandon_all(requests: Sequence[AsyncRequest[Any]]) -> None:
    for request in requests:
        request.abandon()


@contextmanager
def _keeping_others_away(pending: PendingSave) -> Iterator[None]:
    """Exclude other saves to the same folder while the block runs.

    On rank 0, the save's claim excludes them already. Each other rank holds the folder's lock meanwhile.

    Raises:
        StorageError: another save is in progress. This is checked only if the process lacks this save's claim.
    """
    with nullcontext() if pending.world.rank == 0 else locked(pending.storage):
        if not is_claimed(pending.save_id):
            check_alone(pending.storage, pending.save_id)
        yield


class _UseCheck:
    """A flag that an `AsyncRequest` and its copies share: whether one of them was executed or abandoned.

    If the flag is garbage-collected before that, a warning is issued. No files are removed then, since other ranks may
    be writing.
    """

    def __init__(self, where: str) -> None:
        self.where = where
        self.process = os.getpid()
        self.is_used = False

    def __del__(self) -> None:
        if self.is_used or self.process != os.getpid():  # a fork has a copy of the object, but no save
            return
        heading = f"an asynchronous save to {self.where!r} was never begun: its AsyncRequest was dropped"
        fix = "Call execute_sync() or abandon() on the AsyncRequest, or pass it to an AsyncCallsQueue."
        warnings.warn(error_text(heading, fix=fix), ResourceWarning, stacklevel=2, source=self)


def warns_unused(request: AsyncRequest[Any]) -> AsyncRequest[Any]:
    """Return a request that warns if it is dropped unused: garbage-collected without being executed or abandoned.

    An execution or abandonment of a copy counts too.
    """
    folder = request.folder
    check = _UseCheck("a folder" if folder is None else folder.where())

    def use(fn: Callable[[], Any]) -> Any:
        check.is_used = True
        return fn()

    return replace(request, async_fn=partial(use, request.async_fn), abandon=partial(use, request.abandon))
