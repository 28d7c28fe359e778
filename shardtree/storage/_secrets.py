"""Texts without secrets: what a store answers, and URLs, may hold keys, tokens and signatures."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit, urlunsplit

_SECRET_NAME = re.compile(r"key|secret|token|password|credential|sas|signature|client_id", re.IGNORECASE)
_STORES = re.compile(r"(AWS|AZURE|GOOGLE|GCS|AZURITE|MSI|IDENTITY)_", re.IGNORECASE)
_QUERY = re.compile(r"(https?://[^\s?'\"<>]*)\?[^\s'\"<>]*")
_USER = re.compile(r"(\w+://)[^\s/@'\"]*:[^\s/@'\"]*@")
_SIGNED = re.compile(
    r"(?i)\b(authorization|credential|signature|x-amz-[\w-]*|sig|se|sv|AWSAccessKeyId|bearer|token)(\s*[=:]\s*|\s+(?=[\w.-]{16}))"
    r"[^\s,;&<>'\"]+"
)
_SHORTEST = 6  # characters; a shorter value would turn up in words


def plain_url(url: str) -> str:
    """Return a URL without user, password, query and fragment.

    Examples:
        >>> plain_url("https://me:secret@host/model.safetensors?X-Amz-Signature=abc")
        'https://host/model.safetensors'
        >>> plain_url("abfss://container@account.dfs.core.windows.net/runs")
        'abfss://container@account.dfs.core.windows.net/runs'
    """
    parts = urlsplit(url)
    user, _, host = parts.netloc.rpartition("@")
    return urlunsplit((parts.scheme, parts.netloc if ":" not in user else host, parts.path, "", ""))


def without_secrets(text: str, settings: Mapping[str, Any] | None = None) -> str:
    """Return a text in which queries of URLs, signatures and known secrets are replaced by an ellipsis.

    Args:
        text: an error's, say.
        settings: of a store; the values of those that are secrets are replaced, as are those in the environment.

    Examples:
        >>> without_secrets("GET https://host/x?sig=abc failed for hunter2hunter2", {"secret_key": "hunter2hunter2"})
        'GET https://host/x?… failed for …'
    """
    text = _USER.sub(r"\1…@", _QUERY.sub(r"\1?…", text))
    text = _SIGNED.sub(r"\1\2…", text)
    for secret in sorted(_secrets(settings or {}), key=len, reverse=True):
        text = text.replace(secret, "…")
    return text


def _secrets(settings: Mapping[str, Any]) -> Iterator[str]:
    known = {**settings, **{name: value for name, value in os.environ.items() if _STORES.match(name)}}
    for name, value in known.items():
        if _SECRET_NAME.search(name) and isinstance(value, str) and len(value) >= _SHORTEST:
            yield value
