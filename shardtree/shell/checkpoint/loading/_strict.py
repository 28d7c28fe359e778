"""The strict modes: actions for keys that only the target or only the checkpoint has."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from enum import Enum

from ....core.plans import Unexpected, prefix_difference
from ....errors import KeyMismatch, error_text

logger = logging.getLogger("shardtree")


class StrictHandling(Enum):
    """Modes for mismatched keys, with the names and meanings of Megatron-Core's.

    *Unexpected* keys are requested by this rank's target but not stored. *Missing* keys are stored but requested by no
    rank. The ``*_ALL`` modes look for missing keys too, for which ranks exchange their keys.

    Modes that leave keys out treat the target's containers as follows:

    - A dict of the result lacks what isn't stored.
    - A list, tuple or instance of a class keeps the target's own value where none is stored: the data of a shard, a
      plain value or a plain tensor. So does a dict inside it if nothing is loaded into the dict. If values are loaded
      into the container, but a shard that isn't stored has no data, the load raises a TreeError.
    - An instance of a class lacks stored fields that the class doesn't have by now.
    - A list or tuple may have another length than the stored one. But if the target requests shards in it, and the
      stored one has plain values, another length is a TreeError.

    Attributes:
        ASSUME_OK_UNEXPECTED: Keys aren't compared. An unexpected key is an error of the load's check, before a tensor
            is read, or of the read if the format can't list its keys.
        LOG_UNEXPECTED: Unexpected keys are logged, all by name, and left out.
        LOG_ALL: Unexpected and missing keys are logged, all by name, and unexpected ones left out.
        RAISE_UNEXPECTED: Unexpected keys are an error before anything is read: a `KeyMismatch`, whose attribute
            `unexpected` lists all of them.
        RAISE_ALL: Unexpected and missing keys are an error: a `KeyMismatch`, whose attributes `unexpected` and
            `missing` list all of them.
        RETURN_UNEXPECTED: Unexpected keys are left out and returned.
        RETURN_ALL: Unexpected keys are left out and returned, and missing keys are returned too.
        IGNORE_ALL: Unexpected keys are left out silently.

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
"""Modes that leave out values that aren't stored, or keep the target's own value where a container needs one."""
WITH_MISSING = {_S.LOG_ALL, _S.RAISE_ALL, _S.RETURN_ALL, _S.IGNORE_ALL}
"""Modes that need the requested keys of all ranks."""


def parse_strict(strict: str | StrictHandling) -> StrictHandling:
    """Return the strict mode with a name; a mode is returned unchanged.

    Raises:
        KeyMismatch: The name is unknown.

    Examples:
        >>> parse_strict("raise_all")
        <StrictHandling.RAISE_ALL: 'raise_all'>
    """
    try:
        return StrictHandling(strict)
    except ValueError:
        modes = ", ".join(repr(mode.value) for mode in StrictHandling)
        raise KeyMismatch(
            error_text("load: unknown strict mode", found=repr(strict), expected=f"one of {modes}")
        ) from None


def mismatched_keys(
    strict: StrictHandling, own: set[str], checkpoint_keys: set[str], everywhere: set[str]
) -> tuple[set[str], set[str]]:
    """Return the missing keys (stored, requested by no rank) and the unexpected keys (requested here, not stored).

    A set that the strict mode does not use is empty.

    Args:
        strict: The strict mode.
        own: The keys of this rank's target.
        checkpoint_keys: The stored keys.
        everywhere: The keys of all ranks' targets; unused if the mode does not look for missing keys.

    Examples:
        >>> mismatched_keys(StrictHandling.RETURN_ALL, {"a", "x"}, {"a", "b"}, {"a", "x"})
        ({'b'}, {'x'})
    """
    if strict is _S.ASSUME_OK_UNEXPECTED:
        return set(), set()
    return checkpoint_keys - everywhere if strict in WITH_MISSING else set(), own - checkpoint_keys


def settle_keys(strict: StrictHandling, missing: Iterable[str], unexpected: Sequence[Unexpected]) -> None:
    """Log the missing and unexpected keys, or raise for them, or do nothing, according to the strict mode.

    Raises:
        KeyMismatch: There are such keys, and the mode is one that raises.
    """
    if strict in LOGGING:
        _log_keys(missing, unexpected)
    elif strict in RAISING:
        refuse_keys(missing, unexpected)


def _log_keys(missing: Iterable[str], unexpected: Sequence[Unexpected]) -> None:
    """Log missing and unexpected keys, if there are any, in a single message with a line for each."""
    absent = sorted(missing)
    # Each line is formatted separately, since a common text would be shortened to its first ten lines.
    keys = [*map(_unexpected_line, unexpected), *map(_missing_line, absent)]
    lines = [_differing(absent, unexpected), *map(error_text, keys)]
    if absent or unexpected:
        logger.warning("\n  ".join(lines))


def refuse_keys(missing: Iterable[str], unexpected: Sequence[Unexpected]) -> None:
    """Raise if there are missing or unexpected keys; the text shows some of each, the error's attributes list all.

    Raises:
        KeyMismatch: There is a missing or an unexpected key.

    Examples:
        >>> refuse_keys(["step"], [])
        Traceback (most recent call last):
        ...
        shardtree.errors.KeyMismatch: load: keys of target and checkpoint differ: 1 missing
          missing (stored, asked for by no rank): 'step'
          Change the target's keys, or load anyway: strict='log_all', 'return_all' or 'ignore_all'.
    """
    absent, prefix = sorted(missing), prefix_difference(unexpected)
    if not absent and not unexpected:
        return
    # If all keys differ in the same prefix, each missing key is similar to an unexpected one: one line covers all.
    near = set() if prefix is None else set(prefix.near)
    others = [_missing_line(key) for key in absent if key not in near]
    lines = _some(list(map(_unexpected_line, unexpected)) if prefix is None else [str(prefix)], others)
    fixes = [] if prefix is None else [prefix.fix]
    fixes += dict.fromkeys(key.fix for key in unexpected if key.path is not None)
    fixes.append("Change the target's keys, or load anyway: strict='log_all', 'return_all' or 'ignore_all'.")
    error = KeyMismatch(error_text(_differing(absent, unexpected), offenders=lines, fix="\n  ".join(fixes)))
    error.missing, error.unexpected = tuple(absent), tuple(sorted(item.key for item in unexpected))
    raise error


def _differing(missing: Sequence[str], unexpected: Sequence[Unexpected]) -> str:
    counts = [f"{len(keys)} {kind}" for kind, keys in (("unexpected", unexpected), ("missing", missing)) if keys]
    return f"load: keys of target and checkpoint differ: {', '.join(counts)}"


def _unexpected_line(one: Unexpected) -> str:
    why = "not stored" if one.refusal is None else "cannot be read"
    return f"unexpected (asked for, {why}): {one.text}"


def _missing_line(key: str) -> str:
    return f"missing (stored, asked for by no rank): {key!r}"


def _some(unexpected: Sequence[str], missing: Sequence[str]) -> list[str]:
    """Return at most ten of the lines about unexpected and missing keys, with some of both kinds."""
    lines: list[str] = []
    for kind, keys, others in (("unexpected", unexpected, missing), ("missing", missing, unexpected)):
        # Ten lines of one kind would hide the other.
        most = max(5, 10 - len(others))
        more = f"and {len(keys) - most + 1} more {kind} ones, all of which are in the error's `{kind}`"
        lines += keys if len(keys) <= most else [*keys[: most - 1], more]
    return lines
