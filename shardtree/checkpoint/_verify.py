"""verify: whether every byte of a checkpoint is what was saved, and where it isn't."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from .._ambient import shielded
from ..errors import CorruptCheckpoint, StorageError, UnsafeFile, UnsupportedValue, error_text, plural
from ..geometry import as_int
from ..storage import Directory, in_turn
from ..strategies import (
    METADATA_FILE,
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
    is_of_others,
    manifest_findings,
    refuse_replaced,
    refused_findings,
    unless_replaced,
)
from ..world import one_process
from ._dispatch import are_objects_beside, common_backend, given_options, sharded_backend, strategy_of
from ._open import open_at

logger = logging.getLogger("shardtree")


@shielded
def verify(
    checkpoint_dir: Directory,
    *,
    report: Callable[[VerifyReport], None] | None = None,
    strategies: Strategies | None = None,
    options: LoadOptions | None = None,
) -> tuple[Damage, ...]:
    """Return what is damaged in a checkpoint, by file, bytes, key and region; nothing where all is as it was saved.

    Every file is read whole, headers and padding included. Not collective. Formats other than our own have checksums
    for a part of their bytes, or none: bytes without a checksum go to `report`, and without that to the log.

    Args:
        checkpoint_dir: where the checkpoint is.
        report: called once, with how many bytes were read and which couldn't be checked.
        strategies: the dispatch table; None for the process's.
        options: `threads`, `progress`, and what decides which values a load takes: `types` and `allow_pickle`. Values
            that a load with these options refuses are in the report, by name; they aren't damage.

    Raises:
        NotACheckpoint: there is none.
        CheckpointReplaced: another save took its place meanwhile, and what was read looks damaged.
        StrategyError: the format carries nothing to check.
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
        what, expected = "verify: not a number of threads", "an int, 1 at least"
        raise StorageError(error_text(what, found=repr(options.threads)[:200], expected=expected))
    nbytes = [0]

    def count(size: int) -> None:
        nbytes[0] += size
        options.progress(size)

    # No check in the reads themselves: a strategy returns all findings, where a load's check raises at the first one.
    counting = replace(options, verify=None, progress=in_turn(count), threads=threads)
    findings = _findings(checkpoint_dir, counting, strategies)
    unchecked = tuple(one for one in findings if isinstance(one, Unchecked))
    if report is not None:
        report(VerifyReport(nbytes[0], unchecked))
    elif unchecked:
        for why, ones in by_reason(unchecked).items():
            amount = f"{sum(one.nbytes for one in ones)} bytes in {plural(len(ones), 'file')}"
            logger.warning("verify: %s, such as %r, couldn't be checked: %s", amount, ones[0].file, why)
    return tuple(one for one in findings if isinstance(one, Damage))


def _findings(directory: Directory, options: LoadOptions, strategies: Strategies | None) -> tuple[Finding, ...]:
    try:
        checkpoint = open_at(directory, one_process(), options, strategies)
    except CorruptCheckpoint as error:
        # Damage, not an error of the call: finding it is what was asked for.
        return (Damage(METADATA_FILE, str(error)),)
    sharded, common = sharded_backend(checkpoint.fields), common_backend(checkpoint.fields)
    rows = [partial(strategy_of(StrategyAction.VERIFY, None, sharded, strategies), checkpoint)]
    verify_common = find_strategy(StrategyAction.VERIFY, *common, strategies=strategies)
    if common != sharded and verify_common is not None:
        beside = checkpoint
        if are_objects_beside(sharded, common, strategies):
            # The objects are that format's shards: it checks them as those of a checkpoint that is all its own.
            names = {"sharded_backend": common[0], "sharded_backend_version": common[1]}
            beside = replace(checkpoint, fields={**checkpoint.fields, **names})
        rows.append(partial(verify_common, beside))
    # A file whose hash is in the manifest was checked whole, whatever its own format can't check of it.
    with unless_replaced(checkpoint):
        by_manifest, whole = manifest_findings(checkpoint)
        findings = (*by_manifest, *_metadata(checkpoint), *(finding for row in rows for finding in row()))
        if not any(isinstance(one, Damage) for one in findings):  # damaged bytes can't be loaded in any case
            findings += tuple(_common_findings(checkpoint, strategies))
    if any(isinstance(one, Damage) for one in findings):
        refuse_replaced(checkpoint)
    return tuple(one for one in findings if not (isinstance(one, Unchecked) and one.file in whole))


def _common_findings(checkpoint: Checkpoint, strategies: Strategies | None) -> Iterator[Finding]:
    """Yield what keeps the common state from being loaded, whose bytes are as they were saved."""
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


def _metadata(checkpoint: Checkpoint) -> tuple[Unchecked, ...]:
    """Return metadata.json where it has no hash; one that has a hash was checked when it was opened."""
    length = checkpoint.storage.length(METADATA_FILE)
    if length is None or is_of_others(checkpoint.storage.read(METADATA_FILE)):
        return ()
    checkpoint.options.progress(length)
    if "digest" in checkpoint.fields:
        return ()
    return (Unchecked(METADATA_FILE, "metadata.json has no hash in this format", length),)
