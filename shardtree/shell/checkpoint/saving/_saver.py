"""Steps 5 and 6 of a save: each rank writes its part; rank 0 indexes all parts and publishes the checkpoint."""

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
    """One rank's part of a save: it writes, and on rank 0 indexes and publishes; or it is abandoned.

    Attributes:
        pending: The save, as formats get it.
        formats: The formats of the shards and of the common state.
        steps: The part that these have in the save.
        claim: Mark by which other saves know that this one is alive; on rank 0 alone.
        folder: The destination's own folder, if this save had to make it; on rank 0 alone.
        has_run: Whether `write` was called before.
        has_written: Whether `write` has begun to write, and its files weren't removed since.
        common: Function that returns the fields of the common state, while that is written beside the shards.
        look: Function that looks for another checkpoint, where `index` has begun that for `publish`.
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
        """Return the request that does all this; nothing is done yet."""
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
        """Return the results of the formats' requests, once this rank's files are written; no collective."""
        pending, steps, alone = self.pending, self.steps, not self.formats.in_save_folder
        is_conditional = can(pending.storage).replace_if is not None
        # Guards against running a committed request again: its files are the checkpoint by then. Where publishing is
        # conditional, a first run saves the storage that look.
        if self.has_run or not is_conditional:
            with _lost_to_another(pending):
                check_unchanged(pending.storage, pending.before)
        if pending.world.rank == 0:
            self._claim_again(alone=alone)
        elif alone and self.has_run and pending.replaced is None:
            check_alone(pending.storage, pending.save_id)
        self.has_run = True
        # After the claim: from now on no other save with fixed names can begin, so none is published after this look.
        if steps.recognizes or alone:
            _check_no_other(pending, self.formats.strategies)
        self.has_written = True
        if steps.recognizes or pending.world.rank != 0 or not is_conditional:
            results = tuple(request.async_fn() for request in steps.requests)
        else:
            # Small, and waits for nothing: beside the uploads, it takes no time.
            with ThreadPoolExecutor(1) as thread:
                with suppress(RuntimeError):  # while the interpreter ends, no thread can start: `index` writes it then
                    self.common = thread.submit(steps.save_common).result
                results = tuple(request.async_fn() for request in steps.requests)
        if self.folder is not None:
            # The new folder's entry was synced by another thread meanwhile: it must be on the medium before the end.
            self.folder.wait()
        return results

    def _claim_again(self, *, alone: bool) -> None:
        """Make the folder again for an abandoned save whose request is run once more."""
        pending, durable = self.pending, self.pending.options.durable
        if pending.replaced is not None:
            check_same(pending.replaced, self.formats.strategies)
        if is_claimed(pending.save_id):
            return
        if pending.replaced is not None:
            pending.replaced.sibling.make(owner_note(pending.save_id), durable=durable)
        self.claim = make_save_folder(pending.storage, pending.save_id, durable=durable, alone=alone)

    def index(self, results: Sequence[tuple[Any, ...]]) -> Fields:
        """Return the fields of metadata.json, once the indexes and the common state are written; on rank 0.

        Args:
            results: The results of `write`, by rank.
        """
        pending, look = self.pending, partial(_check_no_other, self.pending, self.formats.strategies)
        if self.steps.publish is not None:
            # Fixed names may by now be another save's files, which the index and the common state would overwrite.
            with step("save: look for another checkpoint"):
                look()
        elif pending.before is None:
            # Where looks take requests, publishing itself turns away what comes after this one.
            self.look = beside(pending.storage, look)
        (sharded, version), (common, common_version) = self.formats.backends
        fields = {"sharded_backend": sharded, "sharded_backend_version": version}
        fields |= {"common_backend": common, "common_backend_version": common_version}
        with step("save: index"):
            fields |= self.steps.index(results)
        with step("save: common state"):
            written, self.common = self.common, None  # tried again, it is written here
            fields |= (written or self.steps.save_common)()
        return fields

    def publish(self, fields: Fields) -> None:
        """Make the folder a checkpoint; on rank 0, last of all."""
        pending = self.pending
        # The owner's note goes after that: until then it keeps others away from files with fixed names, and by it a
        # save that was killed is known to be dead. What is exchanged has another note, beside it.
        if pending.replaced is not None:
            pending.storage.remove(f"{pending.save_id}/{OWNER_FILE}")
        # Every name has to be on the medium before the rename that publishes: after a power failure the file system
        # may keep that rename and lose what came before it.
        if pending.options.durable:
            sync_folder(pending.storage, pending.save_id)
            sync_folder(pending.storage)
        try:
            # Of two saves that publish at once, the second one sees the first one's checkpoint.
            with locked(pending.destination):
                self._publish_locked(fields)
        except OutcomeUnknown:
            # Nothing goes on with it: a later save, which turns this one away, may remove it.
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
        # A format that publishes needs no metadata.json, unless a second backend has to be named somewhere.
        is_single = fields["common_backend"] == fields["sharded_backend"]
        if publish is None or not (is_single or pending.storage.length(METADATA_FILE) is not None):
            with _lost_to_another(pending):
                replace_metadata(pending.storage, pending.before, fields, durable=pending.options.durable)
        if pending.replaced is not None:
            swap_folders(pending, pending.replaced, fields, strategies)

    def abandon(self) -> None:
        """Remove what was written, as far as it is known to be this save's, and end the save. Never raises."""
        pending, requests = self.pending, self.steps.requests
        try:
            # What has fixed names may be another save's, unless this one has written it and still keeps others away.
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
        """Remove what isn't needed any more after the commit, and report to the caller."""
        requests = self.steps.requests
        clean_up(self.pending, self.formats.strategies, removes_saves=any(each.removes_saves for each in requests))
        for request in requests:
            request.clean_up()
        self._report()  # last: cleaning up syncs folders too

    def _report(self) -> None:
        """Tell the caller what this rank's file system refused to a committed save; the log has it already."""
        pending = self.pending
        replaced = () if pending.replaced is None else (pending.replaced.storage,)
        report = SaveReport(take_refusals(pending.storage, *replaced))
        if pending.options.report is None:
            return
        try:
            pending.options.report(report)
        except Exception:
            # An error would say that this rank's save failed, and the checkpoint is there.
            logger.exception("save: %r is saved, but SaveOptions(report=...) raised", pending.storage.where())


def _check_no_other(pending: PendingSave, strategies: Strategies | None) -> None:
    """Raise if another checkpoint has appeared since the save began, with metadata.json or without."""
    look = partial(is_recognized, pending.storage, strategies)
    is_there = beside(pending.storage, look) if pending.before is None else bool
    with _lost_to_another(pending):
        check_unchanged(pending.storage, pending.before)
    if is_there():
        fix = "Let only one save at a time go to a folder, and run a request once."
        raise CheckpointReplaced(error_text(f"save: {pending.storage.where()!r} holds a checkpoint by now", fix=fix))


@contextmanager
def _lost_to_another(pending: PendingSave) -> Iterator[None]:
    """Raise AlreadyACheckpoint where a save that may not replace a checkpoint lost to another save."""
    try:
        yield
    except CheckpointReplaced as error:
        if pending.overwrite or can(pending.storage).replace_if is None:
            raise
        fix = "Save to another folder, or pass overwrite=True to replace the checkpoint once the new one is complete."
        what = f"save: {pending.storage.where()!r} holds another save's checkpoint by now"
        raise AlreadyACheckpoint(error_text(what, fix=fix)) from error


def _abandon_all(requests: Sequence[AsyncRequest[Any]]) -> None:
    for request in requests:
        request.abandon()


@contextmanager
def _keeping_others_away(pending: PendingSave) -> Iterator[None]:
    """Let no other save begin inside the block; raises if one has begun since rank 0 gave this one up."""
    with nullcontext() if pending.world.rank == 0 else locked(pending.storage):
        if not is_claimed(pending.save_id):
            check_alone(pending.storage, pending.save_id)
        yield


class _UseCheck:
    """Shared by all copies of a request: warns when it is collected before the save was begun or abandoned.

    Nothing is removed then: other ranks may be writing.
    """

    def __init__(self, where: str) -> None:
        self.where = where
        self.process = os.getpid()
        self.is_used = False

    def __del__(self) -> None:
        if self.is_used or self.process != os.getpid():  # a fork has a copy of the object, but no save
            return
        what = f"an asynchronous save to {self.where!r} was never begun: its request was dropped"
        fix = "Pass it to an AsyncCallsQueue, call execute_sync() on it, or give it up by abandon()."
        warnings.warn(error_text(what, fix=fix), ResourceWarning, stacklevel=2, source=self)


def warns_unused(request: AsyncRequest[Any]) -> AsyncRequest[Any]:
    """Return the request, which warns if it is collected although neither it nor a copy of it was run or abandoned."""
    folder = request.folder
    check = _UseCheck("a folder" if folder is None else folder.where())

    def use(fn: Callable[[], Any]) -> Any:
        check.is_used = True
        return fn()

    return replace(request, async_fn=partial(use, request.async_fn), abandon=partial(use, request.abandon))
