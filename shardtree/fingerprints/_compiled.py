"""The weighted sum of a slab as one compiled loop, where numba is installed: several times as fast as NumPy's steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, reduce
from importlib import import_module
from typing import Any, no_type_check

import numpy as np
from numpy.typing import NDArray

from ._weights import CONSTANT, FACTOR, MODULUS, Words

SlabTotal = Callable[[NDArray[Any], Sequence[Words]], int]
"""From a slab's words and the weights along each of its axes to its sum."""

_WORTH = 1 << 29  # words, for which NumPy takes a second: compiling takes as long
_seen = [0]


def compiled_for(words: int) -> SlabTotal | None:
    """Return the compiled sum, None while this process has summed too little for it to pay, or without numba.

    Args:
        words: how many are about to be summed.
    """
    _seen[0] += words  # not exact where threads meet, which matters to nobody
    return slab_total if _seen[0] >= _WORTH and _has_numba() else None


@cache
def _has_numba() -> bool:
    try:
        import_module("numba")
    except ImportError:
        return False
    return True


def slab_total(words: NDArray[Any], weights: Sequence[Words]) -> int:
    """Return the sum of a slab's mixed words, each times its weights, modulo 2 to the 64; needs numba.

    Args:
        words: unsigned integers of 1, 2, 4 or 8 bytes.
        weights: uint64 along each axis, at least one.
    """
    *above, last = weights
    rows: Words = reduce(np.multiply.outer, above).reshape(-1) if above else np.ones(1, dtype=np.uint64)
    matrix = np.ascontiguousarray(words.reshape(rows.size, last.size))
    return int(_loop(words.itemsize)(matrix, rows, last)) % MODULUS


@cache
def _loop(itemsize: int) -> Callable[[NDArray[Any], Words, Words], int]:
    numba = import_module("numba")
    # Read-only arrays, as which writable ones pass too: so each size is compiled once, and no other.
    word, column = getattr(numba, f"uint{8 * itemsize}"), numba.types.Array(numba.uint64, 1, "C", readonly=True)
    matrix = numba.types.Array(word, 2, "C", readonly=True)
    # Without the interpreter's lock, so that threads share the pieces of a tensor.
    found: Callable[[NDArray[Any], Words, Words], int]
    found = numba.njit(numba.uint64(matrix, column, column), nogil=True)(_sum_of_rows)
    return found


_FACTOR, _CONSTANT, _HALF = np.uint64(FACTOR), np.uint64(CONSTANT), np.uint64(32)


@no_type_check
def _sum_of_rows(words, rows, columns):  # compiled: no checker of types may wrap it
    total = np.uint64(0)
    for row in range(words.shape[0]):
        of_row = np.uint64(0)
        for column in range(words.shape[1]):
            word = np.uint64(words[row, column])
            mixed = (word ^ (word >> _HALF)) * _FACTOR
            of_row += ((mixed ^ (mixed >> _HALF)) + _CONSTANT) * columns[column]
        total += of_row * rows[row]
    return total
