"""A storage around another one: the few calls that it does in another way, and nothing about the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ._capabilities import Capabilities, Function, can
from ._storage import CALLS, Storage


class Wrapped:
    """What `wrapped` and `around` return.

    Attributes:
        inner: the storage that is wrapped.
        inside: the folder of it that this is, "" for all of it.
        capabilities: what it can do.
    """

    def __init__(self, inner: Storage, calls: Mapping[str, Function | None], inside: str = "") -> None:
        self.inner, self.inside = inner, inside
        for name in CALLS:
            setattr(self, name, calls.get(name) or getattr(inner, name))
        # A folder that the inner storage opens wouldn't be wrapped: `folder_in` makes one that is.
        others: dict[str, Any] = {"folder": None, **{name: calls[name] for name in calls if name not in CALLS}}
        self.capabilities: Capabilities = replace(can(inner), **others)

    def __repr__(self) -> str:
        return f"wrapped({self.inner!r})"


def wrapped(storage: Storage, **calls: Function | None) -> Any:
    """Return a storage that does some calls in another way, and all others as another storage does.

    Args:
        storage: the other one, which the result has as its ``inner``.
        calls: functions by their names, of `Storage` or of `Capabilities`; None for what the result can't do.

    Examples:
        >>> from shardtree.storage import MemoryStorage
        >>> inner = MemoryStorage()
        >>> def remove(name):
        ...     print(f"removing {name}")
        ...     inner.remove(name)
        >>> wrapped(inner, remove=remove).remove("a")
        removing a
    """
    return Wrapped(storage, calls)


def around(storage: Storage, wrap: Callable[[str, Function], Function | None], inside: str = "") -> Any:
    """Return a storage whose every call, those of its capabilities too, is what a function makes of another's.

    Args:
        storage: the other one, which the result has as its ``inner``.
        wrap: from the name of a call and its function to the one that is called instead; None if it can't be done.
        inside: the folder of `storage` that the result is.
    """
    functions = {name: getattr(storage, name) for name in CALLS} | can(storage).functions()
    functions.pop("folder", None)
    return Wrapped(storage, {name: wrap(name, function) for name, function in functions.items()}, inside)
