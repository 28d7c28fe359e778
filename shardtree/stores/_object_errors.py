"""Errors of requests to an object store: the store's message without keys, tokens and signatures, and a fix."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from ..errors import StorageError, error_text

_SECRET_NAME = re.compile(r"key|secret|token|password|credential|sas|signature|client_id", re.IGNORECASE)
_STORES = re.compile(r"(AWS|AZURE|GOOGLE|GCS|AZURITE|MSI|IDENTITY)_", re.IGNORECASE)
# Answers of stores may be long, so each of these patterns scans a text in linear time.
_URL = re.compile(r"(https?://[^\s?'\"<>]*)(\?[^\s'\"<>]*)?")
_USER = re.compile(r"(\b\w+://)[^\s/@'\"]*:[^\s/@'\"]*@")
_SIGNATURE = re.compile(
    r"(?i)\b(authorization|credential|signature|x-amz-[\w-]*|sig|se|sv|AWSAccessKeyId|bearer|token)(\s*[=:]\s*|\s+(?=[\w.-]{16}))"
    r"[^\s,;&<>'\"]+"
)
_SHORTEST = 6  # characters; shorter values may occur in ordinary words


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
    """Return a text with queries of URLs, signatures and known secrets replaced by an ellipsis.

    Args:
        text: Text to show, such as an error's.
        settings: Settings of a store. Known secrets are the values of its secret settings, and those of secret
            environment variables, such as ``AWS_SECRET_ACCESS_KEY``.

    Examples:
        >>> without_secrets("GET https://host/x?sig=abc failed for hunter2hunter2", {"secret_key": "hunter2hunter2"})
        'GET https://host/x?… failed for …'
    """
    text = _USER.sub(r"\1…@", _URL.sub(lambda url: url[1] + ("?…" if url[2] else ""), text))
    text = _SIGNATURE.sub(r"\1\2…", text)
    for secret in sorted(_secrets(settings or {}), key=len, reverse=True):
        text = text.replace(secret, "…")
    return text


def _secrets(settings: Mapping[str, Any]) -> Iterator[str]:
    values = {**settings, **{name: value for name, value in os.environ.items() if _STORES.match(name)}}
    for name, value in values.items():
        if _SECRET_NAME.search(name) and isinstance(value, str) and len(value) >= _SHORTEST:
            yield value


NO_RANGES = re.compile("non-partial response when range requested|Range request not supported")

REFUSALS = re.compile("(PermissionDenied|Unauthenticated|NotSupported|InvalidPath|FileNotFound)Error")
"""Names of errors which guarantee that the request had no effect."""


_ANSWER = re.compile(r"(<\?xml[^>]{0,200}\?>\s*)?<Error\b.*?(</Error>|\Z)", re.DOTALL)


def _in_words(answer: re.Match[str]) -> str:
    """Return the error code and the message from a store's XML answer; its other elements only identify the request."""
    parts = (re.search(f"<{name}>([^<]*)</{name}>", answer[0]) for name in ("Code", "Message"))
    return ": ".join(part[1].strip() for part in parts if part is not None) or "an answer in XML"


def request_failure(what: str, error: Exception, secrets: Mapping[str, Any]) -> StorageError:
    """Return a StorageError for a failed request, with the store's message and, for known causes, a fix.

    Args:
        what: Heading of the error.
        error: Exception of the request.
        secrets: Settings of the store; values of secret settings are left out of the message.
    """
    # The original isn't the cause: its text contains the request, and stores repeat signatures in their answers.
    answer = _ANSWER.sub(_in_words, str(error).partition("\n\nDebug source")[0])
    reason = f"{type(error).__name__}: {without_secrets(answer, secrets)}"
    fix = None
    if "NoSuchBucket" in answer:
        fix = "The bucket does not exist: correct its name in the URL, or the endpoint or region."
    elif "ExpiredToken" in answer or "expired" in answer.lower():
        fix = "The credentials have expired: renew them, or pass a credential_provider to object_storage."
    elif "allow_http" in answer or "URL scheme is not allowed" in answer:
        fix = 'Allow plain http: set AWS_ALLOW_HTTP=true, or pass client_options={"allow_http": True}.'
    elif NO_RANGES.search(answer):
        fix = "The server does not support Range requests: copy the checkpoint, or use another server."
    return StorageError(error_text(what, found=reason, fix=fix))


_first_process: list[int] = []  # the first process that made a request, among this one and its ancestors by fork


def check_process(url: str) -> None:
    """Raise if this process was forked from a process that had used an object store: its requests would hang."""
    # A forked child lacks the threads that obstore waits for, so its requests would hang.
    if not _first_process:
        _first_process.append(os.getpid())
    if _first_process[0] != os.getpid():
        fix = "Start processes by 'spawn' or 'forkserver', or use object stores only after the fork."
        heading = f"cannot reach {url!r} in a process forked from one that used an object store"
        raise StorageError(error_text(heading, fix=fix))
