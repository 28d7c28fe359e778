"""LocalNonpersistentObject: what stays where it is while all else is saved and loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ._base import describe


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class LocalNonpersistentObject:
    """A local value that a checkpoint doesn't store: saving leaves it out, loading puts it back where it stands.

    Examples:
        >>> LocalNonpersistentObject({"step": 3}).unwrap()
        {'step': 3}
    """

    obj: Any

    def __eq__(self, other: object) -> bool:
        return self.obj is other.obj if isinstance(other, LocalNonpersistentObject) else NotImplemented

    def __hash__(self) -> int:
        return hash((LocalNonpersistentObject, id(self.obj)))

    def __repr__(self) -> str:
        return f"LocalNonpersistentObject({describe(self.obj)})"

    def unwrap(self) -> Any:
        """Return the value."""
        return self.obj
