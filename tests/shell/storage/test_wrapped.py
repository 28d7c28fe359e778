"""A storage around another one: nothing goes past the calls that it does in another way, and wrong names are errors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import shardtree as st
from shardtree.errors import StorageError
from shardtree.shell.storage import Buffer, can, folder_in
from shardtree.storage import BytesReader, LocalStorage, MemoryStorage, Reader, Storage, wrapped
from shardtree.testing import watched

FIXED_NAMES = ["zarr", "dcp", "torch_dist", "huggingface"]


def turned(data: Buffer | bytes) -> bytes:
    return bytes(byte ^ 0x5A for byte in bytes(data))


def secret(inner: Storage, **more: Any) -> Any:
    """Return a storage whose files have other bytes in `inner`: what went past it would be read as nonsense."""

    def write(name: str, buffers: Iterable[Buffer], *, durable: bool) -> int:
        return inner.write(name, [memoryview(turned(b"".join(buffers)))], durable=durable)

    def replace(name: str, data: bytes, *, durable: bool) -> None:
        inner.replace(name, turned(data), durable=durable)

    @contextmanager
    def opened(name: str) -> Iterator[Reader]:
        with inner.open(name) as reader:
            yield BytesReader(memoryview(turned(reader.read())), name)

    calls = {"write": write, "replace": replace, "read": lambda name: turned(inner.read(name)), "open": opened}
    return wrapped(inner, **calls, write_parts=None, **more)


def tree(value: float) -> dict[str, Any]:
    return {"w": st.ShardedTensor.from_rank_offsets("w", torch.full((4,), value))}


def places(tmp_path: Path) -> list[Storage]:
    return [LocalStorage(str(tmp_path / "step_10")), MemoryStorage()]


@pytest.mark.parametrize("form", ["safetensors", *FIXED_NAMES])
def test_no_save_goes_past_a_wrapper(form: str, tmp_path: Path) -> None:
    for inner in places(tmp_path):
        storage = secret(inner)
        st.save(tree(1.0), storage, form)
        try:
            st.save(tree(2.0), storage, form, overwrite=True)
            found = 2.0
        except st.errors.StrategyError as error:
            assert form in FIXED_NAMES and "cannot exchange two folders" in str(error)
            found = 1.0  # and the old one is still the wrapper's user's
        assert st.load_plain_tensors(storage)["w"].tolist() == [found] * 4


def test_the_law_catches_a_wrapper_that_passes_the_sibling_on(tmp_path: Path) -> None:
    for inner in places(tmp_path):
        storage = secret(inner, sibling=can(inner).sibling, siblings=can(inner).siblings)
        st.save(tree(1.0), storage, "dcp")
        st.save(tree(2.0), storage, "dcp", overwrite=True)
        with pytest.raises(st.CheckpointingException):
            st.load_plain_tensors(storage)


def test_what_makes_other_storages_is_not_passed_on() -> None:
    inner = MemoryStorage()
    lacks = [can(each) for each in (wrapped(inner), folder_in(wrapped(inner), "a"), wrapped(LocalStorage("/runs")))]
    assert [(each.folder, each.sibling, each.siblings) for each in lacks] == [(None, None, None)] * 3
    assert can(watched(inner)).sibling is not None  # which wraps what it makes
    st.save(tree(1.0), watched(inner), "dcp")
    st.save(tree(2.0), watched(inner), "dcp", overwrite=True)
    assert st.load_plain_tensors(inner)["w"].tolist() == [2.0] * 4


def test_a_replaced_checkpoint_is_noticed_through_a_wrapper() -> None:
    inner = MemoryStorage()
    st.save(tree(1.0), inner, "dcp")
    opened = st.open_checkpoint(wrapped(inner))
    st.save(tree(2.0), inner, "dcp", overwrite=True)
    with pytest.raises(st.errors.CheckpointReplaced):
        opened["w"].data.read()


@pytest.mark.parametrize(
    ("calls", "offender"),
    [
        ({"write": None}, "write: None, which only a capability may be"),
        ({"read": None, "move": None}, "read: None, which only a capability may be"),
        ({"wirte": print}, "wirte: not a method of Storage"),
    ],
)
def test_calls_that_no_storage_has_or_all_need_are_refused(calls: dict[str, Any], offender: str) -> None:
    with pytest.raises(StorageError, match=offender):
        wrapped(MemoryStorage(), **calls)
