"""verify: whether every byte of a checkpoint is as it was saved, and which bytes aren't."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from ..core.ambient import shielded
from ..core.geometry import as_int, shared_groups
from ..core.layouts import shard_boxes
from ..errors import CorruptCheckpoint, StorageError, UnsafeFile, UnsupportedValue, error_text, plural
from ..formats.manifest import manifest_findings
from ..maintenance import refused_findings
from ..shell.checkpoint import are_objects_beside, common_backend, given_options, open_at, sharded_backend, strategy_of
from ..shell.storage import Directory, in_turn
from ..shell.table import (
    METADATA_FILE,
    Checked,
    Checkpoint,
    Damage,
    Finding,
    LoadOptions,
    Strategies,
    StrategyAction,
    Unchecked,
    VerifyReport,
    by_reason,
    find_strategy,
    is_damaged,
    is_of_others,
    refuse_replaced,
    unless_replaced,
)
from ..shell.table.index import DeferredMetadata, IndexMetadata, chunks_of, text_at
from ..shell.world import one_process

logger = logging.getLogger("shardtree")


@shielded
def verify(
    checkpoint_dir: Directory,
    *,
    report: Callable[[VerifyReport], None] | None = None,
    strategies: Strategies | None = None,
    options: LoadOptions | None = None,
) -> tuple[Damage, ...]:
    """Return the damage in a checkpoint, by file, bytes, key and region; nothing if all bytes are as they were saved.

    Every file is read whole, including headers and padding. Not collective. Formats other than our own have checksums
    for a part of their bytes, or none: bytes without a checksum are passed to `report`, or logged if it is None.

    Args:
        checkpoint_dir: Path, URL or storage of the checkpoint.
        report: Callback, called once with the verdict: its `sound` is True if every byte was checked, and None if
            nothing is damaged but some bytes have no checksum.
        strategies: Dispatch table; None for the process's.
        options: Options of the read: `threads`, `progress`, and those that decide which values a load takes, `types`
            and `allow_pickle`. Values that a load with these options refuses are in the report, by name; they aren't
            damage.

    Raises:
        NotACheckpoint: There is no checkpoint.
        CheckpointReplaced: Another save replaced the checkpoint meanwhile, and the bytes read look damaged.
        StrategyError: The format has no checksums.
        StorageError: `threads` isn't a number of threads.

    Examples:
        >>> import torch, shardtree as st
        >>> folder = st.storage.MemoryStorage()
        >>> st.save({"w": st.ShardedTensor.from_rank_offsets("w", torch.zeros(4))}, folder)
        >>> st.verify(folder)
        ()
    """
    options = given_options("verify", options, LoadOptions)
    threads = as_int(options.threads)
    if options.threads is not None and (threads is None or threads < 1):
        heading, expected = "verify: invalid number of threads", "an int, 1 at least"
        raise StorageError(error_text(heading, found=repr(options.threads)[:200], expected=expected))
    nbytes = [0]

    def count(size: int) -> None:
        nbytes[0] += size
        options.progress(size)

    # Reads don't check hashes here: they would raise at the first damage, whereas a strategy returns all findings.
    counting = replace(options, verify=None, progress=in_turn(count), threads=threads)
    findings = _findings(checkpoint_dir, counting, strategies)
    damage = tuple(finding for finding in findings if isinstance(finding, Damage))
    unchecked = tuple(finding for finding in findings if isinstance(finding, Unchecked))
    if report is not None:
        report(VerifyReport(nbytes[0], unchecked, _bytes_checked(findings), damage))
    elif unchecked:
        for why, ones in by_reason(unchecked).items():
            amount = f"{sum(finding.nbytes for finding in ones)} bytes in {plural(len(ones), 'file')}"
            logger.warning("verify: %s, such as %r, could not be checked: %s", amount, ones[0].file, why)
    return damage


def _bytes_checked(findings: Iterable[Finding]) -> int:
    by_file: dict[str, int] = {}
    for one in findings:
        if isinstance(one, Checked):  # of two kinds of checksums, the one that covers more bytes
            by_file[one.file] = max(by_file.get(one.file, 0), one.nbytes)
    return sum(by_file.values())


def _findings(directory: Directory, options: LoadOptions, strategies: Strategies | None) -> tuple[Finding, ...]:
    try:
        checkpoint = open_at(directory, one_process(), options, strategies)
    except CorruptCheckpoint as error:
        # Damage is this function's result, so it isn't raised.
        return (Damage(METADATA_FILE, str(error)),)
    sharded, common = sharded_backend(checkpoint.fields), common_backend(checkpoint.fields)
    rows = [partial(strategy_of(StrategyAction.VERIFY, None, sharded, strategies), checkpoint)]
    verify_common = find_strategy(StrategyAction.VERIFY, *common, strategies=strategies)
    if verify_common is None:
        rows.append(partial(_unverified_common, checkpoint, strategies))
    elif common != sharded:
        beside = checkpoint
        if are_objects_beside(sharded, common, strategies):
            # The objects are shards of that format, which checks them as in a checkpoint that has no other format.
            names = {"sharded_backend": common[0], "sharded_backend_version": common[1]}
            beside = replace(checkpoint, fields={**checkpoint.fields, **names})
        rows.append(partial(verify_common, beside))
    # A file whose hash is in the manifest was checked whole, including parts that its own format can't check.
    with unless_replaced(checkpoint):
        by_manifest, whole = manifest_findings(checkpoint)
        findings = (*by_manifest, *_metadata(checkpoint), *(finding for row in rows for finding in row()))
        findings += _passed_over(checkpoint, findings, strategies)
        if not is_damaged(findings):  # damaged bytes can't be loaded in any case
            findings += (*_common_findings(checkpoint, strategies), *_overlaps(checkpoint, strategies))
    if is_damaged(findings):
        refuse_replaced(checkpoint)
    return tuple(one for one in findings if not (isinstance(one, Unchecked) and one.file in whole))


def _passed_over(
    checkpoint: Checkpoint, findings: Sequence[Finding], strategies: Strategies | None
) -> tuple[Unchecked, ...]:
    """Return the files of shards that no finding is about, as unchecked: the format's `verify` has skipped them."""
    backend = sharded_backend(checkpoint.fields)
    list_files = find_strategy(StrategyAction.LIST_FILES, *backend, strategies=strategies)
    names = {*list_files(checkpoint)} if list_files and not is_damaged(findings) else set()
    lengths = {name: checkpoint.storage.length(name) for name in names - {one.file for one in findings}}
    why = f"the format {backend[0]} {backend[1]} does not check this file"
    return tuple(Unchecked(name, why, length) for name, length in sorted(lengths.items()) if length)


def _common_findings(checkpoint: Checkpoint, strategies: Strategies | None) -> Iterator[Finding]:
    """Yield a finding if the common state can't be loaded, although no damage to its bytes was found."""
    backend, version = common_backend(checkpoint.fields)
    load = find_strategy(StrategyAction.LOAD_COMMON, backend, version, strategies=strategies)
    if load is None:
        return
    try:
        load(checkpoint)
    except (UnsafeFile, UnsupportedValue) as error:
        yield from refused_findings({"the common state": str(error)})
    except CorruptCheckpoint as error:
        yield Damage("", str(error))


def _overlaps(checkpoint: Checkpoint, strategies: Strategies | None) -> Iterator[Damage]:
    """Yield damage for each tensor whose stored chunks overlap: no load accepts it, even if all bytes are as saved."""
    load_metadata = strategy_of(StrategyAction.LOAD_METADATA, None, sharded_backend(checkpoint.fields), strategies)
    try:
        metadata = load_metadata(checkpoint)
    except (UnsafeFile, UnsupportedValue):
        return  # the format's own row reports what isn't read
    except CorruptCheckpoint as error:
        yield Damage("", str(error))
        return
    stored = metadata.stored if isinstance(metadata, DeferredMetadata) else metadata
    if not isinstance(stored, IndexMetadata):
        return
    chunks = chunks_of(stored.index, np.arange(stored.index.key_axes.size))
    boxes = shard_boxes(chunks.offset, chunks.shape, chunks.start, chunks.stop)
    for number in shared_groups(chunks.key[boxes.shard], boxes.offset, boxes.shape).tolist():
        key = text_at(stored.index.key_text, stored.index.key_start, number)
        file = stored.index.file(int(chunks.file[np.searchsorted(chunks.key, number)]))
        yield Damage(file.name, f"stored chunks of {key!r} overlap", keys=(key,))


def _unverified_common(checkpoint: Checkpoint, strategies: Strategies | None) -> tuple[Unchecked, ...]:
    """Return an `Unchecked` finding for each file of the common state, whose format can't check it.

    If the format can't list the common state's files, there is a finding for each file of the checkpoint.
    """
    backend = common_backend(checkpoint.fields)
    list_files, storage = find_strategy(StrategyAction.LIST_FILES, *backend, strategies=strategies), checkpoint.storage
    lengths = {name: storage.length(name) for name in (list_files(checkpoint) if list_files else storage.names())}
    why = f"the format {backend[0]} {backend[1]} cannot check a common state"
    return tuple(Unchecked(name, why, length) for name, length in lengths.items() if length)


def _metadata(checkpoint: Checkpoint) -> tuple[Finding, ...]:
    """Return metadata.json as checked if it contains its own hash, else as unchecked.

    Nothing is returned if the file doesn't exist, or another program wrote it.
    """
    length = checkpoint.storage.length(METADATA_FILE)
    if length is None or is_of_others(checkpoint.storage.read(METADATA_FILE)):
        return ()
    checkpoint.options.progress(length)
    if "digest" in checkpoint.fields:
        return (Checked(METADATA_FILE, length),)
    return (Unchecked(METADATA_FILE, "metadata.json has no hash in this format", length),)
