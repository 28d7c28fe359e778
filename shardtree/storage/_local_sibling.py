"""A folder of a local file system beside another one, whose place it takes by renameat2."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import shutil
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from ..errors import StorageError, StrategyError, error_text
from ._storage import Storage
from ._sync import sync, sync_above

# Linux's renameat2, which exchanges two folders in one step; Python has no name for it.

_HERE = -100  # AT_FDCWD
_EXCHANGE = 2
_NUMBERS = {"x86_64": 316, "aarch64": 276, "ppc64le": 357, "s390x": 347, "riscv64": 276, "loongarch64": 276}


def exchange_folders(one: str, other: str) -> None:
    """Give two folders each other's name, in one step.

    Raises:
        OSError: that can't be had: ENOSYS on a system without such a call, EINVAL on a file system that lacks it.
    """
    call = _renameat2()
    if call is None:
        raise OSError(errno.ENOSYS, "there is no renameat2 on this system", one)
    if call(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), one, None, other)


@cache
def _renameat2() -> Any:
    """Return the call of the C library, or by its number where that lacks a name for it, or None."""
    if not sys.platform.startswith("linux"):
        return None
    library = ctypes.CDLL(None, use_errno=True)
    arguments: list[Any] = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint]
    if (named := getattr(library, "renameat2", None)) is not None:
        named.argtypes = arguments
        return named
    number = _NUMBERS.get(platform.machine())
    if number is None:
        return None
    library.syscall.argtypes = [ctypes.c_long, *arguments]
    library.syscall.restype = ctypes.c_long
    return lambda *given: library.syscall(number, *given)


# Whose a folder is and who may do what in it, taken over from another folder.


def take_after(folder: str, other: str) -> None:
    """Let a folder be whose another one is, and open to whom that is, with its extended attributes.

    Raises:
        OSError: one of them isn't there, or the folder is somebody else's.
    """
    like = os.stat(other)
    for owner in (-1, like.st_uid):  # whoever may not give it away may still give it to a group of theirs
        with suppress(OSError):
            os.chown(folder, owner, like.st_gid)
    os.chmod(folder, stat.S_IMODE(like.st_mode))
    for name in _attributes(other):
        with suppress(OSError):  # some are the system's own
            os.setxattr(folder, name, os.getxattr(other, name))


def _attributes(folder: str) -> list[str]:
    """Return the names of a folder's extended attributes; lists of who may do what are among them."""
    with suppress(OSError, AttributeError):  # not every file system has such, nor every system
        return os.listxattr(folder)
    return []


_FILES, _OWNER, _INODE, _PROBE, _REST = "checkpoint", "owner.json", "inode", "probe", "rest"
_ELSEWHERE = "Save to a new folder, then remove the old one."


@dataclass(frozen=True, slots=True)
class LocalSibling:
    """A folder ``.<folder>.<name>`` beside a folder, in which ``checkpoint`` is what takes that one's place.

    Args:
        root: the folder, maybe by a link, which stays.
        name: of the save.
        open_folder: makes a storage of a path.

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

    @property
    def storage(self) -> Storage:
        """The folder that takes the place."""
        return self.open_folder(self._inside(_FILES))

    def make(self, note: bytes, *, durable: bool) -> None:
        """Make the folder with a note of who did; raises unless it can be exchanged later."""
        self._check_place()
        with self._failures("make a folder beside"):
            os.makedirs(self._folder, exist_ok=True)
            _write(self._inside(_OWNER), note, durable=durable)
            self._try_exchange()
            os.makedirs(self._inside(_FILES), exist_ok=True)
            number = os.stat(self._inside(_FILES)).st_ino
            _write(self._inside(_INODE), f"{number}\n".encode(), durable=durable)
            take_after(self._inside(_FILES), self._target)
            if durable:
                sync(self._folder)
                sync_above([os.path.dirname(self._folder)])

    def note(self) -> bytes | None:
        """Return the note, None if there is none."""
        return _read(self._inside(_OWNER))

    def is_exchanged(self) -> bool | None:
        """Return whether the old files are in it; None if they are being removed, or that can't be told."""
        if os.path.isdir(self._inside(_PROBE)):
            return False  # it was still being tried whether folders can be exchanged, on empty ones
        number = _read(self._inside(_INODE)) or b""
        with suppress(OSError):
            if number.endswith(b"\n"):
                return os.stat(self._inside(_FILES)).st_ino != int(number)
        return None

    def changed(self) -> float | None:
        """Return when it was begun or something was made or removed in it, in seconds since 1970."""
        times = [_changed(path) for path in (self._folder, self._inside(_FILES))]
        return max((time for time in times if time is not None), default=None)

    def old_names(self) -> tuple[str, ...]:
        """Return the names of all old files and links, and of empty folders, which end in a slash."""
        with self._failures("list"):
            return tuple(sorted(_walk(self._old, "")))

    def check_shareable(self, names: Sequence[str]) -> None:
        """Raise unless old files can get a second name."""
        refused = []
        second = self._inside(_PROBE)
        for name in names:
            try:
                if not name.endswith("/"):
                    os.link(os.path.join(self._old, name), second, follow_symlinks=False)
                    os.remove(second)
            except FileNotFoundError:
                continue  # removed meanwhile
            except OSError as error:
                refused.append(f"{name!r}: {error.strerror}")
        if refused:
            what = f"save: {self.root!r} holds other files, which can't be linked into the folder that replaces it"
            raise StrategyError(error_text(what, offenders=refused, fix=_ELSEWHERE))

    def share(self, names: Sequence[str], *, durable: bool) -> tuple[str, ...]:
        """Let the new folder have old files too; return the names that are another file's there."""
        taken, folders, made = [], set(), set[str]()
        with self._failures("link the other files of"):
            for name in names:
                folder, _, last = name.rpartition("/")
                made |= _make_ways(self._new, folder)
                if last and not _link(os.path.join(self._old, name), os.path.join(self._new, name)):
                    taken.append(name)
                folders |= _ways(name.rstrip("/"))
            # Last: into a folder that nobody may change nothing could be linked.
            for folder in sorted(made, reverse=True):
                with suppress(FileNotFoundError):  # removed meanwhile
                    take_after(os.path.join(self._new, folder), os.path.join(self._old, folder))
            if durable:
                for folder in sorted(folders):
                    sync(os.path.join(self._new, folder))
        return tuple(taken)

    def exchange(self, *, durable: bool) -> None:
        """Give the two folders each other's place, in one step."""
        with self._failures("exchange"):
            exchange_folders(self._inside(_FILES), self._target)
            if durable:
                sync(self._folder)
                sync(os.path.dirname(self._folder))

    def remove(self) -> None:
        """Remove the folder with all that is in it."""
        rest = self._inside(_REST)
        with self._failures("remove the folder beside"):
            # What is half removed mustn't be taken for a checkpoint.
            with suppress(FileNotFoundError):
                shutil.rmtree(rest)
            with suppress(FileNotFoundError):
                os.rename(self._inside(_FILES), rest)
            with suppress(FileNotFoundError):
                shutil.rmtree(rest)
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

    def _check_place(self) -> None:
        target, here = self._target, _current_directory()
        what = f"save: {self.root!r} can't be replaced as a whole"
        if os.path.ismount(target):
            raise StrategyError(error_text(what, found="the root of a file system", fix=_ELSEWHERE))
        if os.path.commonpath([target, here]) == target:
            found = f"the current directory, {here!r}, is in it and would be removed"
            raise StrategyError(error_text(what, found=found, fix="Save from another directory, or to a new folder."))

    def _try_exchange(self) -> None:
        """Raise unless folders can be exchanged here; two empty ones are, which nobody takes for anything."""
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
    def _failures(self, doing: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if isinstance(error, StorageError):
                raise
            found = f"{error.strerror or error}: {error.filename!r}" if error.filename else error
            what = f"save: cannot {doing} {self._target!r}"
            raise StorageError(error_text(what, found=found, fix=_ELSEWHERE)) from error


def sibling_names(root: str) -> tuple[str, ...]:
    """Return the names of the saves that have taken a folder beside one, sorted."""
    above, last = os.path.split(os.path.realpath(root))
    start = f".{last}."
    with suppress(OSError):
        return tuple(sorted(name.removeprefix(start) for name in os.listdir(above) if name.startswith(start)))
    return ()


def _walk(top: str, folder: str) -> Iterator[str]:
    with os.scandir(os.path.join(top, folder)) as found:
        entries = list(found)
    if not entries and folder:
        yield folder
    if folder and os.path.ismount(os.path.join(top, folder)):
        what = f"save: {top!r} can't be replaced as a whole: a file system is mounted in it"
        raise StrategyError(error_text(what, found=folder, fix=_ELSEWHERE))
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            yield from _walk(top, f"{folder}{entry.name}/")
        else:
            yield f"{folder}{entry.name}"


def _link(old: str, new: str) -> bool:
    """Give a file a second name; return whether it has that now."""
    try:
        os.link(old, new, follow_symlinks=False)
    except FileNotFoundError:
        return not os.path.lexists(old)  # removed meanwhile
    except FileExistsError:
        one, other = os.lstat(old), os.lstat(new)
        return (one.st_ino, one.st_dev) == (other.st_ino, other.st_dev)
    return True


def _ways(name: str) -> set[str]:
    """Return the folders on the way to a name."""
    parts = name.split("/")[:-1]
    return {"/".join(parts[:count]) for count in range(len(parts) + 1)}


def _make_ways(top: str, folder: str) -> set[str]:
    """Make a folder and those on the way to it, as far as they aren't there, and return which those were."""
    made = set()
    for way in sorted({*_ways(folder), folder} - {""}):
        with suppress(FileExistsError):
            os.mkdir(os.path.join(top, way), 0o700)
            made.add(way)
    return made


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
            os.fsync(file.fileno())


def _read(path: str) -> bytes | None:
    with suppress(OSError), open(path, "rb") as file:
        return file.read()
    return None


def _changed(path: str) -> float | None:
    with suppress(OSError):
        return os.stat(path).st_mtime
    return None


def _remove(path: str) -> None:
    with suppress(FileNotFoundError):
        shutil.rmtree(path) if os.path.isdir(path) and not os.path.islink(path) else os.remove(path)
