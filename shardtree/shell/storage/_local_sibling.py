"""A temporary folder beside a local folder; renameat2 exchanges the two atomically."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from ...errors import StorageError, StrategyError, error_text
from ._refusals import Refusals, copy_ownership, elsewhere, sync, sync_above, sync_file
from ._storage import Storage

# Linux's renameat2 exchanges two folders atomically; Python's os module doesn't have it.

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_SYSCALL_NUMBERS = {"x86_64": 316, "aarch64": 276, "ppc64le": 357, "s390x": 347, "riscv64": 276, "loongarch64": 276}


def exchange_folders(one: str, other: str) -> None:
    """Exchange the names of two folders atomically.

    Raises:
        OSError: ENOSYS on a system without renameat2, EINVAL on a file system that doesn't support the exchange.
    """
    call = _renameat2()
    if call is None:
        raise OSError(errno.ENOSYS, "there is no renameat2 on this system", one)
    if call(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), one, None, other)


@cache
def _renameat2() -> Any:
    """Return a function that calls renameat2, from the C library or by system call number; None if there is neither."""
    if not sys.platform.startswith("linux"):
        return None
    # The kernel's call is older than the C library's function, so it works with libraries that lack the function.
    library = ctypes.CDLL(None, use_errno=True)
    arguments: list[Any] = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint]
    if (function := getattr(library, "renameat2", None)) is not None:
        function.argtypes = arguments
        return function
    number = _SYSCALL_NUMBERS.get(platform.machine())
    if number is None:
        return None
    library.syscall.argtypes = [ctypes.c_long, *arguments]
    library.syscall.restype = ctypes.c_long
    return lambda *args: library.syscall(number, *args)


_FILES, _OWNER, _INODE, _PROBE, _REST = "checkpoint", "owner.json", "inode", "probe", "rest"
_ELSEWHERE = "Save to a new folder."


@dataclass(frozen=True, slots=True)
class LocalSibling:
    """A temporary folder ``.<folder>.<name>`` beside a folder; its subfolder ``checkpoint`` will replace that folder.

    The folder and the subfolder are exchanged. Old files are those of the replaced folder: before the exchange they are
    at its path, afterwards in the subfolder. The new folder is the one with the save's files.

    Args:
        root: Path of the folder to replace; if it is a link, the link stays and its target is replaced.
        name: Name of the save.
        open_folder: Function from a folder's path to its storage.
        refusals: Record of requests that the file system refuses, such as syncing a folder.

    Examples:
        >>> import pathlib, tempfile
        >>> from shardtree.storage import LocalStorage
        >>> folder = pathlib.Path(tempfile.mkdtemp()) / "step_10"
        >>> folder.mkdir()
        >>> sibling = LocalSibling(str(folder), "save-1", LocalStorage)
        >>> sibling.make(b"note", durable=False)
        >>> sibling.storage.replace("new.txt", b"new", durable=False)
        >>> sibling.exchange(durable=False)
        >>> sibling.remove()
        >>> [path.name for path in folder.parent.rglob("*")]
        ['step_10', 'new.txt']
    """

    root: str
    name: str
    open_folder: Callable[[str], Storage] = field(repr=False)
    refusals: Refusals = field(default=elsewhere, repr=False)

    @property
    def storage(self) -> Storage:
        """The storage of the subfolder ``checkpoint``: it has the new files until `exchange`, then the old files."""
        return self.open_folder(self._inside(_FILES))

    def make(self, note: bytes, *, durable: bool) -> None:
        """Make the temporary folder with a note that identifies the saving process.

        Raises:
            StrategyError: the file system can't exchange two folders, or the folder can't be replaced.
            StorageError: the temporary folder can't be made.
        """
        self._check_replaceable()
        with self._storage_errors("make a folder beside"):
            os.makedirs(self._folder, exist_ok=True)
            # The note comes first: a save that finds this folder must be able to tell whether its owner is alive.
            _write(self._inside(_OWNER), note, durable=durable)
            self._try_exchange()
            os.makedirs(self._inside(_FILES), exist_ok=True)
            # The inode's number moves with the folder, so after a crash it tells whether the exchange had happened.
            number = os.stat(self._inside(_FILES)).st_ino
            _write(self._inside(_INODE), f"{number}\n".encode(), durable=durable)
            copy_ownership(self._inside(_FILES), self._target, self.refusals)
            if durable:
                sync(self._folder, self.refusals)
                sync_above([os.path.dirname(self._folder)], self.refusals)

    def note(self) -> bytes | None:
        """Return the bytes that `make` stored to identify the saving process, or None if there are none."""
        return _read(self._inside(_OWNER))

    def is_exchanged(self) -> bool | None:
        """Return whether the exchange has happened, so that the subfolder ``checkpoint`` has the old files.

        None means that this is unknown, for example since a removal has begun.
        """
        if os.path.isdir(self._inside(_PROBE)):
            return False  # the save was interrupted in the trial exchange, before it wrote anything
        number = _read(self._inside(_INODE)) or b""
        with suppress(OSError):
            if number.endswith(b"\n"):  # without a newline the file is truncated, and its number may lack digits
                return os.stat(self._inside(_FILES)).st_ino != int(number)
        return None

    def changed(self) -> float | None:
        """Return the time when an entry was last added or removed, in seconds since 1970; None if unknown."""
        times = [_change_time(path) for path in (self._folder, self._inside(_FILES))]
        return max((time for time in times if time is not None), default=None)

    def old_names(self) -> tuple[str, ...]:
        """Return the names of all files, links and empty folders in the replaced folder.

        Names of empty folders end in a slash.
        """
        with self._storage_errors("list"):
            return tuple(sorted(_walk(self._old, "")))

    def check_shareable(self, names: Sequence[str]) -> None:
        """Raise if any of these old files can't be hard-linked."""
        # Every file is tried: permission to link depends on a file's owner and mode (fs.protected_hardlinks), and an
        # error after the checkpoint was written would waste the save.
        problems = []
        second = self._inside(_PROBE)
        for name in names:
            try:
                if not name.endswith("/"):
                    os.link(os.path.join(self._old, name), second, follow_symlinks=False)
                    os.remove(second)
            except FileNotFoundError:
                continue  # removed meanwhile
            except OSError as error:
                problems.append(f"{name!r}: {error.strerror}")
        if problems:
            heading = f"save: other programs' files in {self.root!r} cannot be hard-linked into the new folder"
            raise StrategyError(error_text(heading, offenders=problems, fix=_ELSEWHERE))

    def share(self, names: Sequence[str], *, durable: bool) -> tuple[str, ...]:
        """Hard-link old files into the new folder; return the names that are already taken there by different files."""
        # Files are linked rather than moved: the old folder stays complete until the exchange, and a file that a
        # program has open is the same file afterwards.
        conflicts, folders, new = [], set(), set[str]()
        with self._storage_errors("link the other files of"):
            for name in names:
                folder, _, last = name.rpartition("/")
                new |= _make_parents(self._new, folder)
                if last and not _link(os.path.join(self._old, name), os.path.join(self._new, name)):
                    conflicts.append(name)
                folders |= _parents(name.rstrip("/"))
            # Permissions are set last, innermost folder first: nothing could be linked into a read-only folder.
            for folder in sorted(new, reverse=True):
                with suppress(FileNotFoundError):  # removed meanwhile
                    paths = os.path.join(self._new, folder), os.path.join(self._old, folder)
                    copy_ownership(*paths, self.refusals)
            if durable:
                for folder in sorted(folders):
                    sync(os.path.join(self._new, folder), self.refusals)
        return tuple(conflicts)

    def exchange(self, *, durable: bool) -> None:
        """Exchange the subfolder ``checkpoint`` with the folder that is replaced; the exchange is atomic."""
        with self._storage_errors("exchange"):
            exchange_folders(self._inside(_FILES), self._target)
            # An entry changed in both parents: if only one of them is on the medium, a power failure could lose a
            # folder.
            if durable:
                sync(self._folder, self.refusals)
                sync_above([os.path.dirname(self._folder)], self.refusals)

    def remove(self) -> None:
        """Remove the folder and its content."""
        removed = self._inside(_REST)
        with self._storage_errors("remove the folder beside"):
            # The subfolder is renamed first: if a crash interrupts the removal, its remains aren't taken for a
            # checkpoint.
            with suppress(FileNotFoundError):
                shutil.rmtree(removed)
            with suppress(FileNotFoundError):
                os.rename(self._inside(_FILES), removed)
            with suppress(FileNotFoundError):
                shutil.rmtree(removed)
            # The owner's note is removed last: it tells the next save that a crash interrupted the removal.
            for name in (_PROBE, _INODE, _OWNER):
                _remove(self._inside(name))
            with suppress(FileNotFoundError):
                os.rmdir(self._folder)

    @property
    def _target(self) -> str:
        return os.path.realpath(self.root)

    @property
    def _folder(self) -> str:
        above, last = os.path.split(self._target)
        return os.path.join(above, f".{last}.{self.name}")

    def _inside(self, name: str) -> str:
        return os.path.join(self._folder, name)

    @property
    def _old(self) -> str:
        return self._inside(_FILES) if self.is_exchanged() else self._target

    @property
    def _new(self) -> str:
        return self._target if self.is_exchanged() else self._inside(_FILES)

    def _check_replaceable(self) -> None:
        target, here = self._target, _current_directory()
        what = f"save: {self.root!r} cannot be replaced as a whole"
        if os.path.ismount(target):
            raise StrategyError(error_text(what, found="the root of a file system", fix=_ELSEWHERE))
        if os.path.commonpath([target, here]) == target:
            reason = f"the current directory, {here!r}, is in it and would be removed"
            raise StrategyError(error_text(what, found=reason, fix="Save from another directory, or to a new folder."))

    def _try_exchange(self) -> None:
        """Raise if folders can't be exchanged here, by trying it with two empty folders."""
        # Only a trial tells whether the kernel and the file system support the exchange.
        one, other = (os.path.join(self._inside(_PROBE), name) for name in ("one", "other"))
        os.makedirs(one, exist_ok=True)
        os.makedirs(other, exist_ok=True)
        try:
            exchange_folders(one, other)
        except OSError as error:
            heading = f"save: {self.root!r} cannot be replaced as a whole: its file system cannot exchange two folders"
            raise StrategyError(error_text(heading, found=error.strerror, fix=_ELSEWHERE)) from error
        finally:
            shutil.rmtree(self._inside(_PROBE))

    @contextmanager
    def _storage_errors(self, doing: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if isinstance(error, StorageError):
                raise
            reason = f"{error.strerror or error}: {error.filename!r}" if error.filename else error
            heading = f"save: cannot {doing} {self._target!r}"
            raise StorageError(error_text(heading, found=reason, fix=_ELSEWHERE)) from error


def _walk(top: str, folder: str) -> Iterator[str]:
    with os.scandir(os.path.join(top, folder)) as scan:
        entries = list(scan)
    if not entries and folder:
        yield folder
    # Files can't be linked across file systems, and removing the old folder would remove the mounted files.
    if folder and os.path.ismount(os.path.join(top, folder)):
        heading = f"save: {top!r} cannot be replaced as a whole: a file system is mounted in it"
        raise StrategyError(error_text(heading, found=folder, fix=_ELSEWHERE))
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            yield from _walk(top, f"{folder}{entry.name}/")
        else:
            yield f"{folder}{entry.name}"


def _link(old: str, new: str) -> bool:
    """Hard-link a file; return False if the new name belongs to another file."""
    try:
        os.link(old, new, follow_symlinks=False)
    except FileNotFoundError:
        return not os.path.lexists(old)  # removed meanwhile
    except FileExistsError:
        # Files that came late are linked after the exchange, by a second call that meets the first one's links.
        before, after = os.lstat(old), os.lstat(new)
        return (before.st_ino, before.st_dev) == (after.st_ino, after.st_dev)
    return True


def _parents(name: str) -> set[str]:
    """Return the parent folders of a name, including the top one ("")."""
    parts = name.split("/")[:-1]
    return {"/".join(parts[:count]) for count in range(len(parts) + 1)}


def _make_parents(top: str, folder: str) -> set[str]:
    """Make a folder and its missing parents in `top`, and return the names of all new folders."""
    new = set()
    for parent in sorted({*_parents(folder), folder} - {""}):
        with suppress(FileExistsError):
            # Only the owner may enter until the permissions are copied: the folder's files may be secret.
            os.mkdir(os.path.join(top, parent), 0o700)
            new.add(parent)
    return new


def _current_directory() -> str:
    """Return the current directory, or "/" if it was removed."""
    with suppress(FileNotFoundError):
        return os.path.realpath(os.getcwd())
    return "/"


def _write(path: str, data: bytes, *, durable: bool) -> None:
    with open(path, "wb") as file:
        file.write(data)
        if durable:
            file.flush()
            sync_file(file.fileno(), path)


def _read(path: str) -> bytes | None:
    with suppress(OSError), open(path, "rb") as file:
        return file.read()
    return None


def _change_time(path: str) -> float | None:
    with suppress(OSError):
        return os.stat(path).st_mtime
    return None


def _remove(path: str) -> None:
    with suppress(FileNotFoundError):
        shutil.rmtree(path) if os.path.isdir(path) and not os.path.islink(path) else os.remove(path)
