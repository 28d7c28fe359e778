"""What a conversion reads at once: whole chunks where they are decoded, and no longer than it is asked for."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import zarr

import shardtree as st
from shardtree.conversion._passage import Passage
from shardtree.core.lazy import stored
from shardtree.formats.zarr import _load

ROWS, COLUMNS = 4, 2**20


def test_each_compressed_chunk_is_decoded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    array = zarr.open_group(str(tmp_path / "zarr"), mode="w", zarr_format=3).create_array(
        "w", shape=(ROWS, COLUMNS), chunks=(2, COLUMNS), dtype="float32"
    )
    array[:] = torch.arange(ROWS).float()[:, None].expand(ROWS, COLUMNS).numpy()
    decoded, cells = _load.decoded, Counter[tuple[int, ...]]()

    def counted(storage: Any, of: Any, cell: tuple[int, ...]) -> torch.Tensor:
        cells[cell] += 1
        return decoded(storage, of, cell)

    monkeypatch.setattr(_load, "decoded", counted)
    st.convert(tmp_path / "zarr", tmp_path / "plain", backend="safetensors")
    assert cells == {(0, 0): 1, (1, 0): 1}  # of 8 MiB each, from which the format asks for 4 at a time
    assert st.load_plain_tensors(tmp_path / "plain")["w"][:, -1].tolist() == [0, 1, 2, 3]


def test_a_window_is_dropped_with_the_last_part_of_its_tensor() -> None:
    whole, reads = torch.arange(40.0).reshape(10, 4), list[tuple[int, ...]]()

    def read(offset: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
        reads.append((*offset, *shape))
        return whole[offset[0] : offset[0] + shape[0]].clone()

    shard = st.ShardedTensor.from_rank_offsets("w", whole)
    lazy = st.ShardedTensor.from_rank_offsets("w", stored(read, (10, 4), torch.float32, name="w"))
    lazy = Passage(64, has_sums=False).watch(lazy)
    source = lazy.data.source
    parts = [lazy.data[row : row + 2].read() for row in range(0, 10, 2)]
    assert torch.equal(torch.cat(parts), shard.data)
    assert reads == [(0, 0, 4, 4), (4, 0, 4, 4), (8, 0, 2, 4)]  # four rows at a time
    assert source.window is None
