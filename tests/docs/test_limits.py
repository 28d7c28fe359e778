"""docs/performance.md lists every limit of `core/limits.py`, with its size."""

from __future__ import annotations

import re
from pathlib import Path

from shardtree.core import limits

PAGE = (Path(__file__).parents[2] / "docs" / "performance.md").read_text()
LIMITS = {name: value for name, value in vars(limits).items() if name.endswith("_BYTES")}


def listed(page: str) -> dict[str, int]:
    """Return the limits that a page lists, in bytes."""
    return {name: int(size) * 2**20 for name, size in re.findall(r"`(\w+_BYTES)`, (\d+) MiB", page)}


def test_the_page_lists_the_limits() -> None:
    assert listed(PAGE) == LIMITS


def test_another_size_is_found() -> None:
    """Planted: a page that promises half of what an upload takes."""
    assert listed(PAGE.replace("40 MiB", "20 MiB")) != LIMITS


def test_the_module_says_what_a_save_and_a_load_may_hold() -> None:
    assert limits.__doc__ is not None
    named = set(re.findall(r"`(\w+_BYTES)`", limits.__doc__))
    assert named <= LIMITS.keys()
    assert {"COPIED_BYTES", "UPLOAD_BYTES", "WINDOW_BYTES", "IN_FLIGHT_BYTES", "STAGED_BYTES", "CAST_BYTES"} <= named
