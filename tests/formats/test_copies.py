"""Copies that several ranks' files have of a tensor: compared when it is read, by one rank for all."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

import shardtree as st
from shardtree.errors import UnsupportedValue
from shardtree.formats.rank_archives import _copies
from shardtree.storage import MemoryStorage
from tests.core.trees.samples import assert_caught
from tests.shell.table import folders
from tests.shell.table.folders import archive

LENGTH = 6


def folder_of(changed: Sequence[bool], files: int = 3) -> MemoryStorage:
    """Return a folder whose ranks have copies of tensors, of which some are others in the last file.

    Each lies in a storage with more in it, that of each file: so no checksum says that they are equal.
    """
    storage = MemoryStorage()
    for rank in range(files):
        state: dict[str, Any] = {}
        for number, is_changed in enumerate(changed):
            whole = torch.full((LENGTH + 1,), rank)
            whole[:LENGTH] = number + (is_changed and rank == files - 1)
            state[f"w{number}"] = whole[:LENGTH]
        storage.replace(f"model_world_size_{files}_rank_{rank}.pt", archive(state), durable=False)
    return storage


def refused(folder: MemoryStorage, ranks: int, **how: Any) -> set[str]:
    """Return the tensors that a load by some ranks refuses."""

    def load(world: Any) -> Any:
        target = st.load_tensors_metadata(folder, options=st.LoadOptions(verify=None))
        return st.load(target, folder, world=world, validate_access_integrity=False, **how)

    try:
        st.simulate(ranks, load)
    except Exception as error:
        return set(re.findall(r"'(w\d+)': .*different copies", str(error)))
    return set()


def finds_what_differs(compared: Any, changed: list[bool], ranks: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_copies, "_differing", compared)
        found = refused(folder_of(changed), ranks)
    assert found == {f"w{number}" for number, is_changed in enumerate(changed) if is_changed}


CASES = some.lists(some.booleans(), max_size=4), some.integers(1, 4)


@given(*CASES)
def test_each_rank_compares_its_share_and_all_know_what_differs(changed: list[bool], ranks: int) -> None:
    finds_what_differs(_copies._differing, changed, ranks)


def test_the_law_catches_a_share_that_nobody_compares() -> None:
    whole = _copies._differing

    def without_last(checkpoint: Any, copies: Any, share: int, shares: int) -> Any:
        return whole(checkpoint, copies, share, shares) if share + 1 < shares else []

    assert_caught(finds_what_differs, without_last, *CASES)


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the files of the copies that were read, one for each comparison."""
    read, original = list[str](), _copies.same_elements

    def same(checkpoint: Any, one: Any, other: Any) -> bool:
        read.append(other.file)
        return original(checkpoint, one, other)

    monkeypatch.setattr(_copies, "same_elements", same)
    return read


def test_ranks_read_each_copy_once(compared: list[str]) -> None:
    assert refused(folder_of([False] * 4), 3) == set()
    assert sorted(compared) == [f"model_world_size_3_rank_{rank}.pt" for rank in (1, 2) for _ in range(4)]


def test_opening_compares_nothing_and_a_read_what_is_asked_for(compared: list[str]) -> None:
    opened = st.open_checkpoint(folder_of([False, True, False]))
    assert (len(opened), compared) == (3, [])
    assert opened["w2"].data.read().tolist() == [2] * LENGTH
    assert len(compared) == 2
    with pytest.raises(UnsupportedValue, match=r"'w1': .*rank_2.pt' and .*rank_0.pt' have different copies"):
        opened["w1"].data.read()
    opened["w2"].data.read()
    assert len(compared) == 4


def test_the_first_copy_that_differs_is_named_and_verify_finds_it() -> None:
    (damage,) = st.verify(folder_of([False, True]), report=lambda found: None)
    assert damage.keys == ("w1",)


def test_without_verification_nothing_is_compared(compared: list[str]) -> None:
    assert refused(folder_of([True]), 2, options=st.LoadOptions(verify=None)) == set()
    assert compared == []


def test_equal_checksums_are_enough(compared: list[str]) -> None:
    data = archive({"w": torch.arange(4)})
    storage = folders.folder_of({f"model_world_size_2_rank_{rank}.pt": data for rank in range(2)})
    assert st.load_plain_tensors(storage)["w"].tolist() == [0, 1, 2, 3]
    assert compared == []


def test_copies_of_one_element_may_have_other_strides() -> None:
    for other, differing in ((0, set()), (1, {"w0"})):
        storage = MemoryStorage()
        for rank, view in enumerate((torch.zeros(3)[:1], torch.full((3,), float(other))[::2][:1])):
            storage.replace(f"model_world_size_2_rank_{rank}.pt", archive({"w0": view}), durable=False)
        assert refused(storage, 2) == differing
