"""A server of S3 whose clients don't wait long before they ask again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shardtree.stores import _object_store
from tests.s3.environment import s3
from tests.s3.server import Server


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(_object_store, "_FIRST_PAUSE", 0.001)
    with s3(monkeypatch) as running:
        yield running
