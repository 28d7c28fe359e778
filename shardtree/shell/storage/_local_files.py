"""Single files of a local or mounted file system: reading, writing and removing them; locks of folders.

Files are read by calls, never through a memory map: if another program truncates a file, a call fails with an error.
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

# O_NONBLOCK: without it, opening a pipe in a file's place would wait for its writer for ever.
_TO_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK


class LocalReader:
    """A file of a local or mounted file system, open within a ``with`` block.

    It is a class, since a context manager made from a generator costs half as much time as a small read.

    Attributes:
        path: Path of the file.
        descriptor: File descriptor while the file is open.
        length: Length in bytes when the file was opened.
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
                    raise StorageError(error_text(f"cannot open {self.path!r}: not a regular file"))
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
        _close(self.descriptor)  # errors of closing (ESTALE, EIO) say nothing about the bytes that were read

    def read_into(self, byte: int, buffers: Sequence[Buffer]) -> None:
        """Fill the buffers, in order, with the file's bytes from offset `byte` on; raise if the file ends early."""
        pending = [*filter(len, buffers)]
        while pending:
            # If another program truncates the file, preadv returns an error, whereas access to a memory map ends the
            # process with a bus error. Besides, some file systems can't map files.
            try:
                count = os.preadv(self.descriptor, pending[:MOST_BUFFERS], byte)
            except OSError as error:
                # EFAULT: the destination's memory can't be written; the file itself is fine.
                into = " into memory that cannot be written" if error.errno == errno.EFAULT else ""
                raise StorageError(
                    error_text(f"cannot read {self.path!r} at byte {byte}{into}", found=error.strerror)
                ) from error
            if not count:
                missing = sum(buffer.nbytes for buffer in pending)
                raise StorageError(error_text(f"cannot read {missing} more bytes: {self.path!r} ends at byte {byte}"))
            byte += count
            pending = remaining(pending, count) if len(pending) > 1 or count < pending[0].nbytes else []

    def read(self, begin: int = 0, end: int | None = None) -> Buffer:
        """Return a byte range of the file, by default up to its end, in new memory; raise if the file is too short."""
        stop = self.length if end is None else end
        # The range is checked before memory is allocated: a damaged header may ask for any number of bytes.
        if stop > self.length:
            heading = f"cannot read bytes {begin} to {stop}: {self.path!r} ends at byte {self.length}"
            raise StorageError(error_text(heading))
        try:
            data = memoryview(bytearray(max(stop - begin, 0)))
        except MemoryError as error:
            heading = f"no memory for bytes {begin} to {stop} of {self.path!r}"
            fix = "Check that the file is the right one: a sparse file can claim any length."
            raise StorageError(error_text(heading, fix=fix)) from error
        self.read_into(begin, [data])
        return data


def remaining(buffers: list[Buffer], count: int) -> list[Buffer]:
    """Return buffers without their first `count` bytes.

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
    """Create a file, and return its descriptor; an existing file, such as an interrupted save's, is removed first."""
    # An existing file is never truncated and rewritten: it may be hard-linked into a backup, or be a link to a file
    # elsewhere.
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
    try:
        return os.open(path, flags | os.O_EXCL, 0o666)
    except FileExistsError:
        mode = os.lstat(path).st_mode
        if stat.S_ISREG(mode) or stat.S_ISLNK(mode):  # a device such as /dev/null is written to, not removed
            os.remove(path)
            flags |= os.O_EXCL  # another process may have put a link here since the removal
        return os.open(path, flags, 0o666)


def _batches(buffers: Iterable[Buffer]) -> Iterator[list[Buffer]]:
    """Yield the buffers in groups, one for each system call."""
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
    """Write buffers to an empty file, reserving space if the length is known, and return the number of bytes."""
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
        # Space beyond the file's end stays reserved until the file is truncated: a full disk would stay full.
        if room:
            with suppress(OSError):  # the write's own error is the one to report
                os.ftruncate(descriptor, os.fstat(descriptor).st_size)
        raise
    if room > length:
        os.ftruncate(descriptor, length)
    if durable:
        sync_file(descriptor, where)
    return length


def write_at(descriptor: int, byte: int, buffers: list[Buffer]) -> int:
    """Write buffers at an offset of a file, and return the offset of their end."""
    # A call may write fewer bytes than it was given: at a limit of 2 GiB, on a nearly full disk, after a signal.
    while buffers:
        count = os.pwritev(descriptor, buffers, byte) if len(buffers) > 1 else os.pwrite(descriptor, buffers[0], byte)
        byte += count
        buffers = remaining(buffers, count)
    return byte


# System calls that Python's `os` lacks: reserving disk space for a new file, and early writeback.

_RESERVED_BYTES = 4 * 1024 * 1024
_KEEP_SIZE = 1  # FALLOC_FL_KEEP_SIZE: the length stays the number of bytes written, so that truncation is noticed
_WRITEBACK_BYTES = 16 * 1024 * 1024
_WRITE = 2  # SYNC_FILE_RANGE_WRITE: begin the writeback without waiting for it or consuming errors that fsync reports
_LOST = {errno.EIO, errno.ENOSPC, errno.EDQUOT}  # other errors mean that the call isn't supported


def reserve(descriptor: int, length: int) -> int:
    """Reserve disk space for a file, and return the number of bytes; 0 for small files and where it isn't supported."""
    # `os.posix_fallocate` is no substitute: on file systems without support, the C library writes to every block.
    call = _system_call("fallocate", ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    if length < _RESERVED_BYTES or call is None:
        return 0
    # A single call covers the whole file, since each further call takes milliseconds while dirty pages wait for the
    # disk. Its failure (no space, no support) is ignored: the write itself reports an error.
    return 0 if call(descriptor, _KEEP_SIZE, 0, length) else length


def begin_writeback(descriptor: int, begin: int, end: int) -> int:
    """Start the writeback of a range of a file once it is long enough, and return the offset of the next range.

    The disk then writes while the program produces the next bytes, and the final fsync waits for the last ones only.

    Raises:
        OSError: the disk is full or failed; the final fsync may not report this again.
    """
    call = _system_call("sync_file_range", ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    if end - begin < _WRITEBACK_BYTES or call is None:
        return begin
    if call(descriptor, begin, end - begin, _WRITE) and (code := ctypes.get_errno()) in _LOST:
        raise OSError(code, os.strerror(code))
    return end


@cache
def _system_call(name: str, *types: Any) -> Callable[..., int] | None:
    """Return a system call that takes a descriptor and numbers, or None if the system lacks it."""
    call = getattr(ctypes.CDLL(None, use_errno=True), name, None)
    if call is not None:
        call.argtypes = (ctypes.c_int, *types)
    return call


# Removing a file without waiting until its blocks are freed.

_SMALL_BYTES = 64 * 1024
_YOUNG_SECONDS = 60.0


def unlink(path: str) -> None:
    """Remove a file; another thread frees the blocks of a small, recently written file.

    Freeing blocks waits until they are written, and the disk may have gigabytes of other data to write first. Large
    files are freed here, since callers count on the space.
    """
    # While a descriptor is open, removing the name doesn't free the blocks; closing it in the thread below does.
    descriptor = _open_if_young(path)
    try:
        os.remove(path)
    except BaseException:
        _close(descriptor)
        raise
    # During the interpreter's shutdown no thread can start, and Python 3.11 would wait for it forever.
    if descriptor is None or sys.is_finalizing() or _has_a_name(descriptor):
        _close(descriptor)
        return
    try:
        Thread(target=_close, args=(descriptor,), name="unlink", daemon=True).start()
    except RuntimeError:
        _close(descriptor)


def _has_a_name(descriptor: int) -> bool:
    """Return whether a removed file still has a name: NFS renames an open file instead of removing it."""
    try:
        return os.fstat(descriptor).st_nlink > 0
    except OSError:
        return True  # if unknown, the file is closed now, which is always safe


def _open_if_young(path: str) -> int | None:
    try:
        status = os.lstat(path)
        # Removing one of several hard links frees no blocks, so it never waits.
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
    """Wait for a folder's lock, and return the descriptor that holds it; nothing is locked if locks aren't supported.

    Raises:
        OSError: the folder can't be opened.
        StorageError: another program has held the lock for ten minutes.
    """
    # The folder itself is locked, not a file in it: nothing needs cleaning up, other programs see nothing, and the
    # system releases the lock of a dead process, once the children that it forked meanwhile have ended too.
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
        _close(descriptor)  # the folder was exchanged for another one meanwhile


def _wait_for_lock(descriptor: int, path: str) -> None:
    """Wait for a folder's lock; saves hold it only for moments, so a long wait is logged and finally abandoned."""
    begin, is_logged = time.monotonic(), False
    while True:
        with suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        waited = time.monotonic() - begin
        if waited > _LONGEST_WAIT:
            fix = "End that program (`lslocks` lists locks with their processes), or save to another folder."
            raise StorageError(error_text(f"another program holds the lock (flock) of {path!r}", fix=fix))
        if waited > _LONG_WAIT and not is_logged:
            logger.warning("save: waiting for the lock (flock) of %r, which another program holds", path)
            is_logged = True
        time.sleep(min(0.001 + waited / 10, 0.1))


def unlock_folder(descriptor: int) -> None:
    """Release a folder's lock."""
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # closing isn't enough: a process forked meanwhile has a copy
    _close(descriptor)


# Making folders.


def parents_of_missing(path: str) -> list[str]:
    """Return the parent of each missing folder on a path, deepest first; making the path adds an entry to each.

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
