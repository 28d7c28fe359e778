"""What saves do alike in every format: refusals, failures, retries, progress, keys, and a native common state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import shardtree as st
from shardtree.errors import CheckpointingException, IntegrityError, ShapeError, StorageError
from shardtree.shell.table import formats_with
from shardtree.storage import MemoryStorage
from shardtree.strategies import StrategyAction
from shardtree.testing import Call, watched

Format = tuple[str, int]
FORMATS = formats_with(StrategyAction.SAVE_SHARDED)
in_every_format = pytest.mark.parametrize("backend", FORMATS, ids=lambda backend: str(backend[0]))
with_objects = pytest.mark.parametrize("backend", [each for each in FORMATS if each[0] != "huggingface"], ids=str)
whole = st.ShardedTensor.from_rank_offsets


def tree(backend: Format, rank: int = 0, ranks: int = 1) -> dict[str, Any]:
    rows = torch.arange(200.0).view(20, 10).chunk(ranks)[rank]
    plain = {} if backend[0] == "huggingface" else {"step": 7}
    return {"w": whole("w", rows, (0, rank, ranks)), "norm": whole("norm", torch.ones(3), replica_id=rank), **plain}


def is_there(storage: Any) -> bool:
    return st.is_checkpoint(storage) and st.load_plain_tensors(storage)["w"].sum() == 19_900


@in_every_format
def test_progress_tells_every_byte_of_tensors(backend: Format) -> None:
    told: list[int] = []
    st.save(tree(backend), MemoryStorage(), backend, options=st.SaveOptions(progress=told.append))
    assert sum(told) >= 203 * 4


@in_every_format
def test_a_tensor_that_changes_while_it_waits_is_named(backend: Format) -> None:
    weight, storage = torch.zeros(2, 3), MemoryStorage()
    options = st.SaveOptions(snapshot=False)
    request = st.save([whole("w", weight)], storage, backend, async_sharded_save=True, options=options)
    weight.t_()
    with pytest.raises(ShapeError, match=r"changed before the save wrote it(.|\n)*'w'"):
        request.execute_sync()
    assert not st.is_checkpoint(storage)


@with_objects
def test_a_tensor_named_like_an_object_is_refused(backend: Format) -> None:
    storage = MemoryStorage()
    with pytest.raises(IntegrityError, match="named like objects"):
        st.save([whole("o/shard_0_1", torch.ones(2)), st.ShardedObject("o", 1, (1,), (0,))], storage, backend)
    assert not st.is_checkpoint(storage)


@in_every_format
def test_shards_that_overlap_are_found_whoever_checks(backend: Format) -> None:
    def twice(world: st.World) -> None:
        part = [whole("w", torch.ones(4), (0, 0, 1))]
        st.save(part, storage, backend, validate_access_integrity=False, world=world)

    storage = MemoryStorage()
    with pytest.raises(CheckpointingException):
        st.simulate(2, twice)
    assert storage.names() == ()


@with_objects
def test_an_object_written_twice_is_found(backend: Format) -> None:
    def twice(world: st.World) -> None:
        item = st.ShardedObject("o", 1, (1,), (0,))
        st.save([item], storage, backend, validate_access_integrity=backend[0] == "zarr", world=world)

    storage = MemoryStorage()
    with pytest.raises(IntegrityError, match=r"'o'|'o/shard_0_1'"):
        st.simulate(2, twice)
    assert not st.is_checkpoint(storage)


@in_every_format
@pytest.mark.parametrize("over", [False, True], ids=["new", "over an old one"])
def test_a_failed_save_leaves_what_was_there_and_can_be_tried_again(backend: Format, over: bool) -> None:
    full = [True]

    def refuse(call: Call) -> None:
        if full[0] and call.method.rpartition(".")[2].startswith(("write", "replace")) and "owner" not in call.name:
            raise StorageError("no space left")

    inner = MemoryStorage()
    inner.write("notes.txt", [memoryview(b"theirs")], durable=False)
    if over:
        st.save([whole("old", torch.ones(3))], inner, backend)
    before = {name: inner.read(name) for name in inner.all_names()}
    storage = watched(inner, before=refuse)
    request = st.save(tree(backend), storage, backend, async_sharded_save=True, overwrite=over)
    with pytest.raises(StorageError, match="no space left"):
        request.execute_sync()
    assert {name: inner.read(name) for name in inner.all_names()} == before and inner.siblings() == ()
    full[0] = False
    request.execute_sync()
    with pytest.raises(CheckpointingException):
        request.execute_sync()
    assert is_there(inner) and inner.read("notes.txt") == b"theirs"


KEYS = [
    *("..", ".", "a/b", "/etc/x", "../../etc/passwd", "zarr.json", "metadata.json", "_shardtree/common", "c.0", "%2E"),
    *(
        "a#0",
        "a",
        "index",
        "common",
        ".zarray",
        "__x",
        "ключ.é.🌳",
        '"quoted"\\',
        "\n\0",
        " ",
        "x" * 299 + "y",
        "x" * 300,
    ),
]


@in_every_format
def test_keys_are_any_text_and_never_a_path(backend: Format, tmp_path: Path) -> None:
    folder = tmp_path / "inside" / "checkpoint"
    st.save([whole(key, torch.full((2,), number)) for number, key in enumerate(KEYS)], folder, backend)
    found = {key: tensor.tolist() for key, tensor in st.load_plain_tensors(folder).items()}
    assert found == {key: [number] * 2 for number, key in enumerate(KEYS)}
    assert [*tmp_path.iterdir()] == [folder.parent] and [*folder.parent.iterdir()] == [folder]
