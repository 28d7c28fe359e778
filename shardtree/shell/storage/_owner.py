"""The owner's note that a save leaves with its files, by which other saves can tell whether it is still alive."""

from __future__ import annotations

import json
import os
import secrets
import socket
from collections.abc import Mapping
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary
from zlib import crc32

_START_FIELD = 18
"""Index of the process's start time among the fields after the state in /proc/<pid>/stat."""

_MACHINE = ("host", "boot", "processes")
"""Fields that are equal in the notes of two processes that can see each other."""


class Claim:
    """An object that a process holds as long as a save of its own may still be finished."""

    __slots__ = ("__weakref__",)


_claims: WeakValueDictionary[tuple[int, str], Claim] = WeakValueDictionary()


def claim(save_id: str) -> Claim:
    """Return the object that marks a save of this process as alive, until it is released or garbage-collected.

    Examples:
        >>> held = claim("save-1")
        >>> is_claimed("save-1"), release("save-1"), is_claimed("save-1")
        (True, None, False)
    """
    # With the process's number: a forked child inherits this table, but not the saves.
    return _claims.setdefault((os.getpid(), save_id), Claim())


def release(save_id: str) -> None:
    """Mark a save of this process as ended."""
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
    fields = {"save_id": save_id, "pid": os.getpid(), "started": _start_time(os.getpid()), **_machine()}
    return json.dumps(fields, sort_keys=True).encode() + b"\n"


def is_alive(note: bytes | None) -> bool | None:
    """Return whether the save that left a note can still be finished; None if that is unknown.

    On the same machine a save is alive if its process runs and, where that is this process, still has its claim. About
    processes of another machine or container nothing is known.

    Examples:
        >>> held = claim("save-1")
        >>> is_alive(owner_note("save-1")), is_alive(owner_note("save-2")), is_alive(b"torn")
        (True, False, None)
    """
    # By its process rather than by its age: a save that waits longer than an hour for its commit would be taken for
    # dead, and one that was killed a minute ago for alive.
    fields = _decode(note)
    machine = _machine()
    if fields is None or None in machine.values() or any(fields.get(name) != machine[name] for name in _MACHINE):
        return None
    pid, start = fields.get("pid"), fields.get("started")
    if type(pid) is not int or type(start) is not int or _start_time(os.getpid()) is None:
        return None
    if _start_time(pid) != start:
        return None if _is_hidden(pid) else False  # it has ended, even if another process has its number now
    return is_claimed(str(fields.get("save_id"))) if pid == os.getpid() else True


# What a crash leaves before there is a note is judged by its name: 16 hexadecimal digits in it say whose it is.

_counter = count(secrets.randbelow(256))


def process_token() -> str:
    """Return 16 hexadecimal digits that no other process that may use them has, and that tell which process this is.

    Examples:
        >>> len(process_token()), maker_is_dead(process_token())
        (16, None)
    """
    machine, pid = _machine_digits(), os.getpid()
    return (
        secrets.token_hex(8) if machine is None or pid >= 1 << 24 else f"{machine}{pid:06x}{next(_counter) % 256:02x}"
    )


def maker_is_dead(token: str) -> bool | None:
    """Return True if a process of this machine that has ended made these digits; None where that can't be known.

    Examples:
        >>> maker_is_dead("0123456789abcdef") is None
        True
    """
    if token[:8] != _machine_digits():
        return None
    pid = int(token[8:14], 16)
    # Another process may have the number by now: only its absence tells.
    return True if _start_time(os.getpid()) is not None and _start_time(pid) is None and not _is_hidden(pid) else None


def made_here(token: str) -> bool:
    """Return whether this process made these digits, or one before it that had its number.

    Examples:
        >>> made_here(process_token()), made_here("0123456789abcdef")
        (True, False)
    """
    return token[:8] == _machine_digits() and int(token[8:14], 16) == os.getpid()


def _machine_digits() -> str | None:
    machine = _machine()
    return None if None in machine.values() else f"{crc32(json.dumps(machine, sort_keys=True).encode()):08x}"


def _decode(note: bytes | None) -> Mapping[str, Any] | None:
    with suppress(ValueError, RecursionError):  # a crash may have cut it short, and nested lists exhaust the stack
        fields = json.loads(note) if note else None
        return fields if isinstance(fields, dict) else None
    return None


def _machine() -> dict[str, str | None]:
    """Return the host's name, the id of its boot and that of its pid namespace, which each container has its own."""
    boot = processes = None
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        processes = os.readlink("/proc/self/ns/pid")
    return {"host": socket.gethostname(), "boot": boot, "processes": processes}


def _is_hidden(pid: int) -> bool:
    """Return whether a process runs but isn't in /proc, which can be mounted to hide other users' processes."""
    if pid <= 0 or os.path.exists(f"/proc/{pid}"):
        return False
    with suppress(ProcessLookupError, OverflowError):
        with suppress(PermissionError):
            os.kill(pid, 0)
        return True
    return False


def _start_time(pid: int) -> int | None:
    """Return when a process was started, in ticks since boot; None if it has ended or is a zombie."""
    with suppress(OSError, ValueError, IndexError):
        # The process's name comes before and may contain spaces and brackets: so split after the last bracket.
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if state in "ZX" else int(fields[_START_FIELD])
    return None
