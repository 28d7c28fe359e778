"""convert: a checkpoint of any format streamed to any other, in bounded memory."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

from ..core import limits
from ..core.ambient import shielded
from ..core.geometry import as_int
from ..core.mapping import ShardedTensor
from ..core.trees import HOLE
from ..errors import (
    AlreadyACheckpoint,
    CorruptCheckpoint,
    IntegrityError,
    StorageError,
    WorldError,
    error_text,
)
from ..inspection import group_bytes, tree_of
from ..shell.checkpoint import alike, backends_of, given_options, read_fields, recognize
from ..shell.checkpoint.saving import Formats, Start, inspect_folder, make_folder, pending_save
from ..shell.storage import (
    Claim,
    Directory,
    Storage,
    can,
    in_turn,
    listed,
    remove_folder,
    storage_at,
    with_own_refusals,
)
from ..shell.table import (
    METADATA_FILE,
    LoadOptions,
    SaveOptions,
    Strategies,
    disown,
    owned,
    remove_unless_committed,
    save_is_alive,
    traits_of,
)
from ..shell.world import World, agree, on_rank_zero, one_process, share
from ..stores import in_larger_requests
from ._check import CheckResult, check_destination
from ._journal import Journal, abort_uploads, begin_journal, begun_save, files_of, forget, journal_of, remove_others
from ._passage import Passage
from ._plan import Cutting, Plan, Transform, plan_conversion
from ._report import ConversionReport, report_of
from ._single import in_one_file, single_file
from ._source import open_alike
from ._write import Batches, ConversionTarget, Turn, rehearse_common, rehearse_tensors, write_batches

_LEAST_BYTES = 1024 * 1024  # of memory for reading back: with less, each read would return only a few elements


@shielded
def convert(
    source: Directory,
    destination: Directory,
    *,
    backend: str | tuple[str, int],
    transform: Transform | None = None,
    transform_common: Callable[[Any], Any] | None = None,
    common_backend: str | tuple[str, int] | None = None,
    layout: Cutting = None,
    leave_out: Sequence[str] = (),
    plain: Sequence[str] = (),
    prune: bool = False,
    max_bytes_in_flight: int = 256 * 1024 * 1024,
    verify: bool = True,
    strategies: Strategies | None = None,
    load_options: LoadOptions | None = None,
    save_options: SaveOptions | None = None,
    world: World | None = None,
) -> ConversionReport:
    """Convert a checkpoint of any format to another format, and return a report.

    Tensors stream in batches of bounded size. If a call is killed, the same call resumes: finished batches aren't
    written again. The destination becomes a checkpoint only when all of it is written; then it is read back, and each
    tensor's fingerprint is compared with that of the written elements.

    Args:
        source: Path, URL or storage of the checkpoint.
        destination: Folder without a checkpoint, created if missing; with the format huggingface also the path of a new
            ``.safetensors`` file.
        backend: Format of the destination: (backend, version), or a name for its latest version.
        transform: Pure function from the flat dict of whole shards, by key and with lazy data, to the tree of shards to
            write. The keys of the result don't matter, only those of its shards. The function records operations on
            lazy data; elements that it reads itself stay in memory. Or a trace of torch code, from `shardtree.trace`,
            which passes on all values that aren't tensors.
        transform_common: Pure function from the common state, with holes in place of shards, to the one to write.
        common_backend: Format of the common state; by default the one that a save would choose.
        layout: Number of pieces along each axis of a tensor: a function from a whole shard to such counts, or a dict of
            counts by key pattern. A tensor without counts is cut only if it is larger than a batch.
        leave_out: Patterns of keys that aren't converted. ``"common"`` leaves out the common state, but its
            tensors, such as a module's buffers, are then converted under the keys of their paths. Any other key of the
            source that isn't in the output is an error.
        plain: Key patterns of FP8 tensors that a transform may cast without scales. Casting another tensor is an error
            if the source has tensors that are named like its scales, and the output doesn't use them.
        prune: Whether keys that the transform drops are left out without an error, for example if it keeps only some
            layers.
        max_bytes_in_flight: Upper bound of a batch's bytes. A format that can't stream holds one batch in memory. In an
            object store, the format huggingface never writes two batches to one file; pass 5 * 10**9 for files as large
            as on a disk.
        verify: Whether the destination is read back and compared.
        strategies: Dispatch table; None for the process's.
        load_options: Options for reading the source, and the destination when it is compared.
        save_options: Options for writing the destination; `progress` is called with the bytes written, and later
            compared, since its last call.
        world: World of the ranks that convert together, all with the same arguments; batches and the comparison are
            shared out by bytes. None for this process alone; the call then isn't collective.

    Raises:
        NotACheckpoint: There is no source.
        AlreadyACheckpoint: The destination has a checkpoint, or is a file.
        StorageError: The destination names a file of a kind that is never written, such as ``pytorch_model.bin``.
        KeyMismatch: A key of the source is neither used nor left out nor pruned, or a pattern matches nothing.
        IntegrityError: The output's shards don't tile their tensors, or the destination differs from what was to be
            written.
        ShapeError: Quantised values would be cast without their scales.
        UnsupportedValue: The format can't hold some value.
        StrategyError: The format can't be written.
        RemoteError: One of several ranks failed; raised on every rank. It is also an instance of the class that the
            failures share.

    Examples:
        >>> import tempfile, torch, shardtree as st
        >>> source, destination = tempfile.mkdtemp(), tempfile.mkdtemp()
        >>> st.save({"w": st.ShardedTensor.from_rank_offsets("w", torch.arange(4.0)), "step": 7}, source)
        >>> half = st.bind(st.cast, torch.bfloat16)
        >>> report = convert(source, destination, backend="safetensors", transform=half)
        >>> report.nbytes, st.load_plain_tensors(destination)
        (8, {'w': tensor([0., 1., 2., 3.], dtype=torch.bfloat16)})
    """
    world = one_process() if world is None else world
    arguments: dict[str, Any] = {"backend": backend, "common_backend": common_backend, "leave_out": leave_out}
    arguments |= {"plain": repr(plain), "prune": prune, "max_bytes_in_flight": max_bytes_in_flight, "verify": verify}
    arguments |= alike(load_options, "load_options.") | alike(save_options, "save_options.")

    def look() -> tuple[LoadOptions, ConversionTarget]:
        reading = given_options("convert", load_options, LoadOptions)
        writing = given_options("convert", save_options, SaveOptions)
        writing = replace(writing, progress=in_turn(writing.progress))  # batches are written side by side
        return reading, _destination(destination, backend, common_backend, strategies, writing)

    (reading, target), nonces = share(world, "convert: meet", look, lambda _: secrets.token_hex(), given=arguments)
    checkpoint = open_alike(source, world, reading, strategies)

    def prepare() -> tuple[Plan, Journal]:
        traits = traits_of(*target.formats.backends[0], strategies)
        plan = plan_conversion(
            tree_of(checkpoint, strategies),
            transform,
            transform_common,
            leave_out=leave_out,
            plain=plain,
            prune=prune,
            layout=layout,
            most_bytes=max_bytes_in_flight,
            # Without `write_parts`, batches can't share a file, so tensors aren't cut: one batch streams, whatever its
            # size.
            cuts=can(target.storage).write_parts is not None or not traits.shares_files,
        )
        where = (target.storage, checkpoint, target.formats.backends, plan.batches, strategies)
        common = plan.common if world.size > 1 or traits.writes_common else HOLE
        return plan, journal_of(*where, common=common, nonce=nonces[0], allow_pickle=target.options.allow_pickle)

    (plan, journal), outcomes = share(world, "convert: plan", prepare, lambda own: (own[1].folder, own[1].common))
    _check_same_plan(outcomes)
    # Formats ask for a few MiB at a time; if each read is a request, many of these are fetched at once.
    passage = Passage(group_bytes(plan.reader), has_sums=verify)
    earlier, may_be_others = _write(target, journal, plan, passage, world)
    check = None
    if verify or may_be_others:
        most = min(max(as_int(max_bytes_in_flight) or 0, _LEAST_BYTES), limits.COMPARED_BYTES)
        check = _check(target, journal, plan, passage, most, reading, world)
    on_rank_zero(world, "convert: clean up", partial(_finish, target, journal, is_old=earlier == len(plan.batches)))
    return report_of(plan, earlier, check)


def _destination(
    where: Directory,
    backend: str | tuple[str, int],
    common_backend: str | tuple[str, int] | None,
    strategies: Strategies | None,
    options: SaveOptions,
) -> ConversionTarget:
    backends = backends_of(backend, common_backend, strategies)
    formats = Formats((backend, common_backend), strategies, backends)
    if (single := single_file(where, backends)) is not None:
        return ConversionTarget(single.draft(), replace(formats, strategies=in_one_file(strategies)), options, single)
    return ConversionTarget(in_larger_requests(with_own_refusals(storage_at(where))), formats, options)


def _check_same_plan(outcomes: Sequence[tuple[str, str]]) -> None:
    """Raise an error unless all ranks have the same journal name and the same hash of the common state.

    The name of a journal is a hash of the source and of the tensors to write.
    """
    for what, values in zip(("other bytes", "another common state"), zip(*outcomes, strict=True), strict=True):
        if len(set(values)) > 1:
            other = next(rank for rank, value in enumerate(values) if value != values[0])
            fix = "Pass the same arguments on every rank, and transforms that give the same result on each."
            raise WorldError(error_text(f"convert: rank {other} would write {what} than rank 0", fix=fix))


def _check(
    target: ConversionTarget,
    journal: Journal,
    plan: Plan,
    passage: Passage,
    most_bytes: int,
    options: LoadOptions,
    world: World,
) -> CheckResult:
    """Read the destination back, and return the results of the check; raise an error if it differs."""
    try:
        where = target.storage if target.single is None else target.single.place()
        strategies, progress = target.formats.strategies, target.options.progress
        tree = partial(tree_of, open_alike(where, world, options, strategies), strategies)
        return check_destination(tree, plan, passage, most_bytes, progress, world)
    except (IntegrityError, CorruptCheckpoint) as error:
        if target.single is not None and target.single.is_there:
            raise target.single.refusal() from error  # another program has made the file
        if world.rank == 0 and isinstance(error, IntegrityError):
            forget(journal)
        raise


def _finish(target: ConversionTarget, journal: Journal, *, is_old: bool) -> None:
    save_id = begun_save(journal) if is_old or not can(target.storage).late_requests else None
    if save_id is not None:
        # A call that was killed right after its commit has left its owner's note, or couldn't remove it.
        disown(target.storage, save_id)
        if can(target.storage).late_requests:
            remove_unless_committed(target.storage, save_id)
    if target.single is not None:
        target.single.put(durable=target.options.durable)
    forget(journal)
    if target.single is not None:
        remove_folder(target.single.above, target.single.folder)


def _write(target: ConversionTarget, journal: Journal, plan: Plan, passage: Passage, world: World) -> tuple[int, bool]:
    """Write the missing batches, and commit the checkpoint.

    Returns:
        The number of batches that an earlier call had written; and True if the destination already has a checkpoint
        that another save may have made, so that it must be compared.

    Raises:
        AlreadyACheckpoint: The destination has a checkpoint, and no earlier call has begun this conversion.
    """
    common = {} if plan.common is HOLE else plan.common
    with ExitStack() as claims:
        begin = partial(_begin_or_resume, target, journal, plan.tensors, common, claims)
        save_id, state = on_rank_zero(world, "convert: begin", begin)
        if state != _UNFINISHED:
            return len(plan.batches), state == _OF_OTHERS
        agree(world, "convert: look at the folder", partial(_check_seen, journal, save_id, world.rank))
        try:
            return write_batches(Batches(target, journal, save_id, plan, common, passage), world), False
        except Exception as error:
            if files_of(journal):
                error.add_note("convert: what was written stays there, and the same call resumes from it")
            elif world.rank == 0:
                forget(journal)
                disown(target.storage, save_id)
            raise


_UNFINISHED, _OURS, _OF_OTHERS = range(3)  # kinds of checkpoints at the destination


def _begin_or_resume(
    target: ConversionTarget, journal: Journal, tensors: Sequence[ShardedTensor], common: Any, claims: ExitStack
) -> tuple[str, int]:
    """Begin or resume the save, on rank 0, and return its name and the state of the destination.

    The state is `_UNFINISHED` unless the destination has a checkpoint. It is then `_OURS`, or `_OF_OTHERS` if another
    save may have made the checkpoint.

    Args:
        target: Storage and format of the destination.
        journal: Journal of the conversion.
        tensors: Tensors to write.
        common: Common state to write.
        claims: Stack that gets the claim on the save's folder; the save counts as alive until the stack is closed.

    Raises:
        AlreadyACheckpoint: The destination has a checkpoint, and no earlier call has begun this conversion.
        UnsupportedValue: The format can't hold some value.
    """
    storage = target.storage
    if target.single is not None and target.single.is_there:
        return begun_save(journal) or "", _OF_OTHERS
    save_id, start, is_there = _look(target, journal)
    if is_there:
        return save_id, _state_of_committed(target, save_id)
    # Values that the format can't hold should fail now, not after hours of writing.
    rehearse_tensors(target, tensors, common)
    rehearse_common(target, common)
    if start is None and save_is_alive(storage, save_id):
        raise _in_progress(target)
    begun = None if start is None else _begin(target, journal, start)
    alone, durable = not target.formats.in_save_folder, target.options.durable
    claims.enter_context(owned(storage, save_id, durable=durable, has_note=begun is not None, alone=alone))
    with listed(storage, deep=False) as listing:
        # Another save may have been committed since the first look. Its files aren't orphaned, even if the journal of
        # its conversion, which hasn't been cleaned up yet, lists them.
        is_there = _holds_checkpoint(listing, target)
    if is_there and start is None:
        return save_id, _state_of_committed(target, save_id)
    if is_there:
        forget(journal)
        disown(storage, save_id)
        raise _conflict(target)
    if start is None:
        abort_uploads(journal)  # of the call that is resumed
    if not can(storage).late_requests:  # otherwise after the commit, which turns away late requests of killed calls
        remove_others(journal)
    return save_id, _UNFINISHED


def _in_progress(target: ConversionTarget) -> StorageError:
    heading = f"convert: the same conversion to {target.storage.where()!r} is in progress"
    return StorageError(error_text(heading, fix="Wait until it ends. If it was killed, the same call resumes it."))


def _look(target: ConversionTarget, journal: Journal) -> tuple[str, Start | None, bool]:
    """Return ``(save_id, start, is_there)``; `is_there` is True if the destination already has a checkpoint.

    If an earlier call has begun this conversion, `save_id` names its save, and `start` is None. Otherwise `start` is
    the result of `inspect_folder`, and `save_id` is the name in it.

    Raises:
        AlreadyACheckpoint: The destination has a checkpoint, and no earlier call has begun this conversion.
    """
    with listed(target.storage, deep=False) as listing:  # one look for all questions
        save_id = begun_save(journal) if journal.folder in listing.names() else None
        is_there = _holds_checkpoint(listing, target)
        if save_id is not None:
            return save_id, None, is_there
        if is_there:
            raise _conflict(target)
        start = inspect_folder(listing, target.formats, overwrite=False)
        return start[0], start, False


def _holds_checkpoint(listing: Storage, target: ConversionTarget) -> bool:
    return listing.length(METADATA_FILE) is not None or recognize(listing, target.formats.strategies) is not None


def _state_of_committed(target: ConversionTarget, save_id: str) -> int:
    # An earlier call was killed after its commit, or another save has committed since: a comparison decides.
    fields = read_fields(target.storage, target.formats.strategies)
    return _OURS if fields.get("save_id") == save_id else _OF_OTHERS


def _conflict(target: ConversionTarget) -> AlreadyACheckpoint:
    """Return the error for a destination with a checkpoint that this conversion hasn't made."""
    if target.single is not None:
        return target.single.conflict()
    heading = f"convert: {target.storage.where()!r} already holds a checkpoint"
    return AlreadyACheckpoint(error_text(heading, fix="Convert to another folder."))


def _check_seen(journal: Journal, save_id: str, rank: int) -> None:
    if rank and begun_save(journal) != save_id:
        heading = f"convert: {journal.storage.where()!r} is not shared: rank {rank} does not see what rank 0 made in it"
        raise StorageError(error_text(heading, fix="Convert to a folder on storage that all ranks share."))


def _begin(target: ConversionTarget, journal: Journal, start: Start) -> Claim:
    """Make the folder and the journal of a new conversion, and return the claim that marks its save as alive."""
    pending = pending_save(start, target.storage, Turn(0, 1), target.options)
    with ExitStack() as undo:
        claim, folder = make_folder(pending, target.formats, undo)
        if begun_save(journal) is not None:  # another call has begun since this one looked
            raise _in_progress(target)
        undo.pop_all()  # a later call resumes after a failure from here on
    if folder is not None:
        folder.wait()  # here, since each batch has a pending save of its own
    begin_journal(journal, pending.save_id, durable=target.options.durable)
    return claim
