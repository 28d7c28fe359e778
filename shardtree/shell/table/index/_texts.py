"""Texts as one utf-8 column, with where each starts: how an index holds its keys, dtypes and files."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ....core.geometry import Column

Bytes = NDArray[np.uint8]


def text_columns(texts: Sequence[str]) -> tuple[Bytes, Column]:
    """Return texts as one utf-8 column, and where each starts.

    Examples:
        >>> text, start = text_columns(["ab", "c"])
        >>> bytes(text), start.tolist()
        (b'abc', [0, 2, 3])
    """
    encodings = [text.encode("utf-8") for text in texts]
    start = np.zeros(len(encodings) + 1, dtype=np.int64)
    np.cumsum([len(text) for text in encodings], out=start[1:])
    return np.frombuffer(b"".join(encodings), dtype=np.uint8), start


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
    data, places = text.tobytes(), start.tolist()
    if data.isascii():  # one decode for all: characters are bytes then
        whole = data.decode("ascii")
        return [whole[begin:end] for begin, end in pairwise(places)]
    return [data[begin:end].decode("utf-8") for begin, end in pairwise(places)]


_MOST_WORDS = 64


def ascend(text: Bytes, start: Column) -> bool:
    """Return whether the texts of a text column are sorted by their bytes, each once.

    Examples:
        >>> [ascend(*text_columns(texts)) for texts in (["a", "ab", "b"], ["b", "ab"], ["a", "a"])]
        [True, False, False]
    """
    # Eight bytes of all texts at a time, as numbers: a text for each would take most of an open's time.
    buffer = np.concatenate([text, np.zeros(8, dtype=np.uint8)])
    words = np.ndarray(text.size + 1, dtype=">u8", buffer=buffer, strides=(1,))
    begin, length = start[:-1], np.diff(start)
    row = np.arange(max(length.size - 1, 0))  # of texts that are equal to the next one so far
    for at in range(0, 8 * _MOST_WORDS, 8):
        if row.size == length.size - 1:
            word = _words_at(words, begin + at, length - at)
            left, right = word[:-1], word[1:]
        else:
            left, right = (_words_at(words, begin[rows] + at, length[rows] - at) for rows in (row, row + 1))
        if (left > right).any():
            return False
        row = row[left == right]
        # Padding counts for nothing: of texts that are equal so far, the one that ends is the smaller one.
        at_end = row[np.maximum(length[row], length[row + 1]) <= at + 8]
        if (length[at_end] >= length[at_end + 1]).any():
            return False
        if at_end.size == row.size:
            return True
        row = np.setdiff1d(row, at_end, assume_unique=True) if at_end.size else row
    edges = start.tolist()
    triples = (edges[number : number + 3] for number in row.tolist())
    return all(text[low:middle].tobytes() < text[middle:high].tobytes() for low, middle, high in triples)


def _words_at(words: NDArray[Any], at: Column, left: Column) -> NDArray[np.uint64]:
    """Return the eight bytes at some places as numbers, zeros for those beyond so many that are left."""
    if left.min(initial=8) >= 8:
        return words[at].astype(np.uint64)
    word = words[np.minimum(at, words.size - 1)].astype(np.uint64)
    spare = (64 - 8 * left).clip(0, 63).astype(np.uint64)
    return np.where(left > 0, word >> spare << spare, np.uint64(0))


def find_texts(text: Bytes, start: Column, names: Sequence[str]) -> list[int]:
    """Return the numbers of texts in a sorted text column; -1 for one that isn't there.

    A few are looked up by bisection, so that one key of a million needs no pass over all of them.

    Examples:
        >>> find_texts(*text_columns(["ab", "c"]), ["c", "x"])
        [1, -1]
    """
    if len(names) * 32 < start.size:
        return [_bisect(text, start, name.encode("utf-8")) for name in names]
    stored_names = texts(text, start)
    if stored_names == list(names):
        return list(range(len(stored_names)))
    numbers = {name: number for number, name in enumerate(stored_names)}
    return [numbers.get(name, -1) for name in names]


def _bisect(text: Bytes, start: Column, name: bytes) -> int:
    low, high = 0, start.size - 1
    while low < high:
        middle = (low + high) // 2
        if text[start[middle] : start[middle + 1]].tobytes() < name:
            low = middle + 1
        else:
            high = middle
    is_there = low < start.size - 1 and text[start[low] : start[low + 1]].tobytes() == name
    return low if is_there else -1
