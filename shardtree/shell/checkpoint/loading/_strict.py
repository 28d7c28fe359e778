"""The strict modes: actions on keys that only the target or only the checkpoint has."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from enum import Enum

from ....core.plans import Unexpected, prefix_difference
from ....errors import KeyMismatch, error_text
from ...table import IN_COMMON

logger = logging.getLogger("shardtree")


class StrictHandling(Enum):
    """What to do about mismatched keys; the modes and their meaning are Megatron-Core's.

    *Unexpected* keys are asked for by this rank's target and not stored. *Missing* keys are stored and asked for by no
    rank; the ``*_ALL`` modes look for them too, for which ranks exchange their keys.

    Attributes:
        ASSUME_OK_UNEXPECTED: keys aren't compared; an unexpected key is an error of the load's check, before a tensor
            is read, or of the read where a format can't list its keys.
        LOG_UNEXPECTED: warn of unexpected keys, all by name, and leave them out of dicts. A list, tuple or instance of
            a class keeps the target's own value there, and that of a plain value or plain tensor that isn't stored, as
            do dicts within such a place; a shard without data is an error. Stored fields that a class has no more are
            left out. A list or tuple may have got longer or shorter if plain values are stored in it, or shards are
            asked for, but not both: that is an error, since values have no keys that tell to which shards they belong.
            So it is in all modes that leave something out.
        LOG_ALL: warn of unexpected and missing keys, all by name, and leave out the unexpected.
        RAISE_UNEXPECTED: unexpected keys are an error before anything is read: a `KeyMismatch`, which has all of them
            as its attribute `unexpected`.
        RAISE_ALL: unexpected and missing keys are; the attributes `unexpected` and `missing` have all.
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
RAISING = {_S.RAISE_UNEXPECTED, _S.RAISE_ALL}
LOGGING = {_S.LOG_UNEXPECTED, _S.LOG_ALL}
RETURNING = {_S.RETURN_UNEXPECTED, _S.RETURN_ALL}
LEAVING_OUT = {*StrictHandling} - RAISING - {_S.ASSUME_OK_UNEXPECTED}
"""Modes that leave out what isn't stored, or keep the target's own value where a container needs one."""
WITH_MISSING = {_S.LOG_ALL, _S.RAISE_ALL, _S.RETURN_ALL, _S.IGNORE_ALL}
"""Modes that need the keys that all ranks ask for."""


def parse_strict(strict: str | StrictHandling) -> StrictHandling:
    """Return the mode of a name.

    Raises:
        KeyMismatch: There is no such mode.

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


def mismatched_keys(
    strict: StrictHandling, own: set[str], checkpoint_keys: set[str], everywhere: set[str]
) -> tuple[set[str], set[str]]:
    """Return the missing and the unexpected keys, as far as a mode needs them.

    Args:
        strict: The mode.
        own: The keys of this rank's target.
        checkpoint_keys: The stored keys.
        everywhere: The keys of all ranks' targets; unused if the mode doesn't need it.

    Examples:
        >>> mismatched_keys(StrictHandling.RETURN_ALL, {"a", "x"}, {"a", "b"}, {"a", "x"})
        ({'b'}, {'x'})
    """
    if strict is _S.ASSUME_OK_UNEXPECTED:
        return set(), set()
    return checkpoint_keys - everywhere if strict in WITH_MISSING else set(), own - checkpoint_keys


def settle_keys(strict: StrictHandling, missing: Iterable[str], unexpected: Sequence[Unexpected]) -> None:
    """Log the keys that differ, or raise for them, if the mode is one that does.

    Raises:
        KeyMismatch: There is such a key, and the mode raises.
    """
    if strict in LOGGING:
        _log_keys(missing, unexpected)
    elif strict in RAISING:
        refuse_keys(missing, unexpected)


def _log_keys(missing: Iterable[str], unexpected: Sequence[Unexpected]) -> None:
    """Log keys that differ, if there are any, each on a line of one message."""
    absent = sorted(missing)
    # Each line is an error's text of its own: one text for all would be cut to its first ten.
    keys = [*map(_unexpected_line, unexpected), *map(_missing_line, absent)]
    lines = [_differing(absent, unexpected), *map(error_text, keys)]
    if absent or unexpected:
        logger.warning("\n  ".join(lines))


def refuse_keys(missing: Iterable[str], unexpected: Sequence[Unexpected]) -> None:
    """Raise if keys differ. The error shows some of each kind, and has all of them as attributes.

    Raises:
        KeyMismatch: There is a missing or an unexpected key.

    Examples:
        >>> refuse_keys(["step"], [])
        Traceback (most recent call last):
        ...
        shardtree.errors.KeyMismatch: load: keys of target and checkpoint differ: 1 missing
          missing (stored, asked for by no rank): 'step'
          Change the target's keys, or pass a strict mode that logs, returns or ignores them.
    """
    absent, prefix = sorted(missing), prefix_difference(unexpected)
    if not absent and not unexpected:
        return
    # If all keys differ by one prefix, each missing key is the near one of an unexpected key: one line says so for all.
    near = set() if prefix is None else set(prefix.near)
    others = [_missing_line(key) for key in absent if key not in near]
    lines = _some(list(map(_unexpected_line, unexpected)) if prefix is None else [str(prefix)], others)
    fixes = [] if prefix is None else [prefix.fix]
    fixes += [IN_COMMON] * any(one.path is not None for one in unexpected)
    fixes.append("Change the target's keys, or pass a strict mode that logs, returns or ignores them.")
    error = KeyMismatch(error_text(_differing(absent, unexpected), offenders=lines, fix="\n  ".join(fixes)))
    error.missing, error.unexpected = tuple(absent), tuple(sorted(one.key for one in unexpected))
    raise error


def _differing(missing: Sequence[str], unexpected: Sequence[Unexpected]) -> str:
    counts = [f"{len(keys)} {kind}" for kind, keys in (("unexpected", unexpected), ("missing", missing)) if keys]
    return f"load: keys of target and checkpoint differ: {', '.join(counts)}"


def _unexpected_line(one: Unexpected) -> str:
    why = "not stored" if one.refusal is None else "can't be read"
    return f"unexpected (asked for, {why}): {one.text}"


def _missing_line(key: str) -> str:
    return f"missing (stored, asked for by no rank): {key!r}"


def _some(unexpected: Sequence[str], missing: Sequence[str]) -> list[str]:
    """Return at most the ten lines that an error shows, some of each kind."""
    lines: list[str] = []
    for kind, own, others in (("unexpected", unexpected, missing), ("missing", missing, unexpected)):
        # Some of each kind: ten lines of one kind would hide the other.
        most = max(5, 10 - len(others))
        more = f"and {len(own) - most + 1} more {kind} ones, all of which are in the error's `{kind}`"
        lines += own if len(own) <= most else [*own[: most - 1], more]
    return lines
