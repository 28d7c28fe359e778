"""Errors of requests to an object store: in the store's own words, without secrets, and with what to do."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from ..errors import StorageError, error_text
from ._secrets import without_secrets

NO_RANGES = re.compile("non-partial response when range requested|Range request not supported")

REFUSALS = re.compile("(PermissionDenied|Unauthenticated|NotSupported|InvalidPath|FileNotFound)Error")
"""Errors that say that nothing was done."""


_ANSWER = re.compile(r"(<\?xml[^>]*\?>\s*)?<Error\b.*?(</Error>|\Z)", re.DOTALL)


def _in_words(answer: re.Match[str]) -> str:
    """Return what a store's XML says: its code and its message; the rest are numbers of the request."""
    parts = (re.search(f"<{name}>(.*?)</{name}>", answer[0], re.DOTALL) for name in ("Code", "Message"))
    return ": ".join(part[1].strip() for part in parts if part is not None) or "an answer in XML"


def request_failure(what: str, error: Exception, secrets: Mapping[str, Any]) -> StorageError:
    """Return the error for a request that failed, with the store's own words but for secrets."""
    # Not as the cause: its text holds what was sent, and stores repeat signatures in what they answer.
    said = _ANSWER.sub(_in_words, str(error).partition("\n\nDebug source")[0])
    found = f"{type(error).__name__}: {without_secrets(said, secrets)}"
    fix = None
    if "NoSuchBucket" in said:
        fix = "There is no such bucket: correct its name in the URL, or the endpoint and region that are asked."
    elif "ExpiredToken" in said or "expired" in said.lower():
        fix = "The credentials have expired: renew them, or pass a credential_provider to object_storage."
    elif "allow_http" in said or "URL scheme is not allowed" in said:
        fix = 'Plain http has to be allowed: AWS_ALLOW_HTTP=true, or client_options={"allow_http": True}.'
    elif NO_RANGES.search(said):
        fix = "The server doesn't honour Range requests; copy the checkpoint, or serve it by another one."
    return StorageError(error_text(what, found=found, fix=fix))


_first_process: list[int] = []  # that made a request, of this one and those that it was forked from


def check_process(url: str) -> None:
    """Raise in a process that was forked from one that has used an object store."""
    # A forked child has none of the threads on which obstore waits: its requests would wait for ever.
    if not _first_process:
        _first_process.append(os.getpid())
    if _first_process[0] != os.getpid():
        fix = "Start processes by 'spawn' or 'forkserver', or let no process use an object store before it is forked."
        raise StorageError(error_text(f"{url!r} can't be reached: this process was forked from one that did", fix=fix))
