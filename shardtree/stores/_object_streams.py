"""Streams of an object's bytes: parts of an upload, and the removal of uploads that killed processes left open."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from ..kit import Buffer, copy_bytes
from ._object_errors import without_secrets


def parts_of(buffers: Iterable[Buffer], size: int) -> Iterator[Buffer]:
    """Yield the bytes of buffers in parts of one size; the last part may be shorter.

    Parts are copies, since `buffers` may reuse the memory of a buffer for the next one. The memory of a part is reused
    as soon as nothing refers to the part.

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
    """Return memory from the pool that no view refers to, or add new memory to the pool and return it."""
    for memory in pool:
        try:
            memory.append(memory.pop())  # Python refuses to resize a bytearray that has views
        except BufferError:
            continue
        return memory
    pool.append(bytearray(size))
    return pool[-1]


def noting(parts: Iterable[Buffer], lengths: list[int], errors: list[BaseException]) -> Iterator[Buffer]:
    """Yield parts unchanged; append their lengths to `lengths`, and an error of their iterator to `errors`."""
    try:
        for part in parts:
            lengths.append(part.nbytes)
            yield part
    except BaseException as error:
        errors.append(error)
        raise


logger = logging.getLogger("shardtree")

_logged_buckets: set[str] = set()
"""Buckets that this process has warned of, since their open uploads couldn't be listed."""

_SETTINGS = {
    "access_key_id": "aws_access_key_id",
    "secret_access_key": "aws_secret_access_key",
    "session_token": "aws_session_token",
    "token": "aws_session_token",
    "region": "region_name",
    "endpoint": "endpoint_url",
    "endpoint_url": "endpoint_url",
}
"""botocore's names of settings by obstore's, without ``aws_``."""


def abort_uploads(url: str, folder: str, config: Mapping[str, Any], is_left: Callable[[str, float], bool]) -> int:
    """Abort open uploads of objects in a folder, and return their number.

    Only S3 keeps open uploads for ever. They are listed by botocore, since obstore can't; without botocore, a warning
    is logged once for each bucket.

    Args:
        url: URL of the bucket, or of a folder or object in it.
        folder: Path of the folder in the bucket.
        config: Settings of the store, by obstore's names.
        is_left: Function that takes an object's name in the folder and the age of its upload in seconds, and returns
            whether to abort the upload.
    """
    scheme, _, path = url.partition("://")
    if scheme not in ("s3", "s3a"):
        return 0
    bucket = path.partition("/")[0]
    try:
        from botocore.session import get_session
    except ImportError:
        if bucket not in _logged_buckets:
            _logged_buckets.add(bucket)
            fix = "pip install 'shardtree[s3]', or let a lifecycle rule of the bucket abort incomplete uploads"
            logger.warning(
                "save: uploads of interrupted saves to %s cannot be looked for without botocore: %s", url, fix
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
        # The running save doesn't fail because of this: the next save tries again.
        reason = without_secrets(f"{type(error).__name__}: {error}", config)
        logger.warning("save: uploads of interrupted saves to %s stay open: %s", url, reason)
        return 0
    return len(uploads)
