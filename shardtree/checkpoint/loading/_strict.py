"""What a load does about keys that only the target or only the checkpoint has."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from enum import Enum

from ...errors import KeyMismatch, error_text

logger = logging.getLogger("shardtree")


class StrictHandling(Enum):
    """What to do about mismatched keys; the modes and their meaning are Megatron-Core's.

    *Unexpected* keys are asked for by this rank's target and not stored. *Missing* keys are stored and asked for by no
    rank; the ``*_ALL`` modes look for them too, for which the ranks tell each other their keys.

    Attributes:
        ASSUME_OK_UNEXPECTED: don't look beforehand; an unexpected key is an error when it is read.
        LOG_UNEXPECTED: warn of unexpected keys and leave them out.
        LOG_ALL: warn of unexpected and missing keys, and leave out the unexpected.
        RAISE_UNEXPECTED: unexpected keys are an error before anything is read.
        RAISE_ALL: unexpected and missing keys are.
        RETURN_UNEXPECTED: leave unexpected keys out and return them.
        RETURN_ALL: leave unexpected keys out and return them and the missing ones.
        IGNORE_ALL: leave unexpected keys out in silence.

    References:
        megatron.core.dist_checkpointing.validation.StrictHandling, megatron-core 0.16.1.
    """

    ASSUME_OK_UNEXPECTED = "assume_ok_unexpected"
    LOG_UNEXPECTED = "log_unexpected"
    LOG_ALL = "log_all"
    RAISE_UNEXPECTED = "raise_unexpected"
    RAISE_ALL = "raise_all"
    RETURN_UNEXPECTED = "return_unexpected"
    RETURN_ALL = "return_all"
    IGNORE_ALL = "ignore_all"


_S = StrictHandling
_WITH_MISSING = {_S.LOG_ALL, _S.RAISE_ALL, _S.RETURN_ALL, _S.IGNORE_ALL}


def parse_strict(strict: str | StrictHandling) -> StrictHandling:
    """Return the mode that a name stands for.

    Raises:
        KeyMismatch: there is no such mode.

    Examples:
        >>> parse_strict("raise_all")
        <StrictHandling.RAISE_ALL: 'raise_all'>
    """
    try:
        return StrictHandling(strict)
    except ValueError:
        modes = ", ".join(repr(mode.value) for mode in StrictHandling)
        raise KeyMismatch(
            error_text("load: no such strict mode", found=repr(strict), expected=f"one of {modes}")
        ) from None


def looks_beforehand(strict: StrictHandling) -> bool:
    """Return whether a mode compares keys before anything is read."""
    return strict is not _S.ASSUME_OK_UNEXPECTED


def needs_all_ranks(strict: StrictHandling) -> bool:
    """Return whether a mode needs the keys that all ranks ask for."""
    return strict in _WITH_MISSING


def returns_keys(strict: StrictHandling) -> bool:
    """Return whether a mode makes `load` return missing and unexpected keys beside the tree."""
    return strict in {_S.RETURN_UNEXPECTED, _S.RETURN_ALL}


def report_keys(strict: StrictHandling, missing: Iterable[str], unexpected: Iterable[str]) -> None:
    """Raise or log what a mode wants raised or logged.

    Raises:
        KeyMismatch: in a mode that raises, if there is any key.
    """
    lines = [f"missing (stored, asked for by no rank): {key!r}" for key in sorted(missing)]
    lines += [f"unexpected (asked for, not stored): {key!r}" for key in sorted(unexpected)]
    if not lines:
        return
    if strict in {_S.RAISE_UNEXPECTED, _S.RAISE_ALL}:
        fix = "Change the target's keys, or pass a strict mode that logs, returns or ignores them."
        raise KeyMismatch(error_text("load: keys of target and checkpoint differ", offenders=lines, fix=fix))
    if strict in {_S.LOG_UNEXPECTED, _S.LOG_ALL}:
        logger.warning(error_text("load: keys of target and checkpoint differ", offenders=lines))


def report_left_out(strict: StrictHandling, paths: Sequence[str]) -> None:
    """Raise or log stored plain values that can't be returned, where a mode wants to know all that isn't loaded.

    Raises:
        KeyMismatch: in the mode that raises for missing keys, if there is any path.
    """
    if not paths or strict not in {_S.RAISE_ALL, _S.LOG_ALL}:
        return
    what = "load: stored values are left out, since the shards beside them in a list, tuple or record aren't asked for"
    if strict is _S.LOG_ALL:
        logger.warning(error_text(what, offenders=paths))
        return
    fix = "Put these shards in the target, or pass a strict mode that logs, returns or ignores what isn't loaded."
    raise KeyMismatch(error_text(what, offenders=paths, fix=fix))
