"""Names within a storage: a plain one is seen at a glance, and is what taking it apart gives."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardtree.errors import StorageError
from shardtree.shell.storage import _storage
from shardtree.shell.storage._storage import inside
from tests.core.trees.samples import assert_caught

Inside = Callable[[str, str], str]

# Any text, and such as is made of what matters in a name.
NAMES = (
    st.text()
    | st.text("aB7_-./\n\0 ~\\é٣\ud800")
    | st.lists(st.sampled_from(["", ".", "..", "a", "b.c", ".d", "-", "٣"]), max_size=5).map("/".join)
)


def outcome(take: Inside, name: str) -> tuple[bool, str]:
    try:
        return True, take(name, "root")
    except StorageError as error:
        return False, str(error)


def taken_apart(name: str, root: str) -> str:
    """Return what `inside` does where it doesn't know any name at a glance."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_storage, "_PLAIN", re.compile(r"(?!)"))
        return inside(name, root)


def is_as_taken_apart(take: Inside, name: str) -> None:
    assert outcome(take, name) == outcome(taken_apart, name)


@settings(max_examples=300)
@given(NAMES)
def test_a_name_seen_at_a_glance_is_as_taken_apart(name: str) -> None:
    is_as_taken_apart(inside, name)


@pytest.mark.parametrize("glance", [r"[\w./-]+", r"(?s:[^/.].*)", r"(?:[\w.-]+/)*[\w.-]+"])
def test_the_law_catches_a_glance_that_overlooks_dots_and_slashes(glance: str) -> None:
    def hasty(name: str, root: str) -> str:
        return name if re.fullmatch(glance, name) else inside(name, root)

    assert_caught(is_as_taken_apart, hasty, NAMES)


@pytest.mark.parametrize("name", ["", "w.safetensors", "save-1/00000-of-00002.safetensors", "a/b/c_d", "a..b", "-/0"])
def test_names_that_are_seen_at_a_glance(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_storage, "PurePosixPath", None)
    assert inside(name, "root") == name
