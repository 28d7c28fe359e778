"""Bytes, rates and counts as people read them."""

from __future__ import annotations

import re

_UNITS = {"": 1, "B": 1} | {
    f"{letter}{form}": base**power
    for power, letter in enumerate("KMGT", start=1)
    for form, base in (("", 1000), ("B", 1000), ("IB", 1024))
}


def size(count: int) -> str:
    """Return a number of bytes in the decimal unit that suits it.

    Examples:
        >>> size(999), size(68_123_456), size(2_000_000_000)
        ('999 B', '68.1 MB', '2.0 GB')
    """
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count} B"


def parse_size(text: str) -> int:
    """Return the number of bytes that a person writes: MB and its like are decimal, MiB and its like binary.

    Raises:
        ValueError: it is no such number, or below one.

    Examples:
        >>> parse_size("256MB"), parse_size("1.5 GiB"), parse_size("4096")
        (256000000, 1610612736, 4096)
    """
    found = re.fullmatch(r"(\d{1,15}(?:\.\d{1,15})?) ?([A-Za-z]*)", text.strip(), re.ASCII)
    unit = _UNITS.get(found[2].upper()) if found else None
    if found is None or unit is None or float(found[1]) * unit < 1:
        raise ValueError(f"{text!r} is no number of bytes, as 256MB or 1GiB are")
    return int(float(found[1]) * unit)


def rate(count: int, seconds: float) -> str:
    """Return bytes in seconds as GB/s, or MB/s where that says more.

    Examples:
        >>> rate(272_000_000, 0.5), rate(2_000_000, 0.1)
        ('0.54 GB/s', '20.00 MB/s')
    """
    a_second = count / max(seconds, 1e-9)
    return f"{a_second / 1e9:.2f} GB/s" if a_second >= 1e8 else f"{a_second / 1e6:.2f} MB/s"


def pace(count: int, seconds: float) -> str:
    """Return how long moving bytes took, and how fast that was where there were enough of them to tell.

    Examples:
        >>> pace(2_000, 0.1), pace(272_000_000, 0.5)
        ('in 0.10 s', 'in 0.50 s, 0.54 GB/s')
    """
    return f"in {seconds:.2f} s" + (f", {rate(count, seconds)}" if count >= 10**7 else "")


def lengths(pieces: list[int]) -> str:
    """Return how long pieces are, equal neighbours together.

    Examples:
        >>> lengths([7631, 7631, 7630, 7630]), lengths([5])
        ('2 x 7,631 + 2 x 7,630', '5')
    """
    groups: list[list[int]] = []
    for length in pieces:
        if groups and groups[-1][1] == length:
            groups[-1][0] += 1
        else:
            groups.append([1, length])
    return " + ".join(f"{length:,}" if count == 1 else f"{count} x {length:,}" for count, length in groups)
