"""An object's bytes as a stream: parts of an upload, uploads that killed processes have left open, and reads ahead."""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import UTC, datetime
from functools import partial
from threading import BoundedSemaphore
from typing import Any

import numpy as np

from ..errors import StorageError, error_text
from ._capabilities import can
from ._object_errors import without_secrets
from ._storage import Buffer, Reader, Storage
from ._threads import in_threads


def parts_of(buffers: Iterable[Buffer], size: int) -> Iterator[Buffer]:
    """Yield the buffers' bytes in parts of one size, the last of which may be shorter.

    A part keeps its bytes as long as anybody holds it, though the buffers' source may use its memory again as soon as
    it is asked for more; then the part's memory is used again.

    Examples:
        >>> [bytes(part) for part in parts_of([memoryview(b"abc"), memoryview(b"defg")], 3)]
        [b'abc', b'def', b'g']
    """
    pool: list[bytearray] = []
    memory, length = bytearray(), 0
    for buffer in buffers:
        at = 0
        while at < buffer.nbytes:
            if not length:
                memory = _free_memory(pool, size)
            step = min(size - length, buffer.nbytes - at)
            copy_bytes(memory, length, buffer[at : at + step])
            at, length = at + step, length + step
            if length == size:
                yield memoryview(memory)
                length = 0
    if length:
        yield memoryview(memory)[:length]


def _free_memory(pool: list[bytearray], size: int) -> bytearray:
    """Return memory of the pool that nobody holds a view of, new memory if there is none."""
    for memory in pool:
        try:
            memory.append(memory.pop())  # Python refuses to resize what has views
        except BufferError:
            continue
        return memory
    pool.append(bytearray(size))
    return pool[-1]


def copy_bytes(memory: bytearray | Buffer, at: int, source: Buffer) -> None:
    r"""Copy bytes; other threads go on meanwhile.

    Examples:
        >>> memory = bytearray(4)
        >>> copy_bytes(memory, 1, memoryview(b"ab"))
        >>> memory
        bytearray(b'\x00ab\x00')
    """
    # By NumPy: a slice of a memoryview is copied under Python's global lock.
    np.frombuffer(memory, dtype=np.uint8, count=source.nbytes, offset=at)[:] = np.frombuffer(source, dtype=np.uint8)


def noting(parts: Iterable[Buffer], lengths: list[int], errors: list[BaseException]) -> Iterator[Buffer]:
    """Yield the same, and note the lengths, and what the source raised."""
    try:
        for part in parts:
            lengths.append(part.nbytes)
            yield part
    except BaseException as error:
        errors.append(error)
        raise


def opened(storage: Storage, name: str, length: int) -> AbstractContextManager[Reader]:
    """Open a file whose length is known: where each look at a file is a request, that one is saved."""
    if (read_range := can(storage).read_range) is not None:
        return nullcontext(ObjectReader(partial(read_range, name), storage.where(name), length))
    return storage.open(name)


_NEAR_BYTES = 16 * 1024
"""Spans with no more than this between them come by one request."""

_AT_ONCE = 32
_requests = BoundedSemaphore(_AT_ONCE)
"""Requests that a process makes ahead at a time, for all files together."""


def fetch_ahead(reader: Reader, spans: Iterable[tuple[int, int]]) -> None:
    """Fetch spans of an open file that will be read, all at once, where each read would be a request.

    Args:
        reader: of the file; it holds them until it fetches others.
        spans: first byte of each, and one past its last, all in the file.

    Raises:
        StorageError: they can't be read.
    """
    if isinstance(reader, ObjectReader):
        reader.fetch(_merge_near(spans))


def _merge_near(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return spans in order, those that are near each other as one.

    Examples:
        >>> _merge_near([(40_000, 40_001), (10, 20), (0, 5)])
        [(0, 20), (40000, 40001)]
    """
    runs: list[tuple[int, int]] = []
    for begin, end in sorted(spans):
        if runs and begin <= runs[-1][1] + _NEAR_BYTES:
            runs[-1] = runs[-1][0], max(end, runs[-1][1])
        else:
            runs.append((begin, end))
    return runs


_AHEAD_BYTES = 8 * 1024 * 1024


class ObjectReader:
    """An open object; bytes that are read one after the other come in large requests."""

    def __init__(self, read: Callable[[int, int], tuple[Buffer, int]], where: str, length: int) -> None:
        self.length, self._read, self._where = length, read, where
        self._begin, self._ahead, self._next = 0, memoryview(b""), 0
        self._begins: list[int] = []
        self._parts: list[Buffer] = []

    def fetch(self, spans: Sequence[tuple[int, int]]) -> None:
        """Fetch spans at once, in order and apart from each other; reads inside of them make no request."""
        self._begins = [begin for begin, _ in spans]
        self._parts = in_threads(self._fetch_in_turn, spans, _AT_ONCE)

    def _fetch_in_turn(self, span: tuple[int, int]) -> Buffer:
        with _requests:
            return self._fetch_span(*span)

    def read_into(self, byte: int, buffers: Sequence[Buffer]) -> None:
        data = self._bytes(byte, byte + sum(buffer.nbytes for buffer in buffers))
        for buffer in buffers:
            buffer[:], data = data[: buffer.nbytes], data[buffer.nbytes :]

    def read(self, begin: int = 0, end: int | None = None) -> Buffer:
        return memoryview(bytearray(self._bytes(begin, self.length if end is None else end)))

    def _bytes(self, begin: int, end: int) -> Buffer:
        number = bisect_right(self._begins, begin) - 1
        if number >= 0 and end <= self._begins[number] + self._parts[number].nbytes:
            return self._parts[number][begin - self._begins[number] : end - self._begins[number]]
        at = begin - self._begin
        if not (at >= 0 and end <= self._begin + self._ahead.nbytes):
            # Only what goes on where the last read ended is likely to go on.
            ahead = min(self.length, begin + _AHEAD_BYTES) if begin and begin == self._next else end
            self._begin, self._ahead, at = begin, self._fetch_span(begin, max(end, ahead)), 0
        self._next = end
        return self._ahead[at : at + end - begin]

    def _fetch_span(self, begin: int, end: int) -> Buffer:
        data, length = self._read(begin, end)
        if data.nbytes != end - begin:
            what = f"{self._where!r} ends at byte {length}"
            raise StorageError(error_text(what, found=f"{data.nbytes} bytes", expected=f"bytes {begin} to {end}"))
        return data


logger = logging.getLogger("shardtree")

_logged_buckets: set[str] = set()
"""Buckets whose open uploads couldn't be listed, as this process has said."""

_SETTINGS = {
    "access_key_id": "aws_access_key_id",
    "secret_access_key": "aws_secret_access_key",
    "session_token": "aws_session_token",
    "token": "aws_session_token",
    "region": "region_name",
    "endpoint": "endpoint_url",
    "endpoint_url": "endpoint_url",
}
"""obstore's names of settings, without ``aws_``, and botocore's."""


def abort_uploads(url: str, folder: str, config: Mapping[str, Any], is_left: Callable[[str, float], bool]) -> int:
    """Give up open uploads of objects in a folder, and return how many there were.

    Only S3 keeps them for ever, and obstore can't list them, so that botocore does; without it, the log says so once
    for each bucket.

    Args:
        url: of the bucket, or of anything in it.
        folder: path of the folder in the bucket.
        config: the store's settings, as obstore names them.
        is_left: whether an upload may be given up, by the object's name in the folder and the seconds since it began.
    """
    scheme, _, rest = url.partition("://")
    if scheme not in ("s3", "s3a"):
        return 0
    bucket = rest.partition("/")[0]
    try:
        from botocore.session import get_session
    except ImportError:
        if bucket not in _logged_buckets:
            _logged_buckets.add(bucket)
            fix = "pip install 'shardtree[s3]', or let a lifecycle rule of the bucket abort incomplete uploads"
            logger.warning(
                "save: uploads of interrupted saves to %s can't be looked for without botocore: %s", url, fix
            )
        return 0
    prefix = f"{folder}/" if folder else ""
    pairs = ((_SETTINGS.get(name.lower().removeprefix("aws_")), value) for name, value in config.items())
    settings = {name: value for name, value in pairs if name is not None}
    try:
        client = get_session().create_client("s3", **settings)
        pages = client.get_paginator("list_multipart_uploads").paginate(Bucket=bucket, Prefix=prefix)
        now = datetime.now(UTC)
        uploads = [
            upload
            for page in pages
            for upload in page.get("Uploads", ())
            if is_left(upload["Key"].removeprefix(prefix), (now - upload["Initiated"]).total_seconds())
        ]
        for upload in uploads:
            client.abort_multipart_upload(Bucket=bucket, Key=upload["Key"], UploadId=upload["UploadId"])
    except Exception as error:
        # Not a failure of what is being done: the next save looks again.
        reason = without_secrets(f"{type(error).__name__}: {error}", config)
        logger.warning("save: uploads of interrupted saves to %s stay open: %s", url, reason)
        return 0
    return len(uploads)
