"""Opening checkpoints of very many tensors and chunks, and what is known of each without reading any."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import safetensors.torch
import torch
from safetensors import safe_open

import shardtree as st
from shardtree.layouts import ShardColumns, TensorKind
from shardtree.storage import BLOCK_BYTES, StoredFile, digest
from shardtree.strategies import decode_metadata, encode_metadata
from shardtree.strategies.index import build_index, encode_index

from ._bars import Bar, Settings
from ._turns import Seconds, in_turns, ratio

KEYS, CHUNKS = 100_000, 2_000_000
MOST_TIMES, MOST_SECONDS = 1.5, 0.5

HEADER, NAMES = "safetensors: names, shapes, dtypes", "safetensors: names"
ITEMS, METADATA = "open_checkpoint, shape and dtype of its items()", "load_tensors_metadata, shape and dtype of all"
LISTED = "open_checkpoint, list"

_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "I8": torch.int8}
_FILES = 64


def key_bars(settings: Settings, folder: Path) -> list[Bar]:
    """Return the bars of a checkpoint of many small tensors, beside the header of the same in one safetensors file."""
    keys, rounds, tries = (200, 1, 1) if settings.quick else (KEYS, 5, 3)
    ours, theirs = folder / "keys", folder / "keys.safetensors"
    tensors = dict(sorted((f"model.layers.{number}.weight", _small(number)) for number in range(keys)))
    st.save(
        [st.ShardedTensor.from_rank_offsets(*item) for item in tensors.items()],
        ours,
        options=st.SaveOptions(durable=False),
    )
    safetensors.torch.save_file(tensors, theirs)
    expected = [(key, tuple(tensor.shape), tensor.dtype) for key, tensor in tensors.items()]
    actions = _key_actions(ours, theirs)
    for name, action in actions.items():
        _check(name, sorted(action(), key=str), sorted(expected if _tells_kinds(name) else tensors, key=str))
    return _key_rows(f"{keys:,} keys", in_turns(actions, rounds=rounds, tries=tries))


def _key_actions(ours: Path, theirs: Path) -> dict[str, Callable[[], Iterable[object]]]:
    return {
        HEADER: lambda: _header(theirs),
        NAMES: lambda: _names(theirs),
        ITEMS: lambda: [(key, one.global_shape, one.dtype) for key, one in st.open_checkpoint(ours).items()],
        METADATA: lambda: [(key, one.global_shape, one.dtype) for key, one in st.load_tensors_metadata(ours).items()],
        LISTED: partial(_listed, ours),
    }


def _key_rows(what: str, seconds: Seconds) -> list[Bar]:
    def row(name: str, other: str, most: float | None) -> Bar:
        ours, theirs = median(seconds[name]), median(seconds[other])
        return Bar(f"{what}: {name}", other, ours, theirs, ratio(seconds, name, other), most)

    return [row(ITEMS, HEADER, MOST_TIMES), row(METADATA, HEADER, MOST_TIMES), row(LISTED, NAMES, None)]


def _tells_kinds(name: str) -> bool:
    return name not in (NAMES, LISTED)


def _small(number: int) -> torch.Tensor:
    shape = [(1 + number % 97, 4), (1 + number % 89,), (2, 1 + number % 83, 2)][number % 3]
    return torch.zeros(shape, dtype=[*_DTYPES.values()][number // 3 % 3])


def _listed(place: Path) -> list[str]:
    return list(st.open_checkpoint(place))


def _names(file: Path) -> list[str]:
    with safe_open(file, "pt") as opened:
        return list(opened.keys())


def _header(file: Path) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
    found = []
    with safe_open(file, "pt") as opened:
        for key in opened.keys():  # noqa: SIM118 - it isn't a mapping
            part = opened.get_slice(key)
            found.append((key, tuple(part.get_shape()), _DTYPES[part.get_dtype()]))
    return found


def chunk_bars(settings: Settings, folder: Path) -> list[Bar]:
    """Return the bars of an index of very many chunks, in a few tensors and each in a tensor of its own."""
    most, rounds, tries = (1000, 1, 1) if settings.quick else (CHUNKS, 5, 3)
    found: list[Bar] = []
    for tensors, chunks in ((most // 200, most // 2), (most // 2, most // 2), (most, most)):
        place = folder / f"{tensors} tensors"
        sparse_checkpoint(place, tensors, chunks // tensors)
        tree = st.open_checkpoint(place)
        _check("chunks", len(tree.metadata.index.chunk_key), chunks)  # type: ignore[attr-defined]
        _check("tensors", len(list(tree)), tensors)
        actions = {"open": partial(st.open_checkpoint, place), "open, list": partial(_listed, place)}
        seconds = in_turns(actions, rounds=rounds, tries=tries)
        what, bars = f"{chunks:,} chunks of {tensors:,} tensors", (("open", MOST_SECONDS), ("open, list", None))
        for name, bar in bars:
            taken = median(seconds[name])
            found.append(Bar(f"{what}: {name}", "", taken, None, taken, bar))
    return found


def sparse_checkpoint(folder: Path, tensors: int, chunks: int) -> None:
    """Make a checkpoint whose index is as a save writes it, and whose data files have their lengths and no content.

    Args:
        folder: where it goes; not there yet.
        tensors: how many there are, matrices of float32.
        chunks: into which each one's rows are cut.
    """
    st.save({"step": 1}, folder, options=st.SaveOptions(durable=False))
    fields = decode_metadata((folder / "metadata.json").read_bytes(), "metadata.json")
    count = tensors * chunks
    length = 4096 + -(-count // _FILES) * 128
    names = [f"{fields['save_id']}/{number:05d}-of-{_FILES:05d}.safetensors" for number in range(_FILES)]
    hashes = np.zeros(-(-length // BLOCK_BYTES), dtype=np.uint64)
    for name in names:
        with open(folder / name, "wb") as file:
            file.truncate(length)
    row = np.arange(count)
    byte = 4096 + row // _FILES * 128
    files = [StoredFile(name, length, hashes) for name in names]
    data = encode_index(build_index(row_shards(tensors, chunks), row % _FILES, byte, files=files))
    entry = fields["index"] | {"length": len(data), "digest": digest(data)}
    (folder / entry["name"]).write_bytes(data)
    (folder / "metadata.json").write_bytes(encode_metadata(fields | {"index": entry}))


def row_shards(tensors: int, chunks: int) -> ShardColumns:
    """Return matrices of float32 that are cut by rows, each into so many chunks."""
    row = np.arange(tensors * chunks)
    minus = np.full(row.size, -1)
    return ShardColumns(
        keys=tuple(sorted(f"model.layers.{number}.weight" for number in range(tensors))),
        kinds=(TensorKind(torch.float32, (4 * chunks, 8), 0),) * tensors,
        key=row // chunks,
        offset=np.stack([row % chunks * 4, np.zeros_like(row)], axis=1),
        shape=np.tile([4, 8], (row.size, 1)),
        start=minus,
        stop=minus,
        rank=row % _FILES,
        main=np.ones(row.size, dtype=np.bool_),
    )


def _check(what: str, found: object, expected: object) -> None:
    if found != expected:
        raise ValueError(f"{what}: not what was saved")
