"""Whether a save is alive: by its process where that can be seen, and not at all elsewhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import pytest

from shardtree.shell.storage import claim, is_alive, is_claimed, is_temporary, owner_note, release
from shardtree.shell.table import OWNER_FILE, is_orphaned, make_save_folder, remove_save
from shardtree.storage import MemoryStorage
from tests.quick_python.command import quick_python

SAVE = "save-20260102T030405-0123456789abcdef"
NOTE = "from shardtree.shell.storage import owner_note; import sys; sys.stdout.buffer.write(owner_note('save-1'))"

pytestmark = pytest.mark.skipif(not os.path.exists("/proc/self/ns/pid"), reason="needs Linux's /proc")


def changed(note: bytes, **fields: object) -> bytes:
    return json.dumps(json.loads(note) | fields).encode()


def test_a_save_of_this_process_is_alive_while_it_is_in_hand() -> None:
    held = claim(SAVE)
    note = owner_note(SAVE)
    assert is_alive(note) is True and is_claimed(SAVE)
    release(SAVE)
    assert is_alive(note) is False
    held = claim(SAVE)
    del held  # nobody holds its request any more
    assert is_alive(note) is False


@pytest.mark.slow
def test_a_save_of_another_process_is_alive_as_long_as_that() -> None:
    code = f"{NOTE}; sys.stdout.flush(); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        note = process.stdout.readline()
        assert is_alive(note) is True
        assert is_alive(changed(note, started=json.loads(note)["started"] - 1)) is False  # another one of that number
        process.kill()
        end = time.monotonic() + 30
        while is_alive(note) and time.monotonic() < end:
            time.sleep(0.01)
        assert is_alive(note) is False  # before anybody waited for it
    assert is_alive(note) is False


@pytest.mark.parametrize(
    "change",
    [
        {"host": "elsewhere"},
        {"boot": "earlier"},
        {"processes": "pid:[1]"},
        {"pid": "7"},
        {"started": None},
        {"boot": None},
    ],
    ids=str,
)
def test_of_what_can_not_be_seen_nothing_is_said(change: dict[str, object]) -> None:
    assert is_alive(changed(owner_note(SAVE), **change)) is None


@pytest.mark.parametrize("note", [None, b"", b"{", b"[1]", b"\xff", b"[" * 10**5, b"null", b'{"pid": 1}'], ids=repr)
def test_a_torn_note_says_nothing(note: bytes | None) -> None:
    assert is_alive(note) is None


def test_the_dead_go_at_once_the_unknown_when_they_are_old_and_the_living_never() -> None:
    storage = MemoryStorage()
    held = make_save_folder(storage, SAVE, durable=False)
    assert not is_orphaned(storage, SAVE, before=1e9)
    release(SAVE)
    assert is_orphaned(storage, SAVE, before=-1.0)
    storage.replace(f"{SAVE}/{OWNER_FILE}", b"torn", durable=False)
    assert is_orphaned(storage, SAVE, before=1e9) and not is_orphaned(storage, SAVE, before=-1.0)
    storage.replace(f"{SAVE}/notes.txt", b"mine", durable=False)
    remove_save(storage, SAVE)
    assert storage.names(SAVE) == ("notes.txt",)
    del held


def test_temporary_names_are_ours_alone() -> None:
    assert is_temporary(".metadata.json.0123456789abcdef.new")
    assert not any(map(is_temporary, [".metadata.json.new", "a.0123456789abcdef.new", ".a.0123456789ABCDEF.new"]))


HIDDEN = """
import ctypes, json, os, subprocess, sys
from shardtree.shell.storage import _owner
libc = ctypes.CDLL(None, use_errno=True)
PRIVATE, NAMESPACE = 1 << 14 | 1 << 18, 0x20000
if libc.unshare(NAMESPACE) or libc.mount(b"none", b"/", None, PRIVATE, None):
    sys.exit(77)
if libc.mount(b"proc", b"/proc", b"proc", 0, b"hidepid=2"):
    sys.exit(77)
with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
    fields = json.loads(_owner.owner_note("save-1")) | {"pid": other.pid, "started": _owner._start_time(other.pid)}
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
    print(_owner.is_alive(json.dumps(fields).encode()), _owner.is_alive(json.dumps(fields | {"pid": 2**22}).encode()))
    other.stdin.close()
"""


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount /proc so that it hides other users' processes")
def test_of_a_process_that_is_hidden_nothing_is_said() -> None:
    done = subprocess.run([*quick_python(), "-c", HIDDEN], capture_output=True, text=True, check=False)
    if done.returncode == 77:
        pytest.skip("nothing can be mounted here")
    assert done.stdout.split() == ["None", "False"], done.stderr
