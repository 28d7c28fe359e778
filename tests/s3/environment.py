"""A bucket on a server of this process, named by the usual variables of the environment."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest

from shardtree.stores import object_storage
from tests.s3.server import Server, serving

KEY, SECRET, TOKEN = "AKIAPLANTEDKEY000001", "planted/secret+access+key+of+40+letters", "planted-session-token"
ROOT = "s3://bucket/runs"
QUICK = {"backoff": {"init_backoff": timedelta(milliseconds=1), "max_backoff": timedelta(milliseconds=4), "base": 2}}


@contextmanager
def s3(monkeypatch: pytest.MonkeyPatch, server: Server | None = None) -> Iterator[Server]:
    """Run a server, and let ``s3://bucket`` be its bucket."""
    with serving(server) as running:
        monkeypatch.setenv("AWS_ENDPOINT_URL", running.url)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        monkeypatch.setenv("AWS_SESSION_TOKEN", TOKEN)
        monkeypatch.setenv("AWS_REGION", "us-east-1")
        yield running


def at(path: str = "", *, retries: int = 3) -> Any:
    """Return a storage under `ROOT`, whose failed requests are repeated so many times, at once."""
    url = f"{ROOT}/{path}" if path else ROOT
    return object_storage(url, retry_config={**QUICK, "max_retries": retries})
