"""What a load does about keys that only the target or only the checkpoint has."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from ....core.plans import Unexpected, prefix_difference
from ....errors import KeyMismatch, TreePath, error_text, render_path

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


def mismatched_keys(
    strict: StrictHandling, own: set[str], checkpoint_keys: set[str], everywhere: set[str]
) -> tuple[set[str], set[str]]:
    """Return the missing and the unexpected keys, as far as a mode needs them.

    Args:
        strict: the mode.
        own: what this rank asks for.
        checkpoint_keys: what is stored.
        everywhere: what all ranks ask for; unused if the mode doesn't need it.

    Examples:
        >>> mismatched_keys(StrictHandling.RETURN_ALL, {"a", "x"}, {"a", "b"}, {"a", "x"})
        ({'b'}, {'x'})
    """
    if strict is _S.ASSUME_OK_UNEXPECTED:
        return set(), set()
    return checkpoint_keys - everywhere if strict in WITH_MISSING else set(), own - checkpoint_keys


def log_keys(missing: Iterable[str], unexpected: Sequence[Unexpected]) -> None:
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
        KeyMismatch: there is a missing or an unexpected key.

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
    fixes += dict.fromkeys(one.fix for one in unexpected if one.path is not None)
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


@dataclass(frozen=True, slots=True)
class Omissions:
    """What a load leaves out.

    Attributes:
        left_out: paths of stored plain values that can't be returned, since containers around them lack shards.
        unfilled: paths of plain tensors of the target for which nothing is stored.
        kept: paths of the target's own values that are in the result, since nothing is stored for them.
        union_paths: of all plain values of a common state that is the union of several ranks'.
        unasked_bits: of each rank, which of them its part of the union lacks, as bits.
    """

    left_out: tuple[str, ...] = ()
    unfilled: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    union_paths: tuple[TreePath, ...] = ()
    unasked_bits: tuple[bytes, ...] = ()

    @property
    def shared(self) -> tuple[tuple[str, ...], tuple[str, ...], tuple[bytes, ...]]:
        """What other ranks learn of it: `unfilled`, `kept` and `unasked_bits`."""
        return self.unfilled, self.kept, self.unasked_bits

    def unasked_paths(self, all_bits: Sequence[bytes]) -> tuple[str, ...]:
        """Return the paths of the united values that no rank's part has, given the bits of all ranks."""
        if len(set(map(len, all_bits))) != 1:  # nothing was united, or a function of the caller's loads other states
            return ()
        of_all = np.bitwise_and.reduce([np.frombuffer(bits, dtype=np.uint8) for bits in all_bits])
        numbers = np.flatnonzero(np.unpackbits(of_all, count=len(self.union_paths)))
        return tuple(render_path(self.union_paths[number]) for number in numbers)

    def with_those_of(self, others: Omissions) -> Omissions:
        """Return what is left out of the targets of some ranks and of others, each path once."""
        return Omissions(
            tuple(dict.fromkeys((*self.left_out, *others.left_out))),
            tuple(dict.fromkeys((*self.unfilled, *others.unfilled))),
            tuple(dict.fromkeys((*self.kept, *others.kept))),
            self.union_paths or others.union_paths,
            (*self.unasked_bits, *others.unasked_bits),
        )


STORED_VALUES = (
    "load: stored values are left out: shards beside them in a list, tuple or record aren't asked for, or the target's "
    "class hasn't these fields"
)
TARGET_TENSORS = "load: tensors of the target, or values that hold some, that aren't stored: they aren't in the result"
RANK_VALUES = "load: stored values that only some ranks had are left out: no rank's target has their keys"
KEPT_VALUES = (
    "load: no value is stored for these places; the target's own is kept, since a list, tuple or class needs one"
)
_FIXES = {
    STORED_VALUES: (
        "Put these shards in the target, or pass a strict mode that logs, returns or ignores what isn't loaded."
    ),
    TARGET_TENSORS: (
        "Leave them out of the target, put them in a `LocalNonpersistentObject`, or pass another strict mode."
    ),
    RANK_VALUES: "Put these keys in a rank's target, or pass another strict mode.",
}
"""What isn't in the result of a load, and what to do about that."""


def refuse_omissions(strict: StrictHandling, what: str, paths: Sequence[str]) -> None:
    """Raise if stored values aren't loaded, or plain tensors not filled, where a mode raises for all.

    Args:
        strict: the mode.
        what: `STORED_VALUES`, `TARGET_TENSORS` or `RANK_VALUES`.
        paths: of the values or tensors.

    Raises:
        KeyMismatch: there is one.
    """
    if strict is _S.RAISE_ALL and paths:
        raise KeyMismatch(error_text(what, offenders=paths, fix=_FIXES[what]))


def log_omissions(what: str, paths: Sequence[str]) -> None:
    """Log the paths of what isn't in the result, if there are any."""
    if paths:
        logger.warning("\n  ".join([what, *map(error_text, paths)]))


def log_of_ranks(mode: StrictHandling, unfilled: Iterable[str], kept: Iterable[str], unasked: Sequence[str]) -> None:
    """Log what the ranks' results lack or keep of their targets, each path once, and what none of them asks for."""
    log_omissions(TARGET_TENSORS, list(dict.fromkeys(unfilled)))
    log_omissions(KEPT_VALUES, [] if mode is _S.IGNORE_ALL else list(dict.fromkeys(kept)))
    log_omissions(RANK_VALUES, unasked if mode in LOGGING else ())


def log_untaken(reasons: Mapping[str, str]) -> None:
    """Log what is stored and can't be loaded, with why, by key; nothing if there is nothing."""
    if reasons:
        lines = [error_text(f"{name!r}: {why}") for name, why in sorted(reasons.items())]
        logger.warning("\n  ".join(["load: stored tensors are left out, as they can't be read", *lines]))
