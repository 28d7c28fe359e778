"""Object stores by URL, with settings from the environment: S3, Google Cloud Storage, Azure, HTTP."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from os import environ
from typing import Any
from urllib.parse import urlsplit

from ..errors import StorageError, error_text
from ..kit import Storage
from ._object_errors import plain_url, without_secrets
from ._object_store import ObjectStorage

SCHEMES = frozenset({"s3", "s3a", "gs", "az", "adl", "abfs", "abfss", "azure", "http", "https"})
"""Schemes of URLs that obstore opens if it is installed; fsspec opens all others."""


def object_storage(
    url: str,
    *,
    config: Mapping[str, Any] | None = None,
    client_options: Mapping[str, Any] | None = None,
    retry_config: Mapping[str, Any] | None = None,
    credential_provider: Any = None,
) -> Storage:
    """Return the storage of the folder at a URL of an object store or web server, through obstore.

    Settings that aren't passed come from the environment, by the stores' usual names: ``AWS_ENDPOINT_URL``,
    ``AWS_ACCESS_KEY_ID``, ``AWS_REGION``, ``GOOGLE_SERVICE_ACCOUNT``, ``AZURE_STORAGE_ACCOUNT_NAME`` and so on. For
    S3 without `config`, if the environment has no credentials and boto3 is installed, boto3's profiles are used.

    Args:
        url: URL of a folder: ``s3://bucket/path``, ``gs://…``, ``az://…``, ``abfss://…``, ``https://…``.
        config: Settings of the store, by obstore's names: ``{"endpoint": …, "region": …}``.
        client_options: Options of the HTTP client: ``{"timeout": "60s", "allow_http": True}``.
        retry_config: Policy of retries: ``{"max_retries": 10, "retry_timeout": timedelta(minutes=3)}``.
        credential_provider: Function that returns expiring credentials, as obstore describes it.

    Raises:
        StorageError: obstore isn't installed, or doesn't support the URL or a setting.

    Examples:
        >>> object_storage("s3://runs/step_10", config={"region": "eu-central-1", "skip_signature": True})
        ObjectStorage(url='s3://runs/step_10')
    """
    parts = urlsplit(url)
    web = parts.scheme in ("http", "https")
    if parts.scheme not in SCHEMES or not parts.netloc or (web and parts.query):
        heading = f"{plain_url(url)!r} is not a URL that obstore supports"
        raise StorageError(error_text(heading, expected="s3://bucket/path, gs://, az://, or https:// without a query"))
    settings = {"config": config, "client_options": client_options, "retry_config": retry_config}
    if credential_provider is None and parts.scheme in ("s3", "s3a") and config is None:
        credential_provider = _profile_credentials()
    try:
        pair = _shared_stores(f"{parts.scheme}://{parts.netloc}", settings, credential_provider)
    except ImportError as error:
        fix = "pip install 'shardtree[remote]'"
        raise StorageError(error_text(f"{plain_url(url)!r} needs obstore, which is not installed", fix=fix)) from error
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":  # raised by Rust code
            raise
        reason = without_secrets(str(error), config)
        raise StorageError(error_text(f"cannot open the object store of {plain_url(url)!r}", found=reason)) from None
    return ObjectStorage(plain_url(url).rstrip("/"), parts.path.strip("/"), *pair, dict(config or {}))


Stores = tuple[Any, Any]
"""obstore's store of a bucket, and another one without retries."""

_cache: dict[Any, Stores] = {}
_MOST_CACHED = 64


def _shared_stores(base: str, settings: Mapping[str, Mapping[str, Any] | None], credential_provider: Any) -> Stores:
    """Return a bucket's store, and another one without retries.

    They are memoised by their settings, since stores keep connections open; but not with a credential provider.
    """
    # A forked child lacks the threads that obstore's connections need, so it makes its own stores.
    variables = sorted((name, value) for name, value in environ.items() if name.startswith(_PREFIXES))
    key = (os.getpid(), base, repr(settings), tuple(variables))
    if credential_provider is not None:
        return _stores(base, settings, credential_provider)
    if key not in _cache:
        if len(_cache) >= _MOST_CACHED:
            _cache.clear()
        _cache[key] = _stores(base, settings, None)
    return _cache[key]


_PREFIXES = ("AWS_", "AZURE_", "AZURITE_", "GOOGLE_", "GCS_", "HTTP_", "HTTPS_", "http_", "https_")


def _stores(base: str, settings: Mapping[str, Mapping[str, Any] | None], credential_provider: Any) -> Stores:
    from obstore.store import HTTPStore, from_url

    scheme = base.partition(":")[0]
    web, config = scheme in ("http", "https"), settings["config"] or {}
    options: dict[str, Any] = {} if web else {"config": dict(config)}
    if credential_provider is not None:
        options["credential_provider"] = credential_provider
    plain = scheme == "http" or _names_plain_http(config)
    client = {**({"allow_http": True} if plain else {}), **(settings["client_options"] or {})}
    retries = {"max_retries": 10, "retry_timeout": timedelta(minutes=3), **(settings["retry_config"] or {})}
    make: Any = HTTPStore.from_url if web else from_url
    pair = (
        make(base, client_options=client, retry_config=policy, **options)
        for policy in (retries, {**retries, "max_retries": 0})
    )
    return next(pair), next(pair)


_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AZURE_STORAGE_ENDPOINT", "GOOGLE_BASE_URL")


def _names_plain_http(config: Mapping[str, Any]) -> bool:
    """Return whether the settings or the environment name an http:// endpoint, which implies `allow_http`."""
    endpoints = (
        value for name, value in config.items() if name.lower().endswith(("endpoint", "endpoint_url", "base_url"))
    )
    endpoint = next(filter(None, (*endpoints, *(environ.get(name) for name in _ENDPOINTS))), "")
    return str(endpoint).startswith("http://")


def _profile_credentials() -> Any:
    """Return a provider of credentials from boto3's profiles; None if there are none, or the environment has some."""
    if {"AWS_ACCESS_KEY_ID", "AWS_SKIP_SIGNATURE", "AWS_WEB_IDENTITY_TOKEN_FILE"} & environ.keys():
        return None
    try:
        from boto3 import Session
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError:
        return None
    session = Session()
    return Boto3CredentialProvider(session) if session.get_credentials() is not None else None


def in_larger_requests(storage: Storage) -> Storage:
    """Return a storage with requests twice as long for long files, for callers that have the memory.

    Only object stores have such a setting; other storages are returned unchanged.
    """
    return replace(storage, request_scale=2) if isinstance(storage, ObjectStorage) else storage
