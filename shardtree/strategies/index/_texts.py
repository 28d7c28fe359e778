"""Texts as one utf-8 column and where each starts: made, read and looked up."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from ...geometry import Column
from ._columns import Bytes


def text_columns(texts: Sequence[str]) -> tuple[Bytes, Column]:
    """Return texts as one utf-8 column, and where each starts.

    Examples:
        >>> text, start = text_columns(["ab", "c"])
        >>> bytes(text), start.tolist()
        (b'abc', [0, 2, 3])
    """
    encoded = [text.encode("utf-8") for text in texts]
    start = np.zeros(len(encoded) + 1, dtype=np.int64)
    np.cumsum([len(text) for text in encoded], out=start[1:])
    return np.frombuffer(b"".join(encoded), dtype=np.uint8), start


def text_at(text: Bytes, start: Column, number: int) -> str:
    """Return one text of a text column.

    Examples:
        >>> text_at(*text_columns(["ab", "c"]), 1)
        'c'
    """
    return text[start[number] : start[number + 1]].tobytes().decode("utf-8")


def texts(text: Bytes, start: Column) -> list[str]:
    """Return all texts of a text column.

    Examples:
        >>> texts(*text_columns(["ab", "c"]))
        ['ab', 'c']
    """
    joined, places = text.tobytes(), start.tolist()
    if joined.isascii():
        whole = joined.decode("ascii")
        return [whole[begin:end] for begin, end in pairwise(places)]
    return [joined[begin:end].decode("utf-8") for begin, end in pairwise(places)]


def find_texts(text: Bytes, start: Column, wanted: Sequence[str]) -> list[int]:
    """Return the numbers of texts in a sorted text column; -1 for one that isn't there.

    A few are looked up by bisection, so that one key of a million needs no pass over all of them.

    Examples:
        >>> find_texts(*text_columns(["ab", "c"]), ["c", "x"])
        [1, -1]
    """
    if len(wanted) * 32 < start.size:
        return [_bisect(text, start, name.encode("utf-8")) for name in wanted]
    names = texts(text, start)
    if names == list(wanted):
        return list(range(len(names)))
    numbers = {name: number for number, name in enumerate(names)}
    return [numbers.get(name, -1) for name in wanted]


def _bisect(text: Bytes, start: Column, name: bytes) -> int:
    low, high = 0, start.size - 1
    while low < high:
        middle = (low + high) // 2
        if text[start[middle] : start[middle + 1]].tobytes() < name:
            low = middle + 1
        else:
            high = middle
    found = low < start.size - 1 and text[start[low] : start[low + 1]].tobytes() == name
    return low if found else -1
