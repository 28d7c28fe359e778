"""Storages behind URLs that fsspec supports: object stores and all its other file systems."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from ..errors import CheckpointingException, OutcomeUnknown, StorageError, error_text
from ..kit import AnyBuffer, Buffer, Capabilities, LocalStorage, Storage, byte_view, inside
from ._object_errors import plain_url, without_secrets

MARKER = ".shardtree-folder"
"""Name of an empty object that stands for a folder in stores without folders; other methods hide it."""

_RANGE_BYTES = 16 * 1024 * 1024


def fsspec_storage(url: str) -> Storage:
    """Return the storage of the folder at a URL, through fsspec.

    A file is uploaded and durable once it is closed. `replace` is a single upload, which is atomic on object stores. On
    ftp and the like, a crash during `replace` can leave half of metadata.json, and the checkpoint can't be loaded.

    Args:
        url: URL ``protocol://path``, as fsspec reads it; ``file://`` is the local file system.

    Raises:
        StorageError: fsspec or its package for the protocol isn't installed, or it can't use the URL.

    Examples:
        >>> storage = fsspec_storage("memory://runs/step_10")
        >>> storage.write("a.bin", [memoryview(b"abc")], durable=True)
        3
        >>> storage.names(), storage.where("a.bin")
        (('a.bin',), 'memory://runs/step_10/a.bin')
        >>> storage.remove("a.bin")
    """
    # Each part of a chained URL, such as simplecache::https://…, may have a query.
    plain = plain_url(url) if "::" not in url else without_secrets(url)
    try:
        from fsspec.core import url_to_fs
        from fsspec.implementations.local import LocalFileSystem
    except ImportError as error:
        fix = "pip install 'shardtree[remote]'"
        raise StorageError(error_text(f"{plain!r} needs fsspec, which is not installed", fix=fix)) from error
    try:
        files, root = url_to_fs(url)
    except Exception as error:  # constructors of file systems raise many types, such as TypeError for a missing part
        fix = "Install the package that fsspec names for this protocol, or name a local path without '://'."
        if not isinstance(error, (ImportError, ValueError)):
            fix = "Complete the URL as this file system requires, or pass another URL or a local path."
        reason = without_secrets(f"{type(error).__name__}: {error}")
        raise StorageError(error_text(f"no file system for {plain!r}", found=reason, fix=fix)) from None
    # Our own local storage is used, since fsspec's neither syncs nor exchanges folders.
    if isinstance(files, LocalFileSystem):
        return LocalStorage(root)
    return FsspecStorage(files, root.rstrip("/"), plain.rstrip("/"))


@dataclass(frozen=True, slots=True)
class FsspecStorage:
    """A folder of one of fsspec's file systems.

    Args:
        files: The file system.
        root: Path of the folder in the file system.
        url: URL of the folder, for people and error messages.
    """

    files: Any = field(repr=False)
    root: str = field(repr=False)  # with the query of a signed URL
    url: str

    @property
    def capabilities(self) -> Capabilities:
        """The capabilities of a file system behind a URL."""
        folders = ("make_folder", "is_folder", "remove_folder", "folder")
        return Capabilities.of(self, "move", *folders, late_requests=True)

    def folder(self, name: str) -> FsspecStorage:
        """Return the storage of a subfolder."""
        return FsspecStorage(self.files, f"{self.root}/{name}", f"{self.url}/{name}")

    def where(self, name: str = "") -> str:
        """Return the URL of a file or subfolder."""
        return "/".join(filter(None, (self.url, inside(name, self.url))))

    def write(self, name: str, buffers: Iterable[AnyBuffer], *, durable: bool) -> int:
        """Write a new file from buffers, in order, and return its length; the file is durable when this returns."""
        length = 0
        with self._storage_errors("write", name):
            file = self.files.open(self._path(name), "wb")
        try:
            for memory in buffers:
                buffer = byte_view(memory, self.where(name))
                with self._storage_errors("write", name):
                    file.write(buffer)
                length += buffer.nbytes
            with self._storage_errors("write", name):
                file.close()
        except BaseException:
            self._give_up(file, name)
            raise
        return length

    def _give_up(self, file: Any, name: str) -> None:
        """Remove all traces of a failed write: the partial file, and the open upload."""
        with suppress(Exception):
            file.discard()
            file.closed = True  # otherwise the garbage collector would upload the partial file
        with suppress(StorageError):
            self.remove(name)

    def move(self, old: str, new: str) -> None:
        """Rename a file; most stores copy it and remove the old one."""
        with self._storage_errors("move", old):
            self.files.mv(self._path(old), self._path(new))

    @contextmanager
    def open(self, name: str) -> Iterator[_RangeReader]:
        """Open a file for reading; every read is a request."""
        length = self.length(name)
        if length is None:
            raise StorageError(error_text(f"cannot open {self.where(name)!r}", found="no such file"))
        yield _RangeReader(self, name, length)

    def replace(self, name: str, data: bytes, *, durable: bool) -> None:
        """Replace a file's content by a single upload."""
        try:
            with self._storage_errors("replace", name):
                self.files.pipe_file(self._path(name), data)
        except StorageError as error:
            # Only a refusal means that nothing was stored: after a lost connection, the store may execute the request.
            if isinstance(error.__cause__, PermissionError | FileNotFoundError | NotADirectoryError):
                raise
            raise OutcomeUnknown(str(error)) from error.__cause__

    def read(self, name: str) -> bytes:
        """Return a file's bytes."""
        with self._storage_errors("read", name):
            # The cache is bypassed: a later save may have replaced a cached metadata.json.
            cached = "cach" in type(self.files).__name__.lower()
            return bytes((self.files.fs if cached else self.files).cat_file(self._path(name)))

    def read_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return the bytes of (begin, end) ranges of a file, fetched concurrently if the file system supports it."""
        begins, ends = ([span[side] for span in ranges] for side in (0, 1))
        paths = [self._path(name)] * len(ranges)
        with self._storage_errors("read", name):
            return list(self.files.cat_ranges(paths, begins, ends, on_error="raise"))

    def length(self, name: str) -> int | None:
        """Return a file's length in bytes, or None if there is no such file."""
        info = self._info(name)
        return int(info["size"]) if info is not None and info["type"] == "file" else None

    def names(self, folder: str = "") -> tuple[str, ...]:
        """Return the sorted names of a folder's direct entries."""
        return tuple(name for name in self._everything(folder) if name != MARKER)

    def make_folder(self, name: str = "", *, durable: bool = True) -> None:
        """Make a folder by writing an empty object (`MARKER`) into it, since object stores have no folders.

        The storage's own folder gets no marker: it exists as soon as a file is in it.
        """
        if not inside(name, self.url):
            return
        with self._storage_errors("make the folder", name):
            marker = f"{self._path(name)}/{MARKER}"
            # Object stores need no parent folders; file systems that need them raise FileNotFoundError.
            try:
                self.files.pipe_file(marker, b"")
            except FileNotFoundError:
                self.files.makedirs(self._path(name), exist_ok=True)
                self.files.pipe_file(marker, b"")

    def is_folder(self, name: str = "") -> bool:
        """Return whether a folder of that name exists."""
        return bool(self._everything(name))

    def remove(self, name: str) -> None:
        """Remove a file if it exists."""
        with self._storage_errors("remove", name):
            try:
                self.files.rm_file(self._path(name))
            except FileNotFoundError:
                return

    def remove_folder(self, name: str) -> None:
        """Remove a folder if it is empty."""
        if name and not self.names(name):
            self.remove(f"{name}/{MARKER}")
            with suppress(Exception):  # most stores have nothing left to remove, and raise various errors
                self.files.rmdir(self._path(name))

    def changed(self, name: str) -> float | None:
        """Return the time of a file's last change, or of a folder's creation, in seconds by the store's clock."""
        info = self._info(name)
        file = name if info is None or info["type"] == "file" else f"{name}/{MARKER}"
        with self._storage_errors("look at", name):
            try:
                return float(self.files.modified(self._path(file)).timestamp())
            except (FileNotFoundError, NotImplementedError):
                return None

    def _path(self, name: str) -> str:
        return "/".join((self.root, *filter(None, [inside(name, self.url)])))

    def _info(self, name: str) -> dict[str, Any] | None:
        with self._storage_errors("look at", name):
            # fsspec caches listings, and would miss files that other ranks have written since.
            self.files.invalidate_cache()
            try:
                return dict(self.files.info(self._path(name)))
            except FileNotFoundError:
                return None

    def _everything(self, folder: str) -> tuple[str, ...]:
        """Return the names of all direct entries of a folder, including the object that marks it as a folder."""
        path = self._path(folder)
        with self._storage_errors("list", folder):
            self.files.invalidate_cache()
            try:
                entries = self.files.ls(path, detail=False)
            except (FileNotFoundError, NotADirectoryError):
                return ()
        # Some stores list the folder itself, and some end folders' names with a slash.
        names = (entry.rstrip("/").removeprefix(path).strip("/") for entry in entries)
        return tuple(sorted(name for name in names if name and "/" not in name))

    @contextmanager
    def _storage_errors(self, doing: str, name: str) -> Iterator[None]:
        # All exceptions are caught: fsspec passes on those of client libraries, few of which are OSErrors.
        try:
            yield
        except CheckpointingException:
            raise
        except Exception as error:
            plain = f"{type(error).__name__}: {error}"
            reason = without_secrets(plain)
            # An exception whose text contains secrets must not be shown as the cause either.
            cause = error if reason == plain else type(error)(reason) if isinstance(error, OSError) else None
            raise StorageError(error_text(f"cannot {doing} {self.where(name)!r}", found=reason)) from cause


@dataclass(frozen=True, slots=True)
class _RangeReader:
    storage: FsspecStorage
    name: str
    length: int

    def read_into(self, byte: int, buffers: Sequence[Buffer]) -> None:
        total = sum(buffer.nbytes for buffer in buffers)
        data = memoryview(self._bytes(byte, byte + total))
        for buffer in buffers:
            buffer[:], data = data[: buffer.nbytes], data[buffer.nbytes :]

    def read(self, begin: int = 0, end: int | None = None) -> Buffer:
        return memoryview(self._bytes(begin, self.length if end is None else end))

    def _bytes(self, begin: int, end: int) -> bytearray:
        """Return a byte range of the file, requested in ranges of at most `_RANGE_BYTES`."""
        data = bytearray()
        # Stores answer a range beyond the end with fewer bytes, so lengths are compared below.
        if end <= self.length:
            ranges = [(at, min(at + _RANGE_BYTES, end)) for at in range(begin, end, _RANGE_BYTES)]
            data = bytearray().join(self.storage.read_ranges(self.name, ranges))
        if len(data) != end - begin:
            heading = f"cannot read bytes {begin} to {end}: {self.storage.where(self.name)!r} ends before byte {end}"
            raise StorageError(error_text(heading))
        return data
