"""Views of a mapping that makes its values when asked for, many of them faster together than each by its key."""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterator, Mapping, ValuesView
from typing import TypeVar

Value = TypeVar("Value")


class PairItems(ItemsView[str, Value]):
    """What `items()` of such a mapping returns.

    Args:
        mapping: whose pairs they are.
        pairs: yields all of them, in the mapping's order.
    """

    __slots__ = ("_pairs",)

    def __init__(self, mapping: Mapping[str, Value], pairs: Callable[[], Iterator[tuple[str, Value]]]) -> None:
        super().__init__(mapping)
        self._pairs = pairs

    def __iter__(self) -> Iterator[tuple[str, Value]]:
        return self._pairs()


class PairValues(ValuesView[Value]):
    """What `values()` of such a mapping returns.

    Args:
        mapping: whose values they are.
        pairs: yields all of its pairs, in its order.
    """

    __slots__ = ("_pairs",)

    def __init__(self, mapping: Mapping[str, Value], pairs: Callable[[], Iterator[tuple[str, Value]]]) -> None:
        super().__init__(mapping)
        self._pairs = pairs

    def __iter__(self) -> Iterator[Value]:
        return (value for _, value in self._pairs())
