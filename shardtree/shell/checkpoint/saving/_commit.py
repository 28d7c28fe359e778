"""Steps 5 and 6 of a save, as the request that does them: each rank writes its part, then rank 0 commits."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

from ....core.trees import United
from ....errors import AlreadyACheckpoint, CheckpointReplaced, OutcomeUnknown, error_text
from ...storage import (
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
    Commit,
    PendingSave,
    Strategies,
    StrategyAction,
    abandoning,
    call_in_turn,
    check_alone,
    check_unchanged,
    find_strategy,
    make_save_folder,
    replace_metadata,
)
from ...world import step
from .._consistency import unions_field
from .._dispatch import Backends, Choice, strategy_of
from ._clean_up import clean_up
from ._formats import Fields, Writes, checked_fields, requests_of_formats, united_fields
from ._replace import check_same, swap_folders
from ._start import RunningSave, beside, end, in_save_folder, is_recognized

logger = logging.getLogger("shardtree")


def save_request(
    pending: PendingSave,
    running: RunningSave,
    writes: Writes,
    common: Any,
    choices: tuple[Choice, Choice],
    backends: Backends,
    strategies: Strategies | None,
    unions: United = MappingProxyType({}),
) -> AsyncRequest[Any]:
    """Return the request that writes this rank's part and then commits; nothing is written yet.

    Args:
        pending: what the parts go to.
        running: what this rank holds of the save.
        writes: the tensors and objects that are this rank's to write.
        common: the common tree, with holes where shards were.
        choices: what the caller named as strategies for the shards and the common state.
        backends: the backends of these choices.
        strategies: the dispatch table; None for the process's.
        unions: of which dicts of the common tree ranks have keys of their own.
    """
    sharded_backend, common_backend = backends
    save_common = strategy_of(StrategyAction.SAVE_COMMON, choices[1], common_backend, strategies)
    requests = requests_of_formats(replace(pending, common=common), writes, choices[0], backends, strategies)
    fields = {
        "sharded_backend": sharded_backend[0],
        "sharded_backend_version": sharded_backend[1],
        "common_backend": common_backend[0],
        "common_backend_version": common_backend[1],
    }
    recognizes = find_strategy(StrategyAction.RECOGNIZE, *sharded_backend, strategies=strategies) is not None
    commit = find_strategy(StrategyAction.COMMIT, *sharded_backend, strategies=strategies)
    check = partial(_check_no_other, pending, strategies)
    alone = not in_save_folder(backends, strategies)
    state, of_common = requests[0].state, None  # each format's later rows get its own state
    if sharded_backend == common_backend or len(requests) > 1:
        of_common = requests[-1].state
    finish = partial(_finish, replace(pending, state=state), commit, strategies)
    write_common = partial(_write_common, partial(save_common, replace(pending, state=of_common), common), unions)
    removes_saves = any(request.removes_saves for request in requests)
    return AsyncRequest(
        world=pending.world,
        async_fn=partial(
            _write, pending, running, requests, write_common, strategies, recognizes=recognizes, alone=alone
        ),
        commit=partial(_commit, pending, running, requests, write_common, fields, check, finish, commit is not None),
        finalize_fns=tuple(fn for request in requests for fn in request.finalize_fns),
        abandon=partial(_abandon, pending, running, requests, alone=alone),
        folder=pending.storage if pending.replaced is None else pending.replaced.storage,
        clean_up=partial(
            call_in_turn,
            partial(clean_up, pending, strategies, removes_saves=removes_saves),
            *(request.clean_up for request in requests),
            partial(_report, pending),  # last: cleaning up syncs folders too
        ),
        state=state,
    )


def _report(pending: PendingSave) -> None:
    """Tell the caller what this rank's file system refused to a committed save; the log has it already."""
    replaced = () if pending.replaced is None else (pending.replaced.storage,)
    report = SaveReport(take_refusals(pending.storage, *replaced))
    if pending.options.report is None:
        return
    try:
        pending.options.report(report)
    except Exception:
        # An error would say that this rank's save failed, and the checkpoint is there.
        logger.exception("save: %r is saved, but SaveOptions(report=...) raised", pending.storage.where())


def _write_common(save_common: Callable[[], Fields], unions: United) -> Fields:
    fields = checked_fields(save_common())
    # Formats of other programs have no fields of ours: Megatron-Core refuses a metadata.json with any.
    return {**fields, **unions_field(unions)} if "common" in fields else fields


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


def _write(
    pending: PendingSave,
    running: RunningSave,
    requests: Sequence[AsyncRequest[Any]],
    write_common: Callable[[], Fields],
    strategies: Strategies | None,
    *,
    recognizes: bool,
    alone: bool,
) -> tuple[Any, ...]:
    # Guards against running a committed request again: its files are the checkpoint by then. Where the commit itself is
    # conditional, a first run saves the storage that look.
    if running.has_run or can(pending.storage).replace_if is None:
        with _lost_to_another(pending):
            check_unchanged(pending.storage, pending.before)
    if pending.world.rank == 0:
        _claim_again(pending, running, strategies, alone=alone)
    elif alone and running.has_run and pending.replaced is None:
        check_alone(pending.storage, pending.save_id)
    running.has_run = True
    # After the claim: from now on no other save with fixed names can begin, so that none is committed after this look.
    if recognizes or alone:
        _check_no_other(pending, strategies)
    running.has_written = True
    if recognizes or pending.world.rank != 0 or can(pending.storage).replace_if is None:
        results = tuple(request.async_fn() for request in requests)
    else:
        # Small, and waits for nothing: beside the uploads, it takes no time.
        with ThreadPoolExecutor(1) as thread:
            with suppress(RuntimeError):  # while the interpreter ends, no thread can start: the commit writes it then
                running.common = thread.submit(write_common).result
            results = tuple(request.async_fn() for request in requests)
    if running.folder is not None:
        # The new folder's entry was synced by another thread meanwhile: it must be on the medium before the commit.
        running.folder.wait()
    return results


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


def _claim_again(pending: PendingSave, running: RunningSave, strategies: Strategies | None, *, alone: bool) -> None:
    """Make the folder again for an abandoned save whose request is run once more."""
    if pending.replaced is not None:
        check_same(pending.replaced, strategies)
    if is_claimed(pending.save_id):
        return
    if pending.replaced is not None:
        pending.replaced.sibling.make(owner_note(pending.save_id), durable=pending.options.durable)
    durable = pending.options.durable
    running.claim = make_save_folder(pending.storage, pending.save_id, durable=durable, alone=alone)


def _abandon(pending: PendingSave, running: RunningSave, requests: Sequence[AsyncRequest[Any]], *, alone: bool) -> None:
    try:
        # What has fixed names may be another save's, unless this one has written it and still keeps others away.
        if not alone or pending.replaced is not None:
            _remove_written(requests)
        elif running.has_written:
            running.has_written = False
            with abandoning(pending.storage.where()), _keeping_others_away(pending):
                _remove_written(requests)
    finally:
        end(pending, running)


@contextmanager
def _keeping_others_away(pending: PendingSave) -> Iterator[None]:
    """Let no other save begin inside the block; raises if one has begun since rank 0 gave this one up."""
    with nullcontext() if pending.world.rank == 0 else locked(pending.storage):
        if not is_claimed(pending.save_id):
            check_alone(pending.storage, pending.save_id)
        yield


def _remove_written(requests: Sequence[AsyncRequest[Any]]) -> None:
    for request in requests:
        request.abandon()


def _commit(
    pending: PendingSave,
    running: RunningSave,
    requests: Sequence[AsyncRequest[Any]],
    write_common: Callable[[], Fields],
    fields: Fields,
    check_no_other: Callable[[], None],
    finish: Callable[[Callable[[], None], Fields], None],
    looks_first: bool,
    results: Sequence[tuple[Any, ...]],
) -> Fields:
    """Make the checkpoint count: the strategies' own commits, the common state, and last what makes it a checkpoint."""
    all_fields, of_requests = dict(fields), dict[str, Any]()
    if looks_first:
        # Fixed names may by now be another save's files, which the index and the common state would overwrite.
        with step("save: look for another checkpoint"):
            check_no_other()
    elif pending.before is None:
        # Where looks take requests, the commit itself turns away what comes after this one.
        check_no_other = beside(pending.storage, check_no_other)
    for number, request in enumerate(requests):
        with step("save: index"):
            of_requests = united_fields(of_requests, checked_fields(request.commit([part[number] for part in results])))
    all_fields |= of_requests
    with step("save: common state"):
        common_beside, running.common = running.common, None  # a commit that is tried again writes it itself
        all_fields |= (common_beside or write_common)()
    try:
        finish(check_no_other, all_fields)
    except OutcomeUnknown:
        # Nothing goes on with it: a later save, whose commit turns this one away, may remove it.
        release(pending.save_id)
        raise
    return all_fields


def _finish(
    pending: PendingSave,
    commit: Commit | None,
    strategies: Strategies | None,
    check_no_other: Callable[[], None],
    fields: Fields,
) -> None:
    # The owner's note goes after the commit: until then it keeps others away from files with fixed names, and by it a
    # save that was killed is known to be dead. What is exchanged has another note, beside it.
    if pending.replaced is not None:
        pending.storage.remove(f"{pending.save_id}/{OWNER_FILE}")
    # Every name has to be on the medium before the rename that commits: after a power failure the file system may
    # keep that rename and lose what came before it.
    if pending.options.durable:
        sync_folder(pending.storage, pending.save_id)
        sync_folder(pending.storage)
    # Of two saves that commit at once, the second one sees the first one's checkpoint.
    with locked(pending.storage if pending.replaced is None else pending.replaced.storage):
        if commit is None:
            if pending.before is None or can(pending.storage).replace_if is None:
                check_no_other()
        else:
            check_unchanged(pending.storage, pending.before)
            commit(pending, fields)
            remove_folder(pending.storage, pending.save_id)
        # A format with a commit of its own needs no metadata.json, unless a second backend has to be named somewhere.
        one_backend = fields["common_backend"] == fields["sharded_backend"]
        if commit is None or not (one_backend or pending.storage.length(METADATA_FILE) is not None):
            with _lost_to_another(pending):
                replace_metadata(pending.storage, pending.before, fields, durable=pending.options.durable)
        if pending.replaced is not None:
            swap_folders(pending, pending.replaced, fields, strategies)
