"""The storage behind a URL: obstore's if it supports the URL, else a file system of fsspec."""

from __future__ import annotations

from importlib.util import find_spec
from urllib.parse import urlsplit

from ..errors import StorageError, error_text
from ..kit import Storage
from ._fsspec import fsspec_storage
from ._object_errors import without_secrets
from ._object_url import SCHEMES, object_storage


def storage_behind(url: str) -> Storage:
    """Return the storage of the folder at a URL, opened by obstore or fsspec.

    Args:
        url: URL ``scheme://path``; its scheme decides which library opens it.

    Raises:
        StorageError: the URL is invalid, or the library for its scheme isn't installed or can't use it.

    Examples:
        >>> storage_behind("memory://runs/step_10").where()
        'memory://runs/step_10'
    """
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise StorageError(error_text(f"not a URL: {without_secrets(url)!r}", found=str(error))) from None
    # obstore can't send a signed URL's query with every request, so such URLs go to fsspec.
    if parts.scheme in SCHEMES and not parts.query and find_spec("obstore") is not None:
        return object_storage(url)
    return fsspec_storage(url)
