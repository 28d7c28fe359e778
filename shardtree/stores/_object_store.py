"""The storage of an object store or web server, through obstore."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any, TypeVar

from ..errors import CheckpointingException, CorruptCheckpoint, OutcomeUnknown, StorageError, error_text
from ..kit import AnyBuffer, Buffer, Capabilities, Entry, RequestReader, byte_view, inside, limits
from ._object_errors import NO_RANGES, REFUSALS, check_process, request_failure
from ._object_streams import abort_uploads, noting, parts_of

T = TypeVar("T")

Tag = dict[str, str]
"""A store's identifiers of an object's content: its ETag and its version."""

_MOST_PARTS = 9_000  # S3 allows 10,000
_UNKNOWN_BYTES = 2**38  # upper bound of a file whose length isn't known beforehand: a quarter of a TB
_STAYING_IN_FLIGHT = (
    16  # parts that are sent without a copy take no memory; two files have as many as a load's requests
)
_uploads = threading.BoundedSemaphore(2)
"""Limit on a process's concurrent uploads of files, each with up to `limits.UPLOAD_BYTES` copied and in flight."""

_READ_TRIES = 5
_FIRST_PAUSE = 0.1  # seconds, doubled after each try


@dataclass(frozen=True, slots=True)
class ObjectStorage:
    """A folder of an object store: all objects whose names begin with its path.

    Attributes:
        url: URL of the folder, for people and error messages.
        root: Path of the folder in the store.
        store: Store of obstore, which retries failed requests.
        once: The same store without retries, for the request that commits.
        secrets: Settings of the store; messages leave out the values of secret ones.
        request_scale: Number of bytes of a request for a long file, as a multiple of the usual number.
    """

    url: str
    root: str = field(repr=False)
    store: Any = field(repr=False, compare=False)
    once: Any = field(repr=False, compare=False)
    secrets: Mapping[str, Any] = field(repr=False, compare=False, default_factory=dict)
    request_scale: int = field(repr=False, compare=False, default=1)

    @property
    def capabilities(self) -> Capabilities:
        """The capabilities of an object store."""
        names = ("move", "folder", "replace_if", "mark", "remove_all", "abort_uploads", "entries", "content")
        facts = {"latency": _latencies.get(self._place), "request_scale": self.request_scale}
        return Capabilities.of(self, *names, "read_range", late_requests=True, **facts)

    def where(self, name: str = "") -> str:
        """Return the URL of a file or subfolder."""
        return "/".join(filter(None, (self.url, inside(name, self.url))))

    def folder(self, name: str) -> ObjectStorage:
        """Return the storage of a subfolder."""
        return replace(self, url=f"{self.url}/{name}", root=self._path(name))

    @property
    def _place(self) -> str:
        return "/".join(self.url.split("/")[:3])

    # Reads.

    def content(self, name: str, most: int | None = None) -> bytes | None:
        """Return a file's bytes by a single request, or None if there is no such file.

        Raises:
            CorruptCheckpoint: the file has more than `most` bytes, which aren't fetched.
        """
        return self._with_tag(name, most)[0]

    def read(self, name: str) -> bytes:
        """Return a file's bytes."""
        if (data := self._with_tag(name)[0]) is None:
            raise self._absent("read", name)
        return data

    def _with_tag(self, name: str, most: int | None = None) -> tuple[bytes | None, Tag | None]:
        """Return a file's bytes and their tag, its ETag and version; (None, None) if the file is missing.

        Raises:
            CorruptCheckpoint: the file has more than `most` bytes.
        """

        def whole_file() -> tuple[bytes | None, Tag | None]:
            start = time.monotonic()
            # The range starts at the first byte, so that the answer contains the file's length even if it is truncated.
            answer = self._get("read", name, {"offset": 0})
            if answer is None:
                return None, None
            size = int(answer.meta["size"])
            if most is not None and size > most:
                heading = f"open: {self.where(name)!r} is too large for a file of a save"
                raise CorruptCheckpoint(error_text(heading, found=f"{size} bytes", expected=f"at most {most}"))
            data = bytes(answer.bytes())
            if len(data) != size:
                raise _TooShort(len(data), size)
            if size <= _REMEMBERED_BYTES:
                _latencies[self._place] = time.monotonic() - start
            # Conditional writes use the version in Google Cloud Storage, and the ETag in other stores.
            return data, {kind: tag for kind in ("e_tag", "version") if (tag := answer.meta[kind]) is not None}

        data, tag = self._again("read", name, whole_file)
        if data is not None and len(data) <= _REMEMBERED_BYTES:
            _tags[self.where(name)] = (data, tag)
            if len(_tags) > _MOST_TAGS:
                _tags.pop(next(iter(_tags)), None)
        return data, tag

    def read_range(self, name: str, begin: int, end: int) -> tuple[Buffer, int]:
        """Return bytes `begin` to `end` of a file, as far as the file reaches, and the file's length."""
        if begin >= end:
            return memoryview(b""), self._length_or_raise(name)

        def part_of_file() -> tuple[Buffer, int]:
            answer = self._get("read", name, (begin, end))
            if answer is None:
                raise self._absent("read", name)
            length = int(answer.meta["size"])
            data = memoryview(answer.bytes())
            if data.nbytes != min(end, length) - begin:
                raise _TooShort(data.nbytes, min(end, length) - begin)
            return data, length

        return self._again("read", name, part_of_file)

    def _get(self, doing: str, name: str, span: Any) -> Any:
        import obstore

        with self._storage_errors(doing, name):
            try:
                return obstore.get(self.store, self._path(name), options={"range": span})
            except FileNotFoundError:
                return None
            except obstore.exceptions.BaseError as error:
                # Empty files have no valid range, and some servers don't support ranges; the whole file is requested.
                if not isinstance(span, dict) or ("416" not in str(error) and not NO_RANGES.search(str(error))):
                    raise
                return obstore.get(self.store, self._path(name))

    @contextmanager
    def open(self, name: str) -> Iterator[RequestReader]:
        """Open a file for reading."""
        yield RequestReader(partial(self.read_range, name), self.where(name), self._length_or_raise(name))

    def _length_or_raise(self, name: str) -> int:
        if (length := self.length(name)) is None:
            raise self._absent("open", name)
        return length

    def length(self, name: str) -> int | None:
        """Return a file's length in bytes, or None if there is no such file."""
        return None if (meta := self._head(name)) is None else int(meta["size"])

    def changed(self, name: str) -> float | None:
        """Return the time when a file, or the newest file of a folder, was written, in seconds by the store's clock."""
        meta = self._head(name)
        if meta is not None:
            return _seconds(meta)
        return max((entry.changed for entry in self.entries(name).values()), default=None)

    def _head(self, name: str) -> Any:
        import obstore

        if not self._path(name):
            return None
        with self._storage_errors("look at", name):
            try:
                return obstore.head(self.store, self._path(name))
            except FileNotFoundError:
                return None

    # Listings.

    def names(self, folder: str = "") -> tuple[str, ...]:
        """Return the sorted names of a folder's direct entries."""
        return tuple(sorted(name.rstrip("/") for name in self.entries(folder, deep=False)))

    def entries(self, folder: str = "", *, deep: bool = True) -> dict[str, Entry]:
        """Return the `Entry` of each file in a folder, by relative name; one request for each thousand files."""
        import obstore

        if self.url.startswith("http"):
            return {}  # web servers can't list files
        path = self._path(folder)
        with self._storage_errors("list", folder):
            if deep:
                folders: Sequence[str] = ()
                objects = [
                    item for page in obstore.list(self.store, prefix=path or None, chunk_size=1000) for item in page
                ]
            else:
                level = obstore.list_with_delimiter(self.store, prefix=path or None)
                folders, objects = level["common_prefixes"], list(level["objects"])
        return {name.removeprefix(path).strip("/") + "/": Entry(0, 0.0) for name in folders} | {
            item["path"].removeprefix(path).lstrip("/"): Entry(int(item["size"]), _seconds(item)) for item in objects
        }

    # Writes.

    def write(self, name: str, buffers: Iterable[AnyBuffer], *, durable: bool) -> int:
        """Write a new file from buffers, in order, and return its length; it is durable and visible afterwards.

        A large file is uploaded in parts; after a failure, the upload is aborted.
        """
        import obstore

        part, is_whole = limits.UPLOAD_PART_BYTES * self.request_scale, isinstance(buffers, list | tuple)
        views: Iterable[Buffer] = (byte_view(buffer, self.where(name)) for buffer in buffers)
        if is_whole:
            views = list(views)
            nbytes = sum(view.nbytes for view in views)
        else:
            nbytes = getattr(buffers, "nbytes", _UNKNOWN_BYTES)
        if nbytes > part * _MOST_PARTS:
            part = -(-nbytes // _MOST_PARTS // 2**20) * 2**20
        # A file that is complete in memory, such as an index, needs no parts longer than itself.
        stay = nbytes >= part and getattr(buffers, "stay", False)
        parts = iter(views) if stay else parts_of(views, min(part, max(1, nbytes)) if is_whole else part)
        first = next(parts, memoryview(b""))
        if first.nbytes < part and not stay:
            with self._storage_errors("write", name):
                obstore.put(self.store, self._path(name), first, use_multipart=False)
            return first.nbytes
        lengths: list[int] = []
        in_flight = _STAYING_IN_FLIGHT if stay else max(1, limits.UPLOAD_BYTES * self.request_scale // part)
        errors: list[BaseException] = []
        with _uploads, self._storage_errors("write", name, errors):
            stream = noting(chain([first], parts), lengths, errors)
            obstore.put(self.store, self._path(name), stream, chunk_size=part, max_concurrency=in_flight)
        return sum(lengths)

    def replace(self, name: str, data: bytes, *, durable: bool) -> None:
        """Replace a file's content by a single request."""
        self._put(name, data, "overwrite")

    def replace_if(self, name: str, before: bytes | None, data: bytes) -> bool:
        """Replace a file's content if it is still `before`; return whether an answer confirms the replacement.

        If `before` is None, create the file if there is none. See `Capabilities` for the meaning of False.
        """
        if before is None:
            return self._commits(name, data, "create")
        # If this process has read these bytes, the tag that came with them reliably detects changes since then.
        content, tag = _tags.get(self.where(name), (None, None))
        if content == before and tag and self._commits(name, data, tag):
            return True
        # Equal bytes may have a new tag by now, as after a copy of the bucket.
        again, newer = self._with_tag(name)
        if again != before or not newer or newer == tag:
            return False
        return self._commits(name, data, newer)

    def _commits(self, name: str, data: bytes, mode: Any) -> bool:
        try:
            self._put(name, data, mode)
        except OutcomeUnknown:
            return False
        return True

    def mark(self, name: str, data: bytes) -> bool:
        """Create or overwrite a small file; return whether the store honours conditions (see `Capabilities.mark`)."""
        store = self._place
        try:
            self._put(name, data, "create")
        except OutcomeUnknown:  # an earlier call left a file that names another process, or no answer came
            self._put(name, data, "overwrite")
            return True
        if store not in _honours:
            try:
                self._put(name, data, "create")
                _honours[store] = False
            except OutcomeUnknown as error:
                if not error.args or "already exists" not in str(error):
                    return True
                _honours[store] = True
        return _honours[store]

    def _put(self, name: str, data: bytes, mode: Any) -> None:
        import obstore

        check_process(self.url)
        try:
            # Conditional requests aren't repeated: the second one would be refused because of the first.
            store = self.store if mode == "overwrite" else self.once
            obstore.put(store, self._path(name), data, mode=mode, use_multipart=False)
        except Exception as error:
            failure = self._failure("replace", name, error)
            raise (failure if REFUSALS.fullmatch(type(error).__name__) else OutcomeUnknown(str(failure))) from None

    def move(self, old: str, new: str) -> None:
        """Rename a file: the store copies it, then the old file is removed."""
        import obstore

        with self._storage_errors("move", old):
            obstore.copy(self.store, self._path(old), self._path(new))
        self.remove(old)

    def remove(self, name: str) -> None:
        """Remove a file if it exists."""
        self.remove_all([name])

    def remove_all(self, names: Sequence[str]) -> None:
        """Remove files, up to a thousand by each request."""
        import obstore

        if names:
            with self._storage_errors("remove", names[0]):
                try:
                    paths = [self._path(name) for name in names]
                    obstore.delete(self.store, paths if len(paths) > 1 else paths[0])
                except FileNotFoundError:
                    return

    def abort_uploads(self, folder: str, is_left: Callable[[str, float], bool]) -> None:
        """Abort uploads in a folder that interrupted saves left open.

        Args:
            folder: Folder of the files that were uploaded.
            is_left: Function that takes a file's name in the folder and the age of its upload in seconds, and returns
                whether to abort the upload.
        """
        abort_uploads(self.url, self._path(folder), self.secrets, is_left)

    # Errors.

    def _path(self, name: str) -> str:
        return "/".join(filter(None, (self.root, inside(name, self.url))))

    def _absent(self, doing: str, name: str) -> StorageError:
        return StorageError(error_text(f"cannot {doing} {self.where(name)!r}", found="no such file"))

    def _again(self, doing: str, name: str, request: Callable[[], T]) -> T:
        """Send a request, and again if the answer is truncated; return the answer, or raise after a few tries."""
        for attempt in range(1, _READ_TRIES + 1):
            try:
                with self._storage_errors(doing, name):
                    return request()
            except _TooShort as short:
                if attempt == _READ_TRIES:
                    heading = f"cannot {doing} {self.where(name)!r}: {attempt} answers in a row were truncated"
                    raise StorageError(
                        error_text(heading, found=f"{short.args[0]} bytes", expected=f"{short.args[1]} bytes")
                    ) from None
                time.sleep(_FIRST_PAUSE * 2 ** (attempt - 1) * random.uniform(0.5, 1.5))
        raise AssertionError

    @contextmanager
    def _storage_errors(self, doing: str, name: str, errors: Sequence[BaseException] = ()) -> Iterator[None]:
        check_process(self.url)
        try:
            yield
        except (CheckpointingException, _TooShort):
            raise
        except Exception as error:
            if errors:  # the iterator of the buffers failed, and its own error is the cause
                raise errors[0] from None
            raise self._failure(doing, name, error) from None

    def _failure(self, doing: str, name: str, error: Exception) -> StorageError:
        return request_failure(f"cannot {doing} {self.where(name)!r}", error, self.secrets)


_REMEMBERED_BYTES = 64 * 1024
_MOST_TAGS = 256
_tags: dict[str, tuple[bytes, Tag | None]] = {}
"""Content and tag of small files that this process has read, by URL."""

_honours: dict[str, bool] = {}
"""Whether stores honour conditions, by host or bucket, as far as this process has tried."""

_latencies: dict[str, float] = {}
"""Duration of the last small request in seconds, by host or bucket."""


def _seconds(meta: Any) -> float:
    """Return the time when an object was written, in whole seconds, since HTTP headers have no fractions."""
    return float(int(meta["last_modified"].timestamp()))


class _TooShort(Exception):
    """Error of a truncated answer; the arguments are the found and the expected number of bytes."""
