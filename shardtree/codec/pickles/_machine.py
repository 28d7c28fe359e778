"""`read_pickle`: an interpreter of pickle's opcodes that can't be made to run code."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ...errors import CheckpointingException, CorruptCheckpoint, UnsupportedValue, error_text
from . import _objects, _values
from ._state import FIX, Handler, Machine, Scan, check_bounded, unknown


def _table() -> list[Handler]:
    known = _values.HANDLERS | _objects.HANDLERS
    return [known.get(code, unknown) for code in range(256)]


_HANDLERS = _table()
_LARGE = 1_000_000


def read_pickle(
    data: bytes | bytearray | memoryview,
    classes: Mapping[tuple[str, str], Any],
    *,
    what: str,
    persistent_load: Callable[[Any], Any] | None = None,
    fix: str = FIX,
    refused: frozenset[type] = frozenset(),
    scan: Scan | None = None,
) -> Any:
    r"""Return the value of a pickle; the bytes may be untrusted.

    Every opcode of protocols 0 to 5 is known. Nothing that the bytes name is imported: names are looked up in
    `classes`, and only a `Constructor` is ever called. Bytes after the pickle's end are ignored.

    Args:
        data: the pickle.
        classes: (module, qualified name) -> a `Constructor`, or a plain value such as a dtype.
        what: the file and what is in it, for messages.
        persistent_load: returns the value of a persistent id; None refuses pickles that have any.
        fix: what the error about a name that isn't in `classes` suggests.
        refused: types that `classes` and `persistent_load` return as arguments of constructors; as part of the value
            they make the file corrupt.
        scan: takes regular parts of the pickle as columns; a `Run` is in the value where they were.

    Raises:
        UnsafeFile: it names something else, or uses an opcode that could run code.
        CorruptCheckpoint: it isn't a pickle, ends early, contains itself, or would take too much time or memory.

    Examples:
        >>> import pickle
        >>> read_pickle(pickle.dumps({"step": 7, "betas": (0.9, 0.95)}), {}, what="example")
        {'step': 7, 'betas': (0.9, 0.95)}
        >>> read_pickle(b"cos\nsystem\n(S'rm -r *'\ntR.", {}, what="example")
        Traceback (most recent call last):
        ...
        shardtree.errors.UnsafeFile: example: it names os.system, which is neither data nor known to be harmless
          LoadOptions(allow_pickle=True) alone reads it, and runs whatever code it brings: only if you trust it.
    """
    # Not pickle.Unpickler with find_class overridden: the C machine can be made to allocate 64 GB by twenty bytes, and
    # to hash nested tuples for ever, and forbidding classes doesn't change that. This one is slower, at a few million
    # opcodes a second.
    content = data if type(data) is bytes else bytes(data)
    with _collector_paused(len(content)):
        return _run(content, Machine(content, classes, what, persistent_load, fix, scan), refused)


@contextmanager
def _collector_paused(length: int) -> Iterator[None]:
    """Pause the garbage collector: reading makes millions of objects and no garbage, and it would scan them all."""
    pause = length >= _LARGE and gc.isenabled()
    if pause:
        gc.disable()
    try:
        yield
    finally:
        if pause:
            gc.enable()


def _run(content: bytes, machine: Machine, refused: frozenset[type]) -> Any:
    handlers = _HANDLERS
    at = start = 0
    try:
        # A handler gets the position after its opcode and returns that of the next one; STOP's returns -1.
        while at >= 0:
            start = at
            at = handlers[content[at]](machine, at + 1)
        value = machine.stack.pop()
        if machine.marks:
            raise ValueError("a mark is left on the stack at its end")
        check_bounded(value, len(content), refused)
    except UnsupportedValue as error:
        raise UnsupportedValue(f"{machine.what}: {error}") from None
    except CheckpointingException:
        raise
    except Exception as error:
        raise CorruptCheckpoint(
            error_text(f"{machine.what}: not a pickle that can be read", found=_found(error, start))
        ) from error
    return value


def _found(error: Exception, start: int) -> str:
    reason = "its bytes or its stack end too early" if isinstance(error, IndexError) else str(error)[:200]
    return f"at byte {start}: {reason or type(error).__name__}"
