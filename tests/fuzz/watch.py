"""What a call did beside giving a result: which files and programs it touched, and how much memory it took."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_BEGINNINGS = (
    "os.",
    "shutil.",
    "subprocess.",
    "socket.",
    "ctypes.dlopen",
    "tempfile.",
    "webbrowser.",
    "pty.",
    "fcntl.",
)
_NAMES = frozenset({"open", "exec", "compile", "import", "pickle.find_class", "builtins.input", "mmap.__new__"})
_HARMLESS = frozenset({"os.listdir", "os.scandir"})
_LIBRARIES = ("shardtree", "torch", "numpy", "zarr", "numcodecs", "encodings", "optree")
_CODE = (sys.prefix, sys.base_prefix, str(Path(__file__).parents[2]))


class _State:
    """What the hook, which can't be taken away again, looks at."""

    log: list[str] | None = None


def _hook(event: str, arguments: tuple[object, ...]) -> None:
    if _State.log is None:
        return
    if (event in _NAMES or event.startswith(_BEGINNINGS)) and event not in _HARMLESS and not _is_late(event, arguments):
        _State.log.append(f"{event}{arguments!r}"[:300])


def _is_late(event: str, arguments: tuple[object, ...]) -> bool:
    """Return whether a library that is in use anyway only imports more of itself, or a traceback shows its source."""
    first = arguments[0] if arguments else None
    if event == "ctypes.dlopen":
        return first is None  # the process itself: for madvise, where a tensor is large
    if event == "import":
        return str(first).startswith(_LIBRARIES)
    if event == "exec":
        return getattr(first, "co_filename", "").startswith(_CODE)
    return event == "open" and str(first).startswith(_CODE) and arguments[1] in ("r", "rb")


@cache
def _listen() -> None:
    sys.addaudithook(_hook)


@contextmanager
def watched() -> Iterator[list[str]]:
    """Give a list that fills with what touches files, programs, sockets and code while the block runs."""
    _listen()
    log: list[str] = []
    _State.log = log
    try:
        yield log
    finally:
        _State.log = None


class Growth:
    """How much more memory the process takes at its largest than it did in the beginning."""

    def __init__(self) -> None:
        _CLEAR.write_text("5")  # the peak is now what is used
        self.before = _kilobytes("VmRSS")

    def most(self) -> int:
        """Return the growth in bytes."""
        return (_kilobytes("VmHWM") - self.before) * 1024


def _kilobytes(field: str) -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(field))
    return int(line.split()[1])
