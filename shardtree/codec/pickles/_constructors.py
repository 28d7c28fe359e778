"""What a pickle may call: constructors that a reader lists, and stubs for classes that aren't imported."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, eq=False)
class Constructor:
    r"""The function that a reader calls for a class or function that a pickle names.

    Attributes:
        make: called with the pickle's arguments, of any types; returns the value. An exception makes the file corrupt.
        build: called with the value and the pickle's state for it; changes the value in place, at most once. None: no
            state is accepted.
        keys: called with the arguments before `make`; returns what `make` will hash.

    Examples:
        >>> from shardtree.codec.pickles import read_pickle
        >>> data = b"cbuiltins\ncomplex\n(F1\nF2\ntR."
        >>> read_pickle(data, {("builtins", "complex"): Constructor(complex)}, what="example")
        (1+2j)
    """

    make: Callable[..., Any]
    build: Callable[[Any, Any], None] | None = None
    keys: Callable[..., Iterable[Any]] | None = None


@dataclass(slots=True, eq=False)
class Stub:
    """Represents an object of a class that isn't imported. Compared and hashed by identity.

    Attributes:
        type_name: module and qualified name of its class.
        args: the arguments of its constructor.
        state: the state that it was to be filled with; None if the pickle has none.
    """

    type_name: str
    args: tuple[Any, ...] = ()
    state: Any = None


def inert(type_name: str) -> Constructor:
    """Return the constructor of stubs for one class.

    Args:
        type_name: module and qualified name of the class.

    Examples:
        >>> inert("datetime.date").make(2025, 12, 31)
        Stub(type_name='datetime.date', args=(2025, 12, 31), state=None)
    """

    def make(*args: Any) -> Stub:
        return Stub(type_name, args)

    return Constructor(make, _fill)


def _fill(stub: Stub, state: Any) -> None:
    stub.state = state
