"""Bytes, rates and counts as people read them."""

from __future__ import annotations


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


def rate(count: int, seconds: float) -> str:
    """Return bytes in seconds as GB/s, or MB/s where that says more.

    Examples:
        >>> rate(272_000_000, 0.5), rate(2_000_000, 0.1)
        ('0.54 GB/s', '20.00 MB/s')
    """
    a_second = count / max(seconds, 1e-9)
    return f"{a_second / 1e9:.2f} GB/s" if a_second >= 1e8 else f"{a_second / 1e6:.2f} MB/s"


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
