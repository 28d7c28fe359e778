"""Storage through fsspec: what it says of itself, and caches before it."""

from __future__ import annotations

from uuid import uuid4

import pytest

import shardtree as st
from shardtree.shell.table import _save_folders
from tests.s3.jobs import tree, value_of

pytest.importorskip("fsspec")


def test_it_says_once_that_one_saver_may_save_at_a_time(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_save_folders, "_warned_places", set())
    for _ in range(2):
        st.save(tree(1.0), f"memory://{uuid4().hex}")
    assert len([each for each in caplog.messages if "run only one save to a folder at a time" in each]) == 1


def test_a_cache_before_a_store_shows_what_was_saved_over() -> None:
    """metadata.json is read around it, and the other files of our own format never change."""
    place = f"memory://{uuid4().hex}"
    for value in (1.0, 2.0):
        st.save(tree(value), place, overwrite=True)
        assert value_of(f"simplecache::{place}") == value
