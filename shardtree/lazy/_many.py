"""Many instances of frozen classes at once, set column by column, without their constructors' calls and checks."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat
from typing import Any, TypeVar

import torch

from ._sources import ReadBox, Shape, Stored, dense
from ._tensor import LazyTensor

Value = TypeVar("Value")


def frozen_values(kind: type[Value], count: int, columns: Mapping[str, Iterable[Any]]) -> list[Value]:
    """Return instances of a frozen dataclass with slots whose constructor isn't called.

    For hundreds of thousands of values that were checked as columns: constructors' calls would take most of the time.

    Args:
        kind: the class.
        count: how many.
        columns: for each of its slots a value of each instance, at least `count`; they aren't checked.

    Examples:
        >>> from shardtree.lazy import Fetch
        >>> from shardtree.lazy._sources import Stored
        >>> columns = {"reader": [None, None], "shape": [(2,), (3,)], "dtype": [torch.int8] * 2, "name": ["a", "b"]}
        >>> [(source.name, source.shape) for source in frozen_values(Stored, 2, columns)]
        [('a', (2,)), ('b', (3,))]
    """
    values = list(map(object.__new__, repeat(kind, count)))
    for name, column in columns.items():
        # By the slot's descriptor: a frozen class only forbids `__setattr__`. The deque of length 0 runs the map in C.
        deque(map(getattr(kind, name).__set__, values, column), maxlen=0)
    return values


def stored_each(
    readers: Iterable[ReadBox], shapes: Sequence[Shape], dtypes: Iterable[torch.dtype], names: Iterable[str]
) -> list[LazyTensor]:
    """Return what `stored` gives for each row, which isn't checked: shapes are tuples of ints of at least 0.

    Args:
        readers: what reads boxes of each tensor.
        shapes: of each tensor.
        dtypes: of each tensor.
        names: of each tensor, for errors and ``repr``.
    """
    count = len(shapes)
    # A model has few different shapes: each view is computed once, and shared.
    places = {shape: dense(shape) for shape in set(shapes)}
    sources = frozen_values(Stored, count, {"reader": readers, "shape": shapes, "dtype": dtypes, "name": names})
    place = map(places.__getitem__, shapes)
    return frozen_values(LazyTensor, count, {"source": sources, "place": place, "casts": repeat(())})
