"""Uploads in parts that killed processes have left open: invisible, and paid for, until somebody gives them up."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from ._secrets import without_secrets

logger = logging.getLogger("shardtree")

_said: set[str] = set()
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
        if bucket not in _said:
            _said.add(bucket)
            fix = "pip install 'shardtree[s3]', or let a lifecycle rule of the bucket abort incomplete uploads"
            logger.warning(
                "save: uploads of interrupted saves to %s can't be looked for without botocore: %s", url, fix
            )
        return 0
    prefix = f"{folder}/" if folder else ""
    known = {_SETTINGS.get(name.lower().removeprefix("aws_")): value for name, value in config.items()}
    given = {name: value for name, value in known.items() if name is not None}
    try:
        client = get_session().create_client("s3", **given)
        pages = client.get_paginator("list_multipart_uploads").paginate(Bucket=bucket, Prefix=prefix)
        now = datetime.now(UTC)
        found = [
            upload
            for page in pages
            for upload in page.get("Uploads", ())
            if is_left(upload["Key"].removeprefix(prefix), (now - upload["Initiated"]).total_seconds())
        ]
        for upload in found:
            client.abort_multipart_upload(Bucket=bucket, Key=upload["Key"], UploadId=upload["UploadId"])
    except Exception as error:
        # Not a failure of what is being done: the next save looks again.
        said = without_secrets(f"{type(error).__name__}: {error}", config)
        logger.warning("save: uploads of interrupted saves to %s stay open: %s", url, said)
        return 0
    return len(found)
