"""`.metadata` written from columns has the bytes of the same values written one by one, and `pickle` reads them."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as hs

from shardtree.formats.pickles import Reduced, write_pickle
from shardtree.formats.torch_dist import _metadata_write as module
from shardtree.formats.torch_dist._metadata_write import Archive, Paths, WrittenContents, encode_index_file
from shardtree.layouts import ShardColumns, TensorKind

NUMBERS = hs.one_of(
    hs.integers(0, 3),
    hs.sampled_from([255, 256, 65_535, 65_536, 2**31 - 1, 2**31, 2**32, 2**39 - 1, 2**39, 2**47, 2**55, 2**63 - 1]),
)
# Also words that the file has anyway: each text is written once, whatever it names.
KEYS = hs.sampled_from(["w", "é" * 130, "a" * 300, "size", "torch", "float32", "offset", "__0_0.distcp", "\ud800"])
DTYPES = hs.sampled_from([torch.float32, torch.bfloat16, torch.int8])


def one_by_one(
    stored: WrittenContents, save_id: str, values: dict[str, Archive] | None = None, paths: Paths | None = None
) -> bytes:
    """Return the file as the writer of pickles makes it from a value for each record."""
    columns, archives, new = stored.columns, stored.objects | (values or {}), module._new
    width = columns.offset.shape[1]
    axes = [len(columns.kinds[key].global_shape) for key in columns.key.tolist()]

    def sizes(rows: Any) -> list[Reduced]:
        return [module._size(row[width - count :]) for row, count in zip(rows.tolist(), axes, strict=True)]

    offsets = sizes(columns.offset)
    boxes = [
        new("ChunkStorageMetadata", offsets=offset, sizes=size)
        for offset, size in zip(offsets, sizes(columns.shape), strict=True)
    ]
    state: dict[str, Any] = {name: new("BytesStorageMetadata") for name in archives}
    for number, (key, kind) in enumerate(zip(columns.keys, columns.kinds, strict=True)):
        state[key] = module._tensor(kind, [boxes[row] for row in np.flatnonzero(columns.key == number).tolist()])
    places = [(module._index(name), module._place(*archive)) for name, archive in archives.items()]
    for row, key in enumerate(columns.key.tolist()):
        within = int((columns.key[:row] == key).sum())
        where = stored.files[stored.file[row]], int(stored.byte[row]), int(stored.length[row])
        places.append((module._index(columns.keys[key], offsets[row], within), module._place(*where)))
    metadata = {
        "state_dict_metadata": state,
        "planner_data": None if paths is None else dict(paths),
        "storage_data": dict(places),
        "storage_meta": new("StorageMeta", checkpoint_id=None, save_id=save_id, load_id=None, modules=[]),
        "version": module.DCP_VERSION,
    }
    return write_pickle(new("Metadata", **metadata))


def stored_of(tensors: list[Any], files: tuple[str, ...], objects: dict[str, Archive]) -> WrittenContents:
    """Return tensors as (key, kind, rows), each row (offset, shape, file, byte, length), as a save has them."""
    width = max((len(kind.global_shape) for _, kind, _ in tensors), default=0)
    rows = [(number, *row) for number, (_, _, rows) in enumerate(tensors) for row in rows]

    def column(values: list[int]) -> Any:
        return np.array(values, dtype=np.int64)

    def boxes(at: int) -> Any:
        padded = [(0,) * (width - len(row[at])) + row[at] for row in rows]
        return np.array(padded, dtype=np.int64).reshape(len(rows), width)

    minus = np.full(len(rows), -1)
    columns = ShardColumns(
        tuple(key for key, _, _ in tensors),
        tuple(kind for _, kind, _ in tensors),
        column([row[0] for row in rows]),
        boxes(1),
        boxes(2),
        minus,
        minus,
        np.zeros(len(rows), dtype=np.int64),
        np.ones(len(rows), dtype=np.bool_),
    )
    return WrittenContents(columns, files, *(column([row[at] for row in rows]) for at in (3, 4, 5)), objects)


@hs.composite
def saves(draw: hs.DrawFn) -> tuple[WrittenContents, dict[str, Archive], Paths | None]:
    files = tuple(f"__{number}_0.distcp" for number in range(draw(hs.integers(1, 4))))
    archives = hs.tuples(hs.sampled_from(files), NUMBERS, NUMBERS)
    names = draw(hs.lists(KEYS, unique=True, max_size=8))
    count = draw(hs.integers(0, len(names)))
    tensors = []
    for key in names[:count]:
        axes = draw(hs.integers(0, 6))
        shapes = hs.lists(NUMBERS, min_size=axes, max_size=axes).map(tuple)
        rows = hs.tuples(shapes, shapes, hs.integers(0, len(files) - 1), NUMBERS, NUMBERS)
        tensors.append((key, TensorKind(draw(DTYPES), draw(shapes), 0), draw(hs.lists(rows, max_size=4))))
    others = {name: draw(archives) for name in names[count:]}
    paths = draw(hs.sampled_from([None, {}, {key: (key,) for key in names}, dict.fromkeys(names, ("size", 3))]))
    return stored_of(tensors, files, others), draw(hs.sampled_from([{}, {"step": (files[0], 1, 2)}])), paths


def law_of_bytes(save: tuple[WrittenContents, dict[str, Archive], Paths | None]) -> None:
    stored, values, paths = save
    assert encode_index_file(stored, "id", values, paths) == one_by_one(stored, "id", values, paths)


@given(saves(), hs.sampled_from([1, 2, 32_768]))
def test_records_from_columns_have_the_bytes_of_records_one_by_one(save: Any, at_once: int) -> None:
    with patch.object(module, "_AT_ONCE", at_once):
        law_of_bytes(save)


def regular(tensors: int = 40, chunks: int = 9) -> tuple[WrittenContents, dict[str, Archive], Paths | None]:
    rows = [((300 * row, 0), (300, 7), row % 5, 2**33 + 1024 * row, 1024) for row in range(chunks)]
    names = [f"layers.{number:05}.weight" for number in range(tensors)]
    listed = [(name, TensorKind(torch.float32, (300 * chunks, 7), 0), rows) for name in names]
    stored = stored_of(listed, tuple(f"__{number}_0.distcp" for number in range(5)), {})
    return stored, {}, {name: (name,) for name in names}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("_numbers", lambda values: module_numbers(values % 2**32)),
        ("_references", lambda numbers: module_references(numbers % 256)),
        ("_file_names", lambda writer, files, rows: module_file_names(writer, files, rows * 0)),
    ],
)
def test_the_law_of_bytes_catches(name: str, broken: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    save = regular(300)
    law_of_bytes(save)
    monkeypatch.setattr(module, name, broken)
    with pytest.raises(AssertionError):
        law_of_bytes(save)


module_numbers, module_references, module_file_names = module._numbers, module._references, module._file_names
