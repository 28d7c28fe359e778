"""Fields: the entries of named tuples, which are positions and go by their names in keys."""

from __future__ import annotations

from typing import Any, Final

import optree

NAMESPACE: Final = "shardtree"
"""Of optree's registry: the one in which our leaves and users' classes are nodes."""


class Field(int):
    """A named tuple's entry: equal to the field's position, and written in keys by the field's name.

    Examples:
        >>> Field(1, "mu") == 1, f"opt.{Field(1, 'mu')}", [Field(1, "mu")]
        (True, 'opt.mu', [1])
    """

    name: str

    def __new__(cls, position: int, name: str) -> Field:
        made = super().__new__(cls, position)
        made.name = name
        return made

    def __getnewargs__(self) -> tuple[int, str]:  # type: ignore[override]  # paths go between ranks in pickles
        return int(self), self.name

    def __str__(self) -> str:
        return self.name


def fields_of(kind: type) -> tuple[Field, ...]:
    """Return the entries of a named tuple's class; none for another class, and for one that is registered with optree.

    Examples:
        >>> from collections import namedtuple
        >>> [*map(str, fields_of(namedtuple("Moment", "mu nu")))], fields_of(tuple)
        (['mu', 'nu'], ())
    """
    if not optree.is_namedtuple_class(kind):
        return ()
    find: Any = optree.register_pytree_node
    registered = find.get(kind, namespace=NAMESPACE).type is kind
    return () if registered else tuple(Field(*pair) for pair in enumerate(kind._fields))  # type: ignore[attr-defined]
