"""A storage around another one: the few calls that it does in another way, and nothing about the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any

from ..errors import StorageError, error_text
from ._capabilities import Capabilities, Function, can
from ._storage import CALLS, Storage

_OTHERS: dict[str, Any] = {"folder": None, "sibling": None, "siblings": None}
"""Other storages that the inner one makes: they wouldn't be wrapped, and a save would go past the wrapper in one."""


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
        own = {name: calls[name] for name in calls if name not in CALLS}
        self.capabilities: Capabilities = replace(can(inner), **(_OTHERS | own))

    def __repr__(self) -> str:
        return f"wrapped({self.inner!r})"


def wrapped(storage: Storage, **calls: Function | None) -> Any:
    """Return a storage that does some calls in another way, and all others as another storage does.

    Some capabilities reach a file by another way than the calls of `Storage`. Who changes what is read passes his own
    ``content`` and ``read_range`` as well, and who changes what is written ``write_parts``, ``move``, ``replace_if``,
    ``mark`` and ``remove_all``; or None, and the calls of `Storage` are used instead. What makes other storages
    (``sibling``, ``siblings``) isn't taken from the inner one: where both aren't given, a save that would exchange two
    folders is refused. A folder in the result is wrapped like it.

    Args:
        storage: the other one, which the result has as its ``inner``.
        calls: functions by their names, of `Storage` or of `Capabilities`; None for a capability that the result lacks.

    Raises:
        StorageError: there is no call of such a name, or it is None and every storage has it.

    Examples:
        >>> from shardtree.storage import MemoryStorage
        >>> inner = MemoryStorage()
        >>> def remove(name):
        ...     print(f"removing {name}")
        ...     inner.remove(name)
        >>> wrapped(inner, remove=remove).remove("a")
        removing a
    """
    known = {*CALLS, *(each.name for each in fields(Capabilities))}
    wrong = [f"{name}: there is no such call" for name in calls if name not in known]
    wrong += [f"{name}: None, but every storage has it" for name in CALLS if calls.get(name, wrapped) is None]
    if wrong:
        raise StorageError(error_text("wrapped", offenders=wrong, fix="Pass functions, or None for a capability."))
    return Wrapped(storage, calls)


def around(storage: Storage, wrap: Callable[[str, Function], Function | None], inside: str = "") -> Any:
    """Return a storage whose every call, those of its capabilities too, is what a function makes of another's.

    Args:
        storage: the other one, which the result has as its ``inner``.
        wrap: from the name of a call and its function to the one that is called instead; None if it can't be done.
        inside: the folder of `storage` that the result is.

    Examples:
        >>> from functools import partial
        >>> from shardtree.storage import MemoryStorage
        >>> def counted(name, function, *rest, **options):
        ...     print(name)
        ...     return function(*rest, **options)
        >>> around(MemoryStorage(), lambda name, function: partial(counted, name, function)).names()
        names
        ()
    """
    functions = {name: getattr(storage, name) for name in CALLS} | can(storage).functions()
    functions.pop("folder", None)
    return Wrapped(storage, {name: wrap(name, function) for name, function in functions.items()}, inside)
