"""What is stored in a dtype that torch lacks is said to be there and unreadable, wherever it is asked for."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from typing import Any

import pytest
import torch

import shardtree as st
from shardtree.errors import KeyMismatch, UnsupportedValue
from shardtree.storage import MemoryStorage

WHY = r"'q': dtype: torch \S+ has no dtype for the safetensors tag 'F6_E2M3'"


@pytest.fixture
def folder() -> MemoryStorage:
    entry = {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [4, 7]}
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, "q": entry}).encode()
    storage = MemoryStorage()
    storage.write("model.safetensors", [struct.pack("<Q", len(header)), header, bytes(7)], durable=False)
    return storage


ASKED = {"q": st.ShardedTensor.from_rank_offsets("q", torch.zeros(4))}


@pytest.mark.parametrize(
    "ask",
    [
        lambda folder: st.open_checkpoint(folder)["q"],
        lambda folder: st.open_checkpoint(folder).stored_layout("w", "q"),
        lambda folder: st.load(ASKED, folder),
    ],
)
def test_it_is_said_to_be_unreadable(ask: Callable[[Any], Any], folder: MemoryStorage) -> None:
    with pytest.raises(UnsupportedValue, match=f"some tensors cannot be read\n  {WHY}"):
        ask(folder)


def test_it_is_no_key_of_the_mapping_and_other_names_are_unknown(folder: MemoryStorage) -> None:
    tree = st.open_checkpoint(folder)
    assert list(tree) == ["w"] and "q" not in tree and "w" in tree and tree.get("zz") is None
    assert tree.get("q", 5) == 5  # as of any mapping without the key
    with pytest.raises(KeyMismatch, match="the checkpoint has no key 'zz'"):
        tree["zz"]


@pytest.mark.parametrize("strict", ["raise_unexpected", "raise_all"])
def test_modes_that_compare_keys_say_why(strict: str, folder: MemoryStorage, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(KeyMismatch, match=rf"unexpected \(asked for, cannot be read\): {WHY}") as caught:
        st.load(ASKED, folder, strict=strict)
    assert caught.value.unexpected == ("q",)
    explained = st.explain(ASKED, folder, strict=strict)
    assert not explained.ok and "'q': cannot be read" in str(explained)
    assert st.load(ASKED, folder, strict="log_unexpected") == {}
    assert "asked for, cannot be read" in caplog.text and "not stored" not in caplog.text
