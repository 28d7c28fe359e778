"""The owner's note that a save leaves with its files: it tells other saves whether the save is still alive.

Within one process, a note can't tell which saves have ended. There, each save that may still finish holds a `Claim`.
"""

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
"""Fields that are equal in the notes of processes that can see each other."""


class Claim:
    """A marker that a process holds while its save may still finish; `is_claimed` looks for it."""

    __slots__ = ("__weakref__",)


_claims: WeakValueDictionary[tuple[int, str], Claim] = WeakValueDictionary()


def claim(save_id: str) -> Claim:
    """Mark a save of this process as alive until the returned claim is released or garbage-collected.

    Examples:
        >>> held = claim("save-1")
        >>> is_claimed("save-1"), release("save-1"), is_claimed("save-1")
        (True, None, False)
    """
    # The key holds the process's id: a forked child inherits this table, but not the saves.
    return _claims.setdefault((os.getpid(), save_id), Claim())


def release(save_id: str) -> None:
    """Release the `Claim` of a save of this process: the save has ended."""
    _claims.pop((os.getpid(), save_id), None)


def is_claimed(save_id: str) -> bool:
    """Return whether a save of this process has a `Claim`, and so may still finish."""
    return (os.getpid(), save_id) in _claims


def owner_note(save_id: str) -> bytes:
    """Return the note that identifies a save and its process, as JSON.

    Examples:
        >>> sorted(json.loads(owner_note("save-1")))
        ['boot', 'host', 'pid', 'processes', 'save_id', 'started']
    """
    fields = {"save_id": save_id, "pid": os.getpid(), "started": _start_time(os.getpid()), **_machine()}
    return json.dumps(fields, sort_keys=True).encode() + b"\n"


def is_alive(note: bytes | None) -> bool | None:
    """Return whether the save that left a note may still finish; None if unknown.

    If another process of this machine left the note, the save is alive as long as that process runs. If this process
    left it, the save is alive as long as it has a `Claim`. For a note from another machine or container, the result is
    None.

    Examples:
        >>> held = claim("save-1")
        >>> is_alive(owner_note("save-1")), is_alive(owner_note("save-2")), is_alive(b"torn")
        (True, False, None)
    """
    # The process is decisive, not the age of the save: by age, a save that waits an hour for its commit would count as
    # dead, and one that was killed a minute ago as alive.
    fields = _decode(note)
    machine = _machine()
    if fields is None or None in machine.values() or any(fields.get(name) != machine[name] for name in _MACHINE):
        return None
    pid, start = fields.get("pid"), fields.get("started")
    if type(pid) is not int or type(start) is not int or _start_time(os.getpid()) is None:
        return None
    if _start_time(pid) != start:
        return None if _is_hidden(pid) else False  # it has ended, even if another process has its id now
    return is_claimed(str(fields.get("save_id"))) if pid == os.getpid() else True


# Files of a save that crashed before it wrote a note are judged by their names: 16 digits identify the process.

_counter = count(secrets.randbelow(256))


def process_token() -> str:
    """Return a new token of 16 hexadecimal digits for file names; `maker_is_dead` recognises this process by it.

    It consists of a checksum of the machine's identity, the process's id and a counter. If that isn't possible, the
    digits are random.

    Examples:
        >>> len(process_token()), maker_is_dead(process_token())
        (16, None)
    """
    machine, pid = _machine_digits(), os.getpid()
    return (
        secrets.token_hex(8) if machine is None or pid >= 1 << 24 else f"{machine}{pid:06x}{next(_counter) % 256:02x}"
    )


def maker_is_dead(token: str) -> bool | None:
    """Return True if the process that made a token ran on this machine and has surely ended; otherwise None.

    Examples:
        >>> maker_is_dead("0123456789abcdef") is None
        True
    """
    if token[:8] != _machine_digits():
        return None
    pid = int(token[8:14], 16)
    # A new process may have the same id by now, so a running process proves nothing.
    return True if _start_time(os.getpid()) is not None and _start_time(pid) is None and not _is_hidden(pid) else None


def made_here(token: str) -> bool:
    """Return whether a token comes from a process of this machine with this process's id: this one or an earlier one.

    Examples:
        >>> made_here(process_token()), made_here("0123456789abcdef")
        (True, False)
    """
    return token[:8] == _machine_digits() and int(token[8:14], 16) == os.getpid()


def _machine_digits() -> str | None:
    machine = _machine()
    return None if None in machine.values() else f"{crc32(json.dumps(machine, sort_keys=True).encode()):08x}"


def _decode(note: bytes | None) -> Mapping[str, Any] | None:
    with suppress(ValueError, RecursionError):  # a crash may have truncated it, and nested lists exhaust the stack
        fields = json.loads(note) if note else None
        return fields if isinstance(fields, dict) else None
    return None


def _machine() -> dict[str, str | None]:
    """Return the identity of this machine: host name, boot id, and pid namespace, which differs between containers."""
    boot = processes = None
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        processes = os.readlink("/proc/self/ns/pid")
    return {"host": socket.gethostname(), "boot": boot, "processes": processes}


def _is_hidden(pid: int) -> bool:
    """Return whether a running process is missing in /proc, which may be mounted to hide other users' processes."""
    if pid <= 0 or os.path.exists(f"/proc/{pid}"):
        return False
    with suppress(ProcessLookupError, OverflowError):
        with suppress(PermissionError):
            os.kill(pid, 0)
        return True
    return False


def _start_time(pid: int) -> int | None:
    """Return the start time of a process in ticks since boot; None if it has ended or is a zombie."""
    with suppress(OSError, ValueError, IndexError):
        # The process's name comes first and may contain spaces and brackets, so the text after the last one is split.
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if state in "ZX" else int(fields[_START_FIELD])
    return None
