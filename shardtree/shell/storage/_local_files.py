"""Files of a local or mounted file system, one at a time: reading, writing, removing, and locking folders.

Reads are calls that fail where another program cuts a file short, never a mapping.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import os
import stat
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from threading import Thread
from typing import Any, Self

from ...errors import StorageError, error_text
from ._refusals import sync_file
from ._storage import AnyBuffer, Buffer, SizedBuffers, byte_view

logger = logging.getLogger("shardtree")

MOST_BUFFERS = 1024  # IOV_MAX on Linux and macOS

# O_NONBLOCK: opening a pipe that somebody put here would otherwise wait for its writer for ever.
_TO_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK


class LocalReader:
    """A file of a local or mounted file system, open inside of a ``with`` block.

    Not a generator's context manager, which takes half as long as a small read.

    Attributes:
        path: of the file.
        descriptor: while it is open.
        length: in bytes, when it was opened.
    """

    __slots__ = ("descriptor", "length", "path")

    descriptor: int
    length: int

    def __init__(self, path: str) -> None:
        self.path = path

    def __enter__(self) -> Self:
        try:
            self.descriptor = os.open(self.path, _TO_READ)
            try:
                status = os.fstat(self.descriptor)
                if not stat.S_ISREG(status.st_mode):
                    raise StorageError(error_text(f"cannot open {self.path!r}", found="no regular file"))
            except BaseException:
                _close(self.descriptor)
                raise
        except StorageError:
            raise
        except OSError as error:
            raise StorageError(error_text(f"cannot open {self.path!r}", found=error.strerror or error)) from error
        self.length = status.st_size
        return self

    def __exit__(self, *_: object) -> None:
        _close(self.descriptor)  # what the system says then (ESTALE, EIO) isn't about the bytes that were read

    def read_into(self, byte: int, buffers: Sequence[Buffer]) -> None:
        """Fill the buffers from consecutive bytes; raises where the file ends first."""
        pending = [*filter(len, buffers)]
        while pending:
            # preadv, never a mapping: if another program cuts the file short, that is an error here, and a bus error,
            # which ends the process, there. Nor can every file system map files.
            try:
                count = os.preadv(self.descriptor, pending[:MOST_BUFFERS], byte)
            except OSError as error:
                # EFAULT: the memory to read into can't be written, and nothing is wrong with the file.
                into = " into memory that can't be written" if error.errno == errno.EFAULT else ""
                raise StorageError(
                    error_text(f"cannot read {self.path!r} at byte {byte}{into}", found=error.strerror)
                ) from error
            if not count:
                missing = sum(buffer.nbytes for buffer in pending)
                raise StorageError(error_text(f"{self.path!r} ends at byte {byte}", expected=f"{missing} bytes more"))
            byte += count
            pending = remaining(pending, count) if len(pending) > 1 or count < pending[0].nbytes else []

    def read(self, begin: int = 0, end: int | None = None) -> Buffer:
        """Return a byte range of the file, by default up to its end, as new memory; raises where it ends first."""
        stop = self.length if end is None else end
        # Compared before memory is made: a damaged header may ask for any number of bytes.
        if stop > self.length:
            what = f"{self.path!r} ends at byte {self.length}"
            raise StorageError(error_text(what, expected=f"bytes {begin} to {stop}"))
        try:
            data = memoryview(bytearray(max(stop - begin, 0)))
        except MemoryError as error:
            what = f"no memory for bytes {begin} to {stop} of {self.path!r}"
            raise StorageError(
                error_text(what, fix="Is the file what it should be? It may consist of holes.")
            ) from error
        self.read_into(begin, [data])
        return data


def remaining(buffers: list[Buffer], count: int) -> list[Buffer]:
    """Return what is left of buffers when their first `count` bytes are done.

    Examples:
        >>> [bytes(buffer) for buffer in remaining([memoryview(b"abc"), memoryview(b"de")], 2)]
        [b'c', b'de']
    """
    for position, buffer in enumerate(buffers):
        if count < buffer.nbytes:
            return [buffer[count:], *buffers[position + 1 :]]
        count -= buffer.nbytes
    return []


# Writing a new file, and parts of one.

BATCH_BYTES = 1024 * 1024


def new_file(path: str) -> int:
    """Return the descriptor of a new file; a file of that name, left by an interrupted save, is removed first."""
    # Never truncate and rewrite an existing file: it may be hard-linked into a backup, or be a link to a file
    # elsewhere.
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
    try:
        return os.open(path, flags | os.O_EXCL, 0o666)
    except FileExistsError:
        mode = os.lstat(path).st_mode
        if stat.S_ISREG(mode) or stat.S_ISLNK(mode):  # a device such as /dev/null is written to, not removed
            os.remove(path)
            flags |= os.O_EXCL  # again: between the two calls another process may have put a link here
        return os.open(path, flags, 0o666)


def _batches(buffers: Iterable[Buffer]) -> Iterator[list[Buffer]]:
    """Yield the buffers in groups, each of which is written by one system call."""
    batch: list[Buffer] = []
    size = 0
    for buffer in buffers:
        batch.append(buffer)
        size += buffer.nbytes
        if size >= BATCH_BYTES or len(batch) == MOST_BUFFERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def write_new(descriptor: int, buffers: Iterable[AnyBuffer], where: str, *, durable: bool) -> int:
    """Write to an empty file, reserving space where its length is known, and return how much was written."""
    room = reserve(descriptor, buffers.nbytes) if isinstance(buffers, SizedBuffers) else 0
    length = begun = 0
    try:
        for batch in _batches(byte_view(buffer, where) for buffer in buffers):
            pending = [buffer for buffer in batch if buffer.nbytes]
            length += sum(buffer.nbytes for buffer in pending)
            while pending:
                pending = remaining(pending, os.writev(descriptor, pending))
            if durable:
                begun = begin_writeback(descriptor, begun, length)
    except BaseException:
        # Space beyond the file's end stays reserved until a truncate: a full disk would stay full.
        if room:
            with suppress(OSError):  # the error of the write itself is the one to report
                os.ftruncate(descriptor, os.fstat(descriptor).st_size)
        raise
    if room > length:
        os.ftruncate(descriptor, length)
    if durable:
        sync_file(descriptor, where)
    return length


def write_at(descriptor: int, byte: int, buffers: list[Buffer]) -> int:
    """Write buffers to a place in a file, and return where they end."""
    # One call may write less than it was given: at a limit of 2 GiB, on a nearly full disk, after a signal.
    while buffers:
        count = os.pwritev(descriptor, buffers, byte) if len(buffers) > 1 else os.pwrite(descriptor, buffers[0], byte)
        byte += count
        buffers = remaining(buffers, count)
    return byte


# What Python's `os` lacks: to reserve disk space for a new file, and to have the disk begin before the file's end.

_RESERVED_BYTES = 4 * 1024 * 1024
_KEEP_SIZE = 1  # FALLOC_FL_KEEP_SIZE: the length stays that of what was written, so that a file cut short shows
_WRITEBACK_BYTES = 16 * 1024 * 1024
_WRITE = 2  # SYNC_FILE_RANGE_WRITE: begin, without waiting for the end, and without taking what the fsync has to report
_LOST = {errno.EIO, errno.ENOSPC, errno.EDQUOT}  # others mean that it can't be asked for


def reserve(descriptor: int, length: int) -> int:
    """Reserve disk space at the beginning of a file and return how many bytes; 0 if it is small or can't be done."""
    # `os.posix_fallocate` won't do: where a file system can't reserve, the C library writes to every block instead.
    call = _system_call("fallocate", ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    if length < _RESERVED_BYTES or call is None:
        return 0
    # One call for the whole file: while dirty pages wait for the disk, each further call takes milliseconds. If it
    # fails (no space, a file system without it), that is no error yet: the write itself will report one.
    return 0 if call(descriptor, _KEEP_SIZE, 0, length) else length


def begin_writeback(descriptor: int, begin: int, end: int) -> int:
    """Have the disk begin with bytes of a file, once they are many, and return where the next ones begin.

    While it writes them the next are made, and the fsync at the end waits for the last ones only.

    Raises:
        OSError: the disk is full or failed, which the fsync needn't say again.
    """
    call = _system_call("sync_file_range", ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    if end - begin < _WRITEBACK_BYTES or call is None:
        return begin
    if call(descriptor, begin, end - begin, _WRITE) and (code := ctypes.get_errno()) in _LOST:
        raise OSError(code, os.strerror(code))
    return end


@cache
def _system_call(name: str, *types: Any) -> Callable[..., int] | None:
    """Return a system call for a descriptor and numbers; None where there is none."""
    call = getattr(ctypes.CDLL(None, use_errno=True), name, None)
    if call is not None:
        call.argtypes = (ctypes.c_int, *types)
    return call


# Removing a file without waiting until its blocks are freed.

_SMALL_BYTES = 64 * 1024
_YOUNG_SECONDS = 60.0


def unlink(path: str) -> None:
    """Remove a file; the blocks of a small one that was just written are freed by another thread.

    Freeing them waits until they are written, and the disk may have gigabytes of other data to write first. The space
    of a large file has to be free when this returns.
    """
    # While a descriptor is open, removing the name doesn't free the blocks: closing it does, in the thread below.
    descriptor = _open_if_young(path)
    try:
        os.remove(path)
    except BaseException:
        _close(descriptor)
        raise
    # While the interpreter ends no thread can start, and Python 3.11 would wait for it forever.
    if descriptor is None or sys.is_finalizing() or _has_a_name(descriptor):
        _close(descriptor)
        return
    try:
        Thread(target=_close, args=(descriptor,), name="unlink", daemon=True).start()
    except RuntimeError:
        _close(descriptor)


def _has_a_name(descriptor: int) -> bool:
    """Return whether a removed file is still there: NFS keeps an open one in its folder under another name."""
    try:
        return os.fstat(descriptor).st_nlink > 0
    except OSError:
        return True  # unknown: close it now, which is always safe


def _open_if_young(path: str) -> int | None:
    try:
        status = os.lstat(path)
        # A file with further links keeps its blocks, so that removing one name never waits.
        small = stat.S_ISREG(status.st_mode) and status.st_nlink == 1 and status.st_size <= _SMALL_BYTES
        if not small or abs(time.time() - status.st_mtime) > _YOUNG_SECONDS:
            return None
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None


def _close(descriptor: int | None) -> None:
    if descriptor is not None:
        with suppress(OSError):
            os.close(descriptor)


# Locking a folder.

_LONG_WAIT, _LONGEST_WAIT = 10.0, 600.0  # seconds
_NO_LOCKS = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL, errno.EBADF}


def lock_folder(path: str) -> int:
    """Return the descriptor that holds a folder's lock, once no other one does; nothing is locked where nothing can be.

    Raises:
        OSError: the folder can't be opened.
        StorageError: another program holds the lock for ten minutes.
    """
    # The folder itself and no file in it: nothing has to be cleaned up, other programs see nothing, and the system
    # takes the lock from a process that dies, once the children that it forked meanwhile have ended too.
    while True:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            try:
                _wait_for_lock(descriptor, path)
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                return descriptor
        except BaseException:
            _close(descriptor)
            raise
        _close(descriptor)  # it was exchanged for another folder meanwhile


def _wait_for_lock(descriptor: int, path: str) -> None:
    """Take a folder's lock; a save holds it for moments, so that who waits long says so, and then gives up."""
    begin, is_told = time.monotonic(), False
    while True:
        with suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        waited = time.monotonic() - begin
        if waited > _LONGEST_WAIT:
            fix = "End it (`lslocks` lists locks with their processes), or save to another folder."
            raise StorageError(error_text(f"another program holds the lock (flock) of {path!r}", fix=fix))
        if waited > _LONG_WAIT and not is_told:
            logger.warning("save: waiting for the lock (flock) of %r, which another program holds", path)
            is_told = True
        time.sleep(min(0.001 + waited / 10, 0.1))


def unlock_folder(descriptor: int) -> None:
    """Let go of a folder's lock."""
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # not only closed: a process forked meanwhile has the descriptor too
    _close(descriptor)


# Making folders.


def parents_of_missing(path: str) -> list[str]:
    """Return the parents of those folders on a path that don't exist yet: making the path adds entries to them.

    Examples:
        >>> parents_of_missing("/"), parents_of_missing("/nowhere/at/all")
        ([], ['/nowhere/at', '/nowhere', '/'])
    """
    parents = []
    path = os.path.realpath(path)
    while not os.path.exists(path):
        path = os.path.dirname(path)
        parents.append(path)
    return parents
