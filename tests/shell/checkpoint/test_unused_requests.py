"""A request that nobody schedules, runs or abandons says so when it is collected, and leaves the folder as it is."""

from __future__ import annotations

import gc
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shardtree
from shardtree.storage import MemoryStorage
from tests.options import save_keywords
from tests.shell.checkpoint.parts import ALL_FORMATS

TREE = {"w": shardtree.ShardedTensor.from_rank_offsets("w", torch.arange(4.0))}
ACTS = st.lists(st.sampled_from(["copy", "drop", "run", "abandon", "schedule"]), max_size=6)
USES = {"run", "abandon", "schedule"}


def requested(folder: Any, **options: Any) -> Any:
    return shardtree.save(TREE, folder, async_sharded_save=True, **save_keywords(**options))


def warnings_of(acts: list[str]) -> list[str]:
    """Do this with a request and its copies, drop all that is left, and return what was warned of."""
    with warnings.catch_warnings(record=True) as caught, shardtree.AsyncCallsQueue() as queue:
        warnings.simplefilter("always")
        copies, is_used = [requested(MemoryStorage())], False
        for act in acts:
            if not copies or (is_used and act in USES):
                continue  # a save is run once
            if act == "copy":
                copies.append(copies[0].add_finalize_fn(lambda: None))
            elif act == "drop":
                copies.pop(0)
            elif act == "schedule":
                queue.schedule_async_request(copies[-1].add_finalize_fn(lambda: None))
            else:
                copies[-1].execute_sync() if act == "run" else copies[-1].abandon()
            is_used = is_used or act in USES
        copies.clear()
        gc.collect()
    return [str(one.message) for one in caught if one.category is ResourceWarning]


def warns_once_if_unused(warned: Any, acts: list[str]) -> None:
    begun = [act for act in acts if act in USES]
    copies = 1
    for act in acts:  # what comes after the last copy was dropped isn't done
        if act in USES:
            break
        copies += {"copy": 1, "drop": -1}[act]
        if not copies:
            begun = []
            break
    assert len(warned(acts)) == (0 if begun else 1)


@pytest.mark.slow
@given(ACTS)
def test_only_the_last_copy_that_goes_unused_warns(acts: list[str]) -> None:
    warns_once_if_unused(warnings_of, acts)


@pytest.mark.slow
def test_the_law_of_requests_catches_a_copy_with_a_warning_of_its_own() -> None:
    with pytest.raises(AssertionError):
        warns_once_if_unused(lambda acts: warnings_of(acts) * 2, ["copy"])
    with pytest.raises(AssertionError):
        warns_once_if_unused(lambda acts: warnings_of([]), ["run"])


def dropped(folder: Any) -> None:
    requested(folder)
    gc.collect()


def test_it_names_the_folder_and_removes_nothing(tmp_path: Any) -> None:
    with pytest.warns(ResourceWarning, match=f"{tmp_path}.*was never begun"):
        dropped(tmp_path)
    left = {path.name for path in tmp_path.iterdir()}
    shardtree.save(TREE, tmp_path)
    assert left and not left & {path.name for path in tmp_path.iterdir()}


@pytest.mark.parametrize("backend", ALL_FORMATS)
def test_an_abandoned_request_leaves_nothing(backend: Any) -> None:
    folder = MemoryStorage()
    requested(folder, sharded_strategy=backend).abandon()
    assert folder.names() == ()
