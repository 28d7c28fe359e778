"""Findings about whole files and spans of them: checked bytes, and reasons why other bytes have no checksum."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from ..errors import UnsupportedValue, error_text, plural
from ..shell.table import Checked, Finding, Unchecked


def gaps(length: int, spans: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Return the ranges of a file outside of the given spans.

    Examples:
        >>> gaps(10, [(4, 6), (1, 4)])
        ((0, 1), (6, 10))
    """
    ranges, at = [], 0
    for begin, end in sorted(spans):
        if begin > at:
            ranges.append((at, begin))
        at = max(at, end)
    return (*ranges, (at, length)) if at < length else tuple(ranges)


def span_findings(file: str, why: str, length: int, spans: Iterable[tuple[int, int]]) -> tuple[Finding, ...]:
    """Return a `Checked` for a file's bytes in spans, and an `Unchecked` for its other bytes.

    Args:
        file: Name of the file.
        why: Reason why other bytes have no checksum.
        length: Length of the file, in bytes.
        spans: Byte ranges that were compared with a checksum.

    Examples:
        >>> span_findings("f", "no checksum", 10, [(0, 7)])
        (Checked(file='f', nbytes=7), Unchecked(file='f', why='no checksum', nbytes=3, spans=((7, 10),)))
    """
    ranges = gaps(length, spans)
    nbytes = sum(end - begin for begin, end in ranges)
    unchecked = (Unchecked(file, why, nbytes, ranges if nbytes < length else ()),) if ranges else ()
    return (Checked(file, length - nbytes), *unchecked) if nbytes < length else unchecked


def untaken_findings(untaken: Mapping[str, str]) -> list[Unchecked]:
    """Return the findings about stored values that a format's reader can't load.

    Args:
        untaken: Reasons why values can't be loaded, by key or name.

    Examples:
        >>> untaken_findings({"text": "torch has no such dtype"})
        [Unchecked(file='text', why="'text' is not taken: torch has no such dtype", nbytes=0, spans=())]
    """
    return [Unchecked(name, f"{name!r} is not taken: {why}", 0) for name, why in sorted(untaken.items())]


def refused_findings(refused: Mapping[str, str]) -> list[Unchecked]:
    """Return one finding about all undamaged values that a load with the options of `verify` refuses.

    The list is empty if there are no such values.

    Args:
        refused: Text of the load's error for each value, by the value's name.

    Examples:
        >>> refused_findings({"rng/shard_0_1": "it names http.HTTPStatus, which is not known to be harmless"})[0].nbytes
        0
    """
    if not refused:
        return []
    name, error = min(refused.items())
    cause = error.partition("\n")[0]
    return [Unchecked(name, f"a load with these options refuses {plural(len(refused), 'value')}: {cause}", 0)]


def check_taken(untaken: Mapping[str, str], keys: Collection[str], doing: str = "load") -> None:
    """Raise if a requested value is stored in a way that can't be read.

    Args:
        untaken: Reasons by key, as in `untaken_findings`.
        keys: Requested keys.
        doing: Name of the operation, for the message.

    Raises:
        UnsupportedValue: A requested value can't be read.
    """
    wrong = [f"{key!r}: {untaken[key]}" for key in sorted(untaken.keys() & {*keys})]
    if wrong:
        fix = "Leave them out, or load them with the program that wrote them."
        raise UnsupportedValue(error_text(f"{doing}: some tensors cannot be read", offenders=wrong, fix=fix))
