"""An object's bytes as a stream: parts of an upload, and uploads that killed processes have left open."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from ..kit import Buffer, copy_bytes
from ._object_errors import without_secrets


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


def noting(parts: Iterable[Buffer], lengths: list[int], errors: list[BaseException]) -> Iterator[Buffer]:
    """Yield the same, and note the lengths, and what the source raised."""
    try:
        for part in parts:
            lengths.append(part.nbytes)
            yield part
    except BaseException as error:
        errors.append(error)
        raise


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
