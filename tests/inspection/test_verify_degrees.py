"""What `load` checks on its way, by degree and format, as docs/checks.md has it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import shardtree as st
from shardtree.core.layouts import shard_columns
from shardtree.errors import CorruptCheckpoint, IntegrityError
from shardtree.shell.storage import StoredFile
from shardtree.shell.table.index import build_index, rows_from_index
from shardtree.strategies import StrategyAction
from tests.options import load_keywords
from tests.shell.checkpoint.parts import files as walk
from tests.shell.checkpoint.parts import saved, whole

WHOLE = torch.arange(2 * 1024 * 1024, dtype=torch.int32).reshape(2048, 1024)  # 8 MiB: no small file
CHECKED = [("safetensors", 1), ("torch_dist", 1), ("dcp", 1), ("zarr", 3)]
UNCHECKED = [("huggingface", 1)]
DEGREES: list[Any] = ["whole", "all", None]


def damaged(backend: Any, row: int) -> st.storage.MemoryStorage:
    """A checkpoint of one tensor, with a flipped bit in one row of it."""
    folder = saved({"w": whole("w", WHOLE)}, backend)
    needle = WHOLE[row].numpy().tobytes()
    for name in walk(folder):
        data = bytearray(folder.read(name))
        if needle in data:
            data[data.index(needle)] ^= 1
            folder.write(name, [memoryview(bytes(data))], durable=False)
    return folder


def load(
    folder: st.storage.MemoryStorage, rows: tuple[int, int], verify: Any
) -> tuple[torch.Tensor, st.storage.ReadReport]:
    begin, end = rows
    target = st.ShardedTensor("w", None, WHOLE.dtype, (end - begin, 1024), (2048, 1024), (begin, 0), None)
    reports: list[st.storage.ReadReport] = []
    options: Any = {"validate_access_integrity": False, "report": reports.append}
    return st.load({"w": target}, folder, **load_keywords(verify=verify, **options))["w"], reports[0]


@pytest.mark.parametrize("verify", DEGREES)
@pytest.mark.parametrize("backend", CHECKED + UNCHECKED, ids=lambda backend: str(backend[0]))
def test_damage_in_what_is_read_whole(backend: Any, verify: Any) -> None:
    folder = damaged(backend, row=700)
    if verify is not None and backend in CHECKED:
        with pytest.raises(CorruptCheckpoint):
            load(folder, (0, 2048), verify)
        return
    loaded, report = load(folder, (0, 2048), verify)
    assert (loaded != WHOLE).sum() == 1 and report.blocks_checked == 0 < report.blocks_unchecked


@pytest.mark.parametrize("verify", DEGREES)
@pytest.mark.parametrize("backend", CHECKED, ids=lambda backend: str(backend[0]))
def test_damage_beside_what_is_read_of_a_block(backend: Any, verify: Any) -> None:
    """Rows 700 to 710 lie in one block, or one archive, with the damaged row 699, and are a small part of it."""
    folder = damaged(backend, row=699)
    if verify == "all":
        with pytest.raises(CorruptCheckpoint):
            load(folder, (700, 710), verify)
        return
    loaded, report = load(folder, (700, 710), verify)
    assert torch.equal(loaded, WHOLE[700:710])
    assert (report.bytes_read, report.blocks_checked) == (10 * 4096, 0)


def test_chunks_that_overlap_are_damage() -> None:
    """Every load refuses them, although each byte is as its hash says."""
    rows = [st.ShardedTensor("w", torch.ones(2, 2), torch.float32, (2, 2), (3, 2), (low, 0), None) for low in (0, 1)]
    byte = np.array([64, 80])
    index = build_index(shard_columns(rows, 0), np.zeros(2, dtype=np.int64), byte, files=[StoredFile("f", 96)])
    storage = st.storage.MemoryStorage()
    storage.replace("f", bytes(96), durable=False)
    storage.replace("metadata.json", b'{"sharded_backend": "doubled", "common_backend": "doubled"}', durable=False)
    table = st.default_strategies | rows_from_index("doubled", 1, lambda checkpoint: index)
    table |= {(StrategyAction.LOAD_COMMON, "doubled", 1): lambda checkpoint: {}}
    with pytest.raises(IntegrityError, match="stored chunks overlap"):
        st.load_plain_tensors(storage, strategies=table)
    (damage,) = st.verify(storage, strategies=table)
    assert damage.keys == ("w",) and damage.file == "f" and "overlap" in damage.what
