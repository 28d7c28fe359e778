"""A storage that numbers its calls: to fail at a chosen one, or to inspect the files after each."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import count
from threading import RLock
from types import SimpleNamespace
from typing import Any

from ..shell.storage import Buffer, Function, Sibling, Storage, around


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a method of a storage, or of a `Sibling`, the folder that a save fills beside the storage's own folder.

    Attributes:
        number: Number of the call, from 0.
        method: Name of a method of `Storage` or `Capabilities`; or of a `Sibling`, such as ``sibling.exchange``.
        name: Name of the file or folder; for a method of a `Sibling`, name of the save.
    """

    number: int
    method: str
    name: str


def _do_nothing(_: Call) -> None:
    pass


def watched(
    storage: Storage, before: Callable[[Call], None] = _do_nothing, after: Callable[[Call], None] = _do_nothing
) -> Any:
    """Return a storage that passes calls on to another, one at a time, and runs functions before and after each call.

    Args:
        storage: Storage with the files; the result's attribute ``inner``.
        before: Function that gets each call before it is made. If it raises, the call isn't made, except that a write
            leaves half of its bytes, as if interrupted.
        after: Function that gets each call after it succeeded; may raise.

    Examples:
        >>> from shardtree.storage import MemoryStorage
        >>> calls = []
        >>> storage = watched(MemoryStorage(), after=calls.append)
        >>> storage.length("a")
        >>> calls
        [Call(number=0, method='length', name='a')]
    """
    # Reentrant: `before` and `after` may look at the storage themselves.
    numbers, lock = count(), RLock()

    def called(method: str, function: Function, name: Any = "", *arguments: Any, **options: Any) -> Any:
        with lock:
            call = Call(next(numbers), method, name if isinstance(name, str) else ", ".join(name))
            try:
                before(call)
            except BaseException:
                if method in _HALVES:
                    _HALVES[method](function, name, *arguments)
                raise
            result = function(name, *arguments, **options)
            after(call)
        return result

    def watch(method: str, function: Function) -> Function:
        if method in ("where", "siblings"):
            return function
        return partial(beside if method == "sibling" else partial(called, method), function)

    def beside(function: Callable[[str], Sibling], name: str) -> Any:
        inner = function(name)
        functions = {action: _without_name(getattr(inner, action)) for action in _BESIDE}
        calls = {action: partial(called, f"sibling.{action}", functions[action], name) for action in _BESIDE}
        return SimpleNamespace(storage=around(inner.storage, watch), **calls)

    return around(storage, watch)


_BESIDE = "make note is_exchanged changed old_names check_shareable share exchange remove".split()


def _without_name(function: Function) -> Function:
    return lambda _, *arguments, **options: function(*arguments, **options)


# An interrupted write leaves half of the file, like a process that is killed while it writes.


def _write_half(write: Function, name: str, buffers: Iterable[Buffer]) -> None:
    data = b"".join(buffers)
    write(name, [memoryview(data[: len(data) // 2])], durable=False)


def _write_half_the_parts(write: Function, name: str, length: int, parts: Iterable[tuple[int, Buffer]]) -> None:
    pairs = list(parts)
    write(name, length, pairs[: len(pairs) // 2], durable=False)


_HALVES: dict[str, Function] = {"write": _write_half, "write_parts": _write_half_the_parts}
