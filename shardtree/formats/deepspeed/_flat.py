"""Offsets of parameters in flat vectors: ZeRO-1 and 2 split the vector of a group, ZeRO-3 splits each parameter."""

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
        file: Number of the rank's file.
        tensor: Stored tensor of one axis.
    """

    file: int
    tensor: StoredTensor


class Parameter(NamedTuple):
    """A parameter of a group.

    Attributes:
        name: Name of the parameter.
        shape: Global shape.
        padding: Number of padding elements after it.
    """

    name: str
    shape: tuple[int, ...]
    padding: int = 0


def group_pieces(key: Key, parameters: Sequence[Parameter], vectors: Sequence[Vector]) -> Iterator[Piece]:
    """Yield the pieces of a group's parameters under ZeRO-1 and 2, where a group's vector is split over the ranks.

    A parameter may lie on several ranks. Each rank's range follows from the lengths of the given vectors. Vectors of
    moments include the padding at the group's end; vectors of masters do not.

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
        # Parameters and spans both ascend: a parameter begins on the rank where the previous parameter ends.
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
    """Yield the pieces of parameters under ZeRO-3, which splits each parameter into equal parts.

    A rank's vector is the concatenation of its parts; the last part of a parameter is padded at its end.

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
    """Return, for each rank, the paddings in its flat vector under ZeRO-3: pairs of offset and number of elements.

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
            used = min(max(count - rank * part, 0), part)
            if used < part:
                paddings.append((at + used, part - used))
        at += part
    return by_rank


def split_length(parameters: Sequence[Parameter], ranks: int) -> int:
    """Return the length of a rank's vector under ZeRO-3, in elements.

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
