"""A temporary folder beside a local one, with which it is exchanged atomically by renameat2."""

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

# Linux's renameat2, which exchanges two folders in one step; Python's os module doesn't have it.

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_SYSCALL_NUMBERS = {"x86_64": 316, "aarch64": 276, "ppc64le": 357, "s390x": 347, "riscv64": 276, "loongarch64": 276}


def exchange_folders(one: str, other: str) -> None:
    """Give two folders each other's name, in one step.

    Raises:
        OSError: ENOSYS on a system without this call, EINVAL on a file system that doesn't support it.
    """
    call = _renameat2()
    if call is None:
        raise OSError(errno.ENOSYS, "there is no renameat2 on this system", one)
    if call(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), one, None, other)


@cache
def _renameat2() -> Any:
    """Return the C library's function, or a call by number if the library lacks it, or None."""
    if not sys.platform.startswith("linux"):
        return None
    # The kernel's call is older than the function: C libraries that lack one can still make the other.
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
_ELSEWHERE = "Save to a new folder, then remove the old one."


@dataclass(frozen=True, slots=True)
class LocalSibling:
    """A folder ``.<folder>.<name>`` beside a folder; its subfolder ``checkpoint`` replaces that one.

    Args:
        root: the folder to replace; if it is a link, the link stays and its target is replaced.
        name: of the save.
        open_folder: returns the storage of a path.
        refusals: what the file system refuses.

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
        """The replacing folder."""
        return self.open_folder(self._inside(_FILES))

    def make(self, note: bytes, *, durable: bool) -> None:
        """Make the folder with a note of its owner; raises unless it can be exchanged later."""
        self._check_replaceable()
        with self._storage_errors("make a folder beside"):
            os.makedirs(self._folder, exist_ok=True)
            # Before anything else: a save that finds this folder must be able to tell whether its owner is alive.
            _write(self._inside(_OWNER), note, durable=durable)
            self._try_exchange()
            os.makedirs(self._inside(_FILES), exist_ok=True)
            # After a crash, the inode's number says on which side of the exchange it happened: it moves with the
            # folder.
            number = os.stat(self._inside(_FILES)).st_ino
            _write(self._inside(_INODE), f"{number}\n".encode(), durable=durable)
            copy_ownership(self._inside(_FILES), self._target, self.refusals)
            if durable:
                sync(self._folder, self.refusals)
                sync_above([os.path.dirname(self._folder)], self.refusals)

    def note(self) -> bytes | None:
        """Return the note, None if there is none."""
        return _read(self._inside(_OWNER))

    def is_exchanged(self) -> bool | None:
        """Return whether the old files are in it; None if they are being removed, or it is unknown."""
        if os.path.isdir(self._inside(_PROBE)):
            return False  # interrupted during the trial exchange of two empty folders, before anything was written
        number = _read(self._inside(_INODE)) or b""
        with suppress(OSError):
            if number.endswith(b"\n"):  # without it the note was cut short, and its number may lack digits
                return os.stat(self._inside(_FILES)).st_ino != int(number)
        return None

    def changed(self) -> float | None:
        """Return when it was begun or something was made or removed in it, in seconds since 1970."""
        times = [_change_time(path) for path in (self._folder, self._inside(_FILES))]
        return max((time for time in times if time is not None), default=None)

    def old_names(self) -> tuple[str, ...]:
        """Return the names of all old files and links, and of empty folders, which end in a slash."""
        with self._storage_errors("list"):
            return tuple(sorted(_walk(self._old, "")))

    def check_shareable(self, names: Sequence[str]) -> None:
        """Raise unless old files can be hard-linked."""
        # Tried on each file: who may link a file depends on its owner and mode (fs.protected_hardlinks), and finding
        # out only after the checkpoint was written would waste the save.
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
            what = f"save: {self.root!r} holds other files, which can't be linked into the folder that replaces it"
            raise StrategyError(error_text(what, offenders=problems, fix=_ELSEWHERE))

    def share(self, names: Sequence[str], *, durable: bool) -> tuple[str, ...]:
        """Link old files into the new folder too; return the names that another file has there."""
        # Links rather than moves: until the exchange the old folder keeps its files, and a file that a program has open
        # is the same file afterwards.
        conflicts, folders, new = [], set(), set[str]()
        with self._storage_errors("link the other files of"):
            for name in names:
                folder, _, last = name.rpartition("/")
                new |= _make_parents(self._new, folder)
                if last and not _link(os.path.join(self._old, name), os.path.join(self._new, name)):
                    conflicts.append(name)
                folders |= _parents(name.rstrip("/"))
            # Permissions come last, innermost folder first: nothing could be linked into a read-only folder.
            for folder in sorted(new, reverse=True):
                with suppress(FileNotFoundError):  # removed meanwhile
                    paths = os.path.join(self._new, folder), os.path.join(self._old, folder)
                    copy_ownership(*paths, self.refusals)
            if durable:
                for folder in sorted(folders):
                    sync(os.path.join(self._new, folder), self.refusals)
        return tuple(conflicts)

    def exchange(self, *, durable: bool) -> None:
        """Exchange the two folders in one step."""
        with self._storage_errors("exchange"):
            exchange_folders(self._inside(_FILES), self._target)
            # Both parents have a changed entry; with only one of them on the medium a power failure could lose a
            # folder.
            if durable:
                sync(self._folder, self.refusals)
                sync_above([os.path.dirname(self._folder)], self.refusals)

    def remove(self) -> None:
        """Remove the folder with all that is in it."""
        rest = self._inside(_REST)
        with self._storage_errors("remove the folder beside"):
            # Renamed before it is removed: if a crash interrupts the removal, what is left isn't taken for a
            # checkpoint.
            with suppress(FileNotFoundError):
                shutil.rmtree(rest)
            with suppress(FileNotFoundError):
                os.rename(self._inside(_FILES), rest)
            with suppress(FileNotFoundError):
                shutil.rmtree(rest)
            # The owner's note goes last: by it the next save knows at once that a removal was interrupted by a crash.
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
        what = f"save: {self.root!r} can't be replaced as a whole"
        if os.path.ismount(target):
            raise StrategyError(error_text(what, found="the root of a file system", fix=_ELSEWHERE))
        if os.path.commonpath([target, here]) == target:
            reason = f"the current directory, {here!r}, is in it and would be removed"
            raise StrategyError(error_text(what, found=reason, fix="Save from another directory, or to a new folder."))

    def _try_exchange(self) -> None:
        """Raise unless folders can be exchanged here; tried with two empty ones."""
        # Tried rather than asked: only the call itself knows whether kernel and file system support the exchange.
        one, other = (os.path.join(self._inside(_PROBE), name) for name in ("one", "other"))
        os.makedirs(one, exist_ok=True)
        os.makedirs(other, exist_ok=True)
        try:
            exchange_folders(one, other)
        except OSError as error:
            what = f"save: {self.root!r} can't be replaced as a whole: its file system can't exchange two folders"
            raise StrategyError(error_text(what, found=error.strerror, fix=_ELSEWHERE)) from error
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
            what = f"save: cannot {doing} {self._target!r}"
            raise StorageError(error_text(what, found=reason, fix=_ELSEWHERE)) from error


def _walk(top: str, folder: str) -> Iterator[str]:
    with os.scandir(os.path.join(top, folder)) as scan:
        entries = list(scan)
    if not entries and folder:
        yield folder
    # Files can't be linked across file systems, and removing the old folder would remove what is mounted in it.
    if folder and os.path.ismount(os.path.join(top, folder)):
        what = f"save: {top!r} can't be replaced as a whole: a file system is mounted in it"
        raise StrategyError(error_text(what, found=folder, fix=_ELSEWHERE))
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
        one, other = os.lstat(old), os.lstat(new)  # files are linked again after the exchange, for late ones
        return (one.st_ino, one.st_dev) == (other.st_ino, other.st_dev)
    return True


def _parents(name: str) -> set[str]:
    """Return the parent folders of a name, the top one ("") included."""
    parts = name.split("/")[:-1]
    return {"/".join(parts[:count]) for count in range(len(parts) + 1)}


def _make_parents(top: str, folder: str) -> set[str]:
    """Make a folder and its parents, as far as they aren't there, and return which were made."""
    new = set()
    for parent in sorted({*_parents(folder), folder} - {""}):
        with suppress(FileExistsError):
            # For the owner alone until its permissions are copied: its files may be secret.
            os.mkdir(os.path.join(top, parent), 0o700)
            new.add(parent)
    return new


def _current_directory() -> str:
    """Return the current directory, which may have been removed."""
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
