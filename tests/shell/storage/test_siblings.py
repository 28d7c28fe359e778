"""A folder beside another one is a place: one for all that know its name, before it is made and after it is gone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from shardtree.storage import LocalStorage, MemoryStorage, Sibling
from shardtree.stores._memory import MemorySibling

PLACES: dict[str, Callable[[Path], LocalStorage | MemoryStorage]] = {
    "local": lambda folder: LocalStorage(str(folder / "step_10")),
    "memory": lambda folder: MemoryStorage(),
}


def is_one_place(beside: Callable[[], Sibling]) -> bool:
    """Return whether what one sibling stores is seen by another of its name, and gone when it was removed."""
    one, other = beside(), beside()
    early = other.storage
    one.make(b"note", durable=False)
    one.storage.replace("new", b"1", durable=False)
    seen = early.length("new") == other.storage.length("new") == 1 and other.note() == b"note"
    one.remove()
    gone = early.length("new") is None and other.note() is None
    other.make(b"again", durable=False)
    early.replace("newer", b"12", durable=False)
    return seen and gone and one.storage.names() == ("newer",)


@pytest.mark.parametrize("kind", PLACES)
def test_siblings_of_one_name_are_one_place(kind: str, tmp_path: Path) -> None:
    folder = PLACES[kind](tmp_path)
    folder.make_folder()
    assert is_one_place(lambda: folder.sibling("save-1"))
    assert folder.siblings() == ("save-1",)


def test_the_law_catches_a_place_for_each() -> None:
    assert not is_one_place(lambda: MemorySibling(MemoryStorage(), "save-1"))


def test_a_name_that_is_only_looked_at_is_no_folder_and_leaves_nothing() -> None:
    storage = MemoryStorage()
    storage.sibling("save-1")
    assert storage.siblings() == () and not storage._siblings
