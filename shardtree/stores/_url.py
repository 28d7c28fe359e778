"""The storage behind a URL: an object store's where obstore takes it, else a file system of fsspec."""

from __future__ import annotations

from importlib.util import find_spec
from urllib.parse import urlsplit

from ..errors import StorageError, error_text
from ..kit import Storage
from ._fsspec import fsspec_storage
from ._object_errors import without_secrets
from ._object_url import SCHEMES, object_storage


def storage_behind(url: str) -> Storage:
    """Return the storage behind a URL.

    Args:
        url: ``scheme://path``; the scheme decides who opens it.

    Raises:
        StorageError: it isn't a URL, or what its scheme needs isn't installed or can't use it.

    Examples:
        >>> storage_behind("memory://runs/step_10").where()
        'memory://runs/step_10'
    """
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise StorageError(error_text(f"not a URL: {without_secrets(url)!r}", found=str(error))) from None
    # A signed URL's query goes with every request, which obstore can't do.
    if parts.scheme in SCHEMES and not parts.query and find_spec("obstore") is not None:
        return object_storage(url)
    return fsspec_storage(url)
