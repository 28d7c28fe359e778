"""Who is saving: a note that a save leaves with its files, by which others can tell whether it is still alive."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

_STARTED = 18
"""Which of the fields behind the state in /proc/<pid>/stat says when the process was started."""

_PLACE = ("host", "boot", "processes")
"""What is alike in the notes of two processes that can see each other."""


class Claim:
    """What a process holds as long as a save of its own may still be finished."""

    __slots__ = ("__weakref__",)


_claims: WeakValueDictionary[tuple[int, str], Claim] = WeakValueDictionary()


def claim(save_id: str) -> Claim:
    """Return what keeps a save alive in the eyes of this process's other saves, until it is released or forgotten.

    Examples:
        >>> held = claim("save-1")
        >>> is_claimed("save-1"), release("save-1"), is_claimed("save-1")
        (True, None, False)
    """
    return _claims.setdefault((os.getpid(), save_id), Claim())


def release(save_id: str) -> None:
    """Let a save of this process count as ended."""
    _claims.pop((os.getpid(), save_id), None)


def is_claimed(save_id: str) -> bool:
    """Return whether a save of this process may still be finished."""
    return (os.getpid(), save_id) in _claims


def owner_note(save_id: str) -> bytes:
    """Return the note that says which process makes a save.

    Examples:
        >>> sorted(json.loads(owner_note("save-1")))
        ['boot', 'host', 'pid', 'processes', 'save_id', 'started']
    """
    fields = {"save_id": save_id, "pid": os.getpid(), "started": _started(os.getpid()), **_place()}
    return json.dumps(fields, sort_keys=True).encode() + b"\n"


def is_alive(note: bytes | None) -> bool | None:
    """Return whether the save that left a note can still be finished; None where that can't be told from here.

    On the same machine that is whether its process is there, and has the save in hand if it is this one. Of another
    machine's, or another container's, processes nothing is known.

    Examples:
        >>> held = claim("save-1")
        >>> is_alive(owner_note("save-1")), is_alive(owner_note("save-2")), is_alive(b"torn")
        (True, False, None)
    """
    fields = _decoded(note)
    place = _place()
    if fields is None or None in place.values() or any(fields.get(name) != place[name] for name in _PLACE):
        return None
    pid, started = fields.get("pid"), fields.get("started")
    if type(pid) is not int or type(started) is not int or _started(os.getpid()) is None:
        return None
    if _started(pid) != started:
        return None if _is_hidden(pid) else False  # it is gone, whoever has its number now
    return is_claimed(str(fields.get("save_id"))) if pid == os.getpid() else True


def _decoded(note: bytes | None) -> Mapping[str, Any] | None:
    with suppress(ValueError, RecursionError):
        fields = json.loads(note) if note else None
        return fields if isinstance(fields, dict) else None
    return None


def _place() -> dict[str, str | None]:
    """Return the machine since its start, and the numbering of its processes, which each container has of its own."""
    boot = processes = None
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        processes = os.readlink("/proc/self/ns/pid")
    return {"host": socket.gethostname(), "boot": boot, "processes": processes}


def _is_hidden(pid: int) -> bool:
    """Return whether a process is there of which nothing is shown: /proc can be mounted so for other users' ones."""
    if pid <= 0 or os.path.exists(f"/proc/{pid}"):
        return False
    with suppress(ProcessLookupError, OverflowError):
        with suppress(PermissionError):
            os.kill(pid, 0)
        return True
    return False


def _started(pid: int) -> int | None:
    """Return when a process was started, in ticks since the machine was; None if it is gone or only waits to be."""
    with suppress(OSError, ValueError, IndexError):
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if state in "ZX" else int(fields[_STARTED])
    return None
