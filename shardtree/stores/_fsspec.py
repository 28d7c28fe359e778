"""Files behind a URL: object stores and all other file systems of fsspec."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from ..errors import CheckpointingException, OutcomeUnknown, StorageError, error_text
from ..kit import AnyBuffer, Buffer, Capabilities, LocalStorage, Storage, byte_view, inside
from ._object_errors import plain_url, without_secrets

MARKER = ".shardtree-folder"
"""An empty object that makes a folder where the store has none; no other method shows it."""

_RANGE_BYTES = 16 * 1024 * 1024


def fsspec_storage(url: str) -> Storage:
    """Return the storage behind a URL.

    Files are uploaded, and durable, once they are closed. `replace` is one upload, which is atomic on object stores; on
    ftp and the like, a crash at that moment can leave half of metadata.json, which then can't be loaded.

    Args:
        url: ``protocol://path``, as fsspec reads it; ``file://`` is the local file system.

    Raises:
        StorageError: fsspec, or what it needs for that protocol, isn't installed, or it can't use the URL.

    Examples:
        >>> storage = fsspec_storage("memory://runs/step_10")
        >>> storage.write("a.bin", [memoryview(b"abc")], durable=True)
        3
        >>> storage.names(), storage.where("a.bin")
        (('a.bin',), 'memory://runs/step_10/a.bin')
        >>> storage.remove("a.bin")
    """
    # Of a chain, such as simplecache::https://…, each part may have a query.
    plain = plain_url(url) if "::" not in url else without_secrets(url)
    try:
        from fsspec.core import url_to_fs
        from fsspec.implementations.local import LocalFileSystem
    except ImportError as error:
        fix = "pip install 'shardtree[remote]'"
        raise StorageError(error_text(f"{plain!r} needs fsspec, which isn't installed", fix=fix)) from error
    try:
        files, root = url_to_fs(url)
    except Exception as error:  # a file system's constructor may raise anything: TypeError for what the URL lacks
        fix = "Install the package that fsspec names for this protocol, or name a local path without '://'."
        if not isinstance(error, (ImportError, ValueError)):
            fix = "Name in the URL all that this file system needs, or pass another URL or a local path."
        reason = without_secrets(f"{type(error).__name__}: {error}")
        raise StorageError(error_text(f"no file system for {plain!r}", found=reason, fix=fix)) from None
    # fsspec's local file system neither syncs nor exchanges folders.
    if isinstance(files, LocalFileSystem):
        return LocalStorage(root)
    return FsspecStorage(files, root.rstrip("/"), plain.rstrip("/"))


@dataclass(frozen=True, slots=True)
class FsspecStorage:
    """A folder of one of fsspec's file systems.

    Args:
        files: the file system.
        root: the folder's path in it.
        url: the folder, as people and error messages should see it.
    """

    files: Any = field(repr=False)
    root: str = field(repr=False)  # with the query of a signed URL
    url: str

    @property
    def capabilities(self) -> Capabilities:
        """What a file system behind a URL can do beyond `Storage`."""
        folders = ("make_folder", "is_folder", "remove_folder", "folder")
        return Capabilities.of(self, "move", *folders, late_requests=True)

    def folder(self, name: str) -> FsspecStorage:
        """Return a folder in this one."""
        return FsspecStorage(self.files, f"{self.root}/{name}", f"{self.url}/{name}")

    def where(self, name: str = "") -> str:
        """Return the URL of a name."""
        return "/".join(filter(None, (self.url, inside(name, self.url))))

    def write(self, name: str, buffers: Iterable[AnyBuffer], *, durable: bool) -> int:
        """Write a new file from buffers, in order, and return its length; it is durable afterwards."""
        length = 0
        with self._storage_errors("write", name):
            file = self.files.open(self._path(name), "wb")
        try:
            for each in buffers:
                buffer = byte_view(each, self.where(name))
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
        """Leave nothing of a file whose writing failed: neither a part of it, nor an upload that stays open."""
        with suppress(Exception):
            file.discard()
            file.closed = True  # else it would upload what it has when it is collected
        with suppress(StorageError):
            self.remove(name)

    def move(self, old: str, new: str) -> None:
        """Rename a file; most stores copy it and remove the old one."""
        with self._storage_errors("move", old):
            self.files.mv(self._path(old), self._path(new))

    @contextmanager
    def open(self, name: str) -> Iterator[_RangeReader]:
        """Open a file for reading; every read is a request of its own."""
        length = self.length(name)
        if length is None:
            raise StorageError(error_text(f"cannot open {self.where(name)!r}", found="no such file"))
        yield _RangeReader(self, name, length)

    def replace(self, name: str, data: bytes, *, durable: bool) -> None:
        """Give a file new content in one upload."""
        try:
            with self._storage_errors("replace", name):
                self.files.pipe_file(self._path(name), data)
        except StorageError as error:
            # Only a refusal says that nothing was stored: after a cut connection the store may apply the request later.
            if isinstance(error.__cause__, PermissionError | FileNotFoundError | NotADirectoryError):
                raise
            raise OutcomeUnknown(str(error)) from error.__cause__

    def read(self, name: str) -> bytes:
        """Return a file's bytes."""
        with self._storage_errors("read", name):
            # Around a cache: what says which checkpoint is there may have been replaced since it was cached.
            cached = "cach" in type(self.files).__name__.lower()
            return bytes((self.files.fs if cached else self.files).cat_file(self._path(name)))

    def read_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return the bytes of ranges (begin, end) of a file, fetched concurrently where the file system can."""
        begins, ends = ([span[side] for span in ranges] for side in (0, 1))
        paths = [self._path(name)] * len(ranges)
        with self._storage_errors("read", name):
            return list(self.files.cat_ranges(paths, begins, ends, on_error="raise"))

    def length(self, name: str) -> int | None:
        """Return a file's length in bytes, None if there is no such file."""
        info = self._info(name)
        return int(info["size"]) if info is not None and info["type"] == "file" else None

    def names(self, folder: str = "") -> tuple[str, ...]:
        """Return the names of what is directly inside a folder, sorted."""
        return tuple(name for name in self._everything(folder) if name != MARKER)

    def make_folder(self, name: str = "", *, durable: bool = True) -> None:
        """Make a folder, as an object in it that every rank sees, since object stores have no folders.

        The storage's own folder begins to exist with its first file.
        """
        if not inside(name, self.url):
            return
        with self._storage_errors("make the folder", name):
            marker = f"{self._path(name)}/{MARKER}"
            # Object stores need no parent folders; file systems that do report it by FileNotFoundError.
            try:
                self.files.pipe_file(marker, b"")
            except FileNotFoundError:
                self.files.makedirs(self._path(name), exist_ok=True)
                self.files.pipe_file(marker, b"")

    def is_folder(self, name: str = "") -> bool:
        """Return whether there is a folder of that name."""
        return bool(self._everything(name))

    def remove(self, name: str) -> None:
        """Remove a file; nothing happens if it isn't there."""
        with self._storage_errors("remove", name):
            try:
                self.files.rm_file(self._path(name))
            except FileNotFoundError:
                return

    def remove_folder(self, name: str) -> None:
        """Remove a folder if it is empty."""
        if name and not self.names(name):
            self.remove(f"{name}/{MARKER}")
            with suppress(Exception):  # most stores have nothing left to remove, and each says so in its own way
                self.files.rmdir(self._path(name))

    def changed(self, name: str) -> float | None:
        """Return when a file was last changed, or a folder made, in seconds since 1970 by the store's clock."""
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
            # fsspec caches listings, and would miss what other ranks have written since.
            self.files.invalidate_cache()
            try:
                return dict(self.files.info(self._path(name)))
            except FileNotFoundError:
                return None

    def _everything(self, folder: str) -> tuple[str, ...]:
        """Return all names directly inside a folder, the marker too."""
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
        # Any exception: fsspec passes on those of the stores' client libraries, and few of them are OSErrors.
        try:
            yield
        except CheckpointingException:
            raise
        except Exception as error:
            plain = f"{type(error).__name__}: {error}"
            reason = without_secrets(plain)
            # A text with secrets must not be shown as the cause either.
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
        """Return bytes of the file, requested in ranges of at most `_RANGE_BYTES`."""
        data = bytearray()
        # Stores answer a range beyond the end with the bytes that there are, so that lengths are compared below.
        if end <= self.length:
            ranges = [(at, min(at + _RANGE_BYTES, end)) for at in range(begin, end, _RANGE_BYTES)]
            data = bytearray().join(self.storage.read_ranges(self.name, ranges))
        if len(data) != end - begin:
            what = f"{self.storage.where(self.name)!r} ends at byte {self.length}"
            raise StorageError(error_text(what, found=f"{len(data)} bytes", expected=f"bytes {begin} to {end}"))
        return data
