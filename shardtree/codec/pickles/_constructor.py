"""What a pickle may call: constructors that its reader lists, and stubs for what needn't be made at all."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, eq=False)
class Constructor:
    r"""What a name in a pickle stands for where the pickle may call it.

    Attributes:
        make: called with the pickle's arguments, whatever they are; returns the value. What it raises makes the file
            corrupt.
        build: called with the value and the pickle's state for it; changes the value in place. None: no state is
            accepted. It is called at most once for a value.
        keys: called with the arguments first; returns what `make` is going to hash.

    Examples:
        >>> from shardtree.codec import read_pickle
        >>> data = b"cbuiltins\ncomplex\n(F1\nF2\ntR."
        >>> read_pickle(data, {("builtins", "complex"): Constructor(complex)}, what="example")
        (1+2j)
    """

    make: Callable[..., Any]
    build: Callable[[Any, Any], None] | None = None
    keys: Callable[..., Iterable[Any]] | None = None


@dataclass(slots=True, eq=False)
class Stub:
    """An object of a class that wasn't imported: what the pickle says of it. Compared and hashed by identity.

    Attributes:
        type_name: module and qualified name of its class.
        args: what its constructor was to be called with.
        state: what it was to be filled with; None where the pickle has none.
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
