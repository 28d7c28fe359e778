"""The warm process that saves, one for all tests here."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults.warm_saver import HAS_STRACE, Saver, warm_saver


@pytest.fixture(scope="session")
def saver() -> Iterator[Saver]:
    with warm_saver() as ask:
        yield ask


@pytest.fixture
def strace() -> None:
    if not HAS_STRACE:
        pytest.skip("NO SYSTEM CALL IS KILLED OR REFUSED: strace is not here (apt-get install strace)")
