"""What several tests of this room stand on."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def little_to_collect() -> Iterator[None]:
    """Leave what other tests' imports have made out of each collection: it takes half a second beside the peers."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
