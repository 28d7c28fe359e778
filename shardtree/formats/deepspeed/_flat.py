"""Where parameters lie in flat vectors: those of groups that ZeRO-1 and 2 cut, and of parameters that ZeRO-3 cuts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import NamedTuple

from ..archives import StoredTensor
from ..rank_archives import Piece

Key = Callable[[str], str]


class Vector(NamedTuple):
    """A rank's flat vector.

    Attributes:
        file: number of the file.
        tensor: one axis, in a file.
    """

    file: int
    tensor: StoredTensor


class Parameter(NamedTuple):
    """A parameter of a group, in the order in which the flat vectors have them.

    Attributes:
        name: Name of the parameter.
        shape: Global shape.
        padding: elements after it that belong to none.
    """

    name: str
    shape: tuple[int, ...]
    padding: int = 0


def group_pieces(key: Key, parameters: Sequence[Parameter], vectors: Sequence[Vector]) -> Iterator[Piece]:
    """Yield the pieces of a group's parameters, whose ranks' vectors follow each other: ZeRO-1 and 2.

    A parameter may lie on several ranks. Masters have their padding cut off and moments keep it: lengths are those of
    the vectors themselves. All padding is at the end.

    Args:
        key: Function from a parameter's name to the state's key.
        parameters: Parameters of the group, in order.
        vectors: Flat vectors of the state, by rank.
    """
    spans = []
    begin = 0
    for vector in vectors:
        spans.append((begin, begin + vector.tensor.shape[0], vector))
        begin += vector.tensor.shape[0]
    first, at = 0, 0
    for parameter in parameters:
        end = at + prod(parameter.shape)
        # Both ascend: a parameter begins on the rank on which the one before it ended.
        while first < len(spans) and spans[first][1] <= at:
            first += 1
        for low, high, vector in spans[first:]:
            if low >= end:
                break
            part = max(at, low), min(end, high)
            if part[0] < part[1]:
                yield _piece(key, parameter, vector, part[0] - low, part[0] - at, part[1] - at)
        at = end + parameter.padding


def split_pieces(key: Key, parameters: Sequence[Parameter], vectors: Sequence[Vector]) -> Iterator[Piece]:
    """Yield the pieces of parameters each of which is cut by itself into equal parts: ZeRO-3.

    A rank's vector has its part of each parameter, one after the other; the last parts are padded at their end.

    Args:
        key: Function from a parameter's name to the state's key.
        parameters: Parameters of the sub-group, in order.
        vectors: Flat vectors of the state, by rank.
    """
    at = 0
    for parameter in parameters:
        count = prod(parameter.shape)
        part = -(-count // len(vectors))
        for rank, vector in enumerate(vectors):
            start, stop = rank * part, min((rank + 1) * part, count)
            if start < stop:
                yield _piece(key, parameter, vector, at, start, stop)
        at += part


def split_paddings(parameters: Sequence[Parameter], ranks: int) -> list[list[tuple[int, int]]]:
    """Return by rank where in its vector the elements begin that belong to no parameter, and how many there are.

    Examples:
        >>> split_paddings([Parameter("w", (3, 5)), Parameter("gain", (1,))], 4)
        [[], [(4, 1)], [(4, 1)], [(3, 1), (4, 1)]]
    """
    by_rank: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
    at = 0
    for parameter in parameters:
        count = prod(parameter.shape)
        part = -(-count // ranks)
        for rank, paddings in enumerate(by_rank):
            own_count = min(max(count - rank * part, 0), part)
            if own_count < part:
                paddings.append((at + own_count, part - own_count))
        at += part
    return by_rank


def split_length(parameters: Sequence[Parameter], ranks: int) -> int:
    """Return the length of a rank's vector of parameters that are each cut into equal parts.

    Examples:
        >>> split_length([Parameter("w", (3, 5)), Parameter("gain", (1,))], 4)
        5
    """
    return sum(-(-prod(parameter.shape) // ranks) for parameter in parameters)


def _piece(key: Key, parameter: Parameter, vector: Vector, place: int, start: int, stop: int) -> Piece:
    tensor = vector.tensor
    byte = tensor.begin + place * tensor.dtype.itemsize
    whole = start == 0 and stop == prod(parameter.shape)
    zeros, flat = (0,) * len(parameter.shape), (-1, -1) if whole else (start, stop)
    return Piece(key(parameter.name), vector.file, byte, zeros, parameter.shape, *flat)
