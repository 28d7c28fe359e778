"""Our zarr v3 folders: what was saved comes back in any layout, in files that lie as the layout says."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some

import shardtree as st
from shardtree.errors import (
    CheckpointingException,
    CorruptCheckpoint,
    IntegrityError,
    NotACheckpoint,
    StorageError,
    StrategyError,
)
from shardtree.formats.zarr._cells import crc32c
from shardtree.formats.zarr._layout import array_name
from shardtree.shell.storage import files_in
from shardtree.storage import MemoryStorage
from shardtree.testing import (
    GlobalState,
    Layout,
    Piece,
    check_roundtrip,
    even_layout,
    global_states,
    random_bits,
    state_layouts,
)
from tests.formats.zarr_nodes import LITTLE, regular
from tests.shell.table.folders import folder_of

# What torch says, once, when it makes a tensor of half-precision complex numbers.
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

ZARR = ("zarr", 3)
QUICK = 10.0  # seconds of processors, which other work on the machine doesn't change
EXAMPLES = settings.default.max_examples if settings.default else 100
save = partial(st.save, sharded_strategy=ZARR, options=st.SaveOptions(durable=False))


def saved(state: GlobalState, layout: dict[str, Layout], **options: Any) -> MemoryStorage:
    storage = MemoryStorage()
    ranks = next(iter(layout.values())).ranks
    st.simulate(
        ranks, lambda world: save(st.testing.rank_tree(state, layout, world.rank), storage, world=world, **options)
    )
    return storage


def chunks(storage: Any, key: str) -> list[str]:
    return [name for name in storage.names(array_name(key)) if name != "zarr.json"]


def flat(layout: Layout, cut: int) -> Layout:
    """Return a layout in which two ranks hold each piece, one its first elements and one the rest."""
    pieces = []
    for piece in layout.pieces:
        count = torch.Size(piece.shape).numel()
        pieces.append(replace(piece, rank=2 * piece.rank, flat=(0, cut)))
        pieces.append(replace(piece, rank=2 * piece.rank + 1, flat=(cut, count)))
    return replace(layout, ranks=2 * layout.ranks, pieces=tuple(pieces))


def layers(ranks: int) -> Layout:
    """Return the layout of 4 stacked layers, each rank with half of the columns of each layer."""
    width = 6 // ranks
    pieces = (Piece(rank, (layer, 0, rank * width), (1, 5, width)) for rank in range(ranks) for layer in range(4))
    return Layout(ranks, (4, 5, 6), tuple(pieces), prepended=1, grid=(4, 1, ranks))


def pieces_of(layout: tuple[tuple[int, tuple[int, ...], tuple[int, ...]], ...], shape: tuple[int, ...]) -> Layout:
    return Layout(2, shape, tuple(Piece(*piece) for piece in layout))


ROWS = even_layout((8, 6), 2, axis=0)
CUTS = {
    "chunks are the ranks' shards": (ROWS, [4, 6], None, ["c.0.0", "c.1.0"]),
    "replicas are written once": (even_layout((8, 6), 2), [8, 6], None, ["c.0.0"]),
    "a scalar": (even_layout((), 2), [], None, ["c"]),
    "no elements": (even_layout((0, 3), 2), [1, 3], None, []),
    "layers of one rank share a file": (layers(1), [4, 5, 6], [1, 5, 6], ["c.0.0.0"]),
    "layers of two ranks, two files": (layers(2), [4, 5, 3], [1, 5, 3], ["c.0.0.0", "c.0.0.1"]),
    "flat ranges share the file of their box": (flat(ROWS, 10), [4, 6], None, ["c.0.0", "c.1.0"]),
    "flat ranges that are all of their box": (flat(ROWS, 24), [4, 6], None, ["c.0.0", "c.1.0"]),
    "a last shard that is smaller": (
        pieces_of(((0, (0, 0), (5, 3)), (1, (5, 0), (2, 3))), (7, 3)),
        [5, 3],
        None,
        ["c.0.0", "c.1.0"],
    ),
    "smaller along the last axis": (
        pieces_of(((0, (0, 0), (3, 5)), (1, (0, 5), (3, 2))), (3, 7)),
        [3, 5],
        None,
        ["c.0.0", "c.0.1"],
    ),
    "no regular grid": (pieces_of(((0, (0, 0), (3, 2)), (1, (0, 2), (3, 5))), (3, 7)), [3, 7], None, ["c.0.0"]),
}


@pytest.mark.parametrize("name", CUTS)
def test_files_lie_as_the_layout_says(name: str) -> None:
    layout, chunk, inner, files = CUTS[name]
    whole = random_bits(layout.global_shape, torch.bfloat16, 3)
    state = GlobalState({"w": whole}, {}, {})
    storage = saved(state, {"w": layout})
    document = json.loads(storage.read("w/zarr.json"))
    assert document["chunk_grid"]["configuration"]["chunk_shape"] == chunk
    assert document["codecs"][0]["configuration"].get("chunk_shape") == inner
    assert chunks(storage, "w") == files
    assert st.verify(storage) == ()
    target = {"w": even_layout(layout.global_shape, 1)}
    check_roundtrip(state, {"w": layout}, target, save=save)


STATE = GlobalState(
    {"w": torch.arange(48.0).reshape(8, 6), "layers": torch.arange(120.0).reshape(4, 5, 6).bfloat16()},
    {"rng": [{"seed": 1}, {"seed": 2}]},
    {"step": 7, "lr": torch.tensor(0.5)},
)
LAYOUT = {"w": ROWS, "layers": layers(2)}


def copied(storage: Any, **changes: bytes | None) -> MemoryStorage:
    files = {name: storage.read(name) for name in files_in(storage)} | changes
    return folder_of({name: data for name, data in files.items() if data is not None})


class Killed(Exception):
    """What a storage raises from some call on."""


def test_ranks_that_told_each_other_nothing_cannot_choose_chunks() -> None:
    tree, storage = {"w": st.ShardedTensor.from_rank_offsets("w", torch.zeros(4))}, MemoryStorage()
    with pytest.raises(StrategyError, match="validate_access_integrity=True"):
        st.simulate(2, lambda world: save(tree, storage, world=world, validate_access_integrity=False))


def test_gaps_in_a_chunk_are_refused() -> None:
    parts = [((0, 0), (3, 2)), ((1, 2), (2, 5))]
    shards = [
        st.ShardedTensor("w", torch.zeros(shape), torch.float32, shape, (3, 7), offset, None) for offset, shape in parts
    ]
    with pytest.raises(IntegrityError, match=r"'w' leave gaps in chunk \(0, 0\)"):
        save(shards, MemoryStorage(), validate_access_integrity=False)
    with pytest.raises(IntegrityError, match="'w'"):
        save([shards[0], shards[0]], MemoryStorage(), validate_access_integrity=False)


def test_half_a_tensor_is_half_its_chunks() -> None:
    half = st.ShardedTensor.from_rank_offsets("w", torch.ones(2, 3), (0, 1, 2))
    storage = MemoryStorage()
    save({"w": half}, storage, validate_access_integrity=False)
    assert chunks(storage, "w") == ["c.1.0"]
    (loaded,) = st.load({"w": half}, storage, validate_access_integrity=False).values()
    assert torch.equal(loaded, half.data)
    with pytest.raises(CheckpointingException, match="elements are stored"):
        st.load_plain_tensors(storage)


def test_a_store_without_places_in_files_takes_regular_layouts_only() -> None:
    from tests.shell.storage.storages import STORAGES

    check_roundtrip(STATE, LAYOUT, LAYOUT, save=save, directory=STORAGES["objects://"](Path()))
    other = STORAGES["objects://"](Path())
    irregular, _, _, _ = CUTS["no regular grid"]
    state = GlobalState({"w": random_bits((3, 7), torch.float32, 3)}, {}, {})
    with pytest.raises(StorageError, match="in parts"):
        check_roundtrip(state, {"w": irregular}, {"w": irregular}, save=save, directory=other)


# The same arrays as a program that knows nothing of shardtree sees them: by their metadata and file names.


def as_plain(storage: Any, **changes: bytes | None) -> MemoryStorage:
    """Return a copy of a folder that doesn't say any more that a save of ours wrote it."""
    group = json.dumps({"zarr_format": 3, "node_type": "group", "attributes": {}}).encode()
    return copied(storage, **{"metadata.json": None, "zarr.json": group} | changes)


@settings(max_examples=EXAMPLES // 2)
@given(data=some.data())
def test_arrays_are_read_by_their_metadata_alone(data: some.DataObject) -> None:
    state = data.draw(global_states(), label="state")
    storage = saved(state, data.draw(state_layouts(state, data.draw(some.integers(1, 4)))))
    found = st.load_plain_tensors(as_plain(storage))
    tensors = {key: tensor for key, tensor in found.items() if not key.startswith("_shardtree/")}
    assert st.testing.outline(tensors) == st.testing.outline(dict(sorted(state.tensors.items())))


def test_the_law_of_metadata_catches_another_chunk_shape() -> None:
    storage = saved(STATE, LAYOUT)
    document = json.loads(storage.read("w/zarr.json"))
    document["chunk_grid"]["configuration"]["chunk_shape"] = [6, 4]
    found = st.load_plain_tensors(as_plain(storage, **{"w/zarr.json": json.dumps(document).encode()}))
    assert not torch.equal(found["w"], STATE.tensors["w"])


def shard_index_changed(data: bytes, entry: int, number: int) -> bytes:
    """Return a file with chunks inside, one number of whose index is another one, the CRC as it should be."""
    count = 4
    start = len(data) - 16 * count - 4
    entries = bytearray(data[start:-4])
    entries[8 * entry : 8 * entry + 8] = number.to_bytes(8, "little")
    return data[:start] + bytes(entries) + crc32c(bytes(entries)).to_bytes(4, "little")


INDEX_FAULTS = {
    "a cut file": lambda data: data[:-1],
    "no file": lambda data: b"",
    "shorter than its index": lambda data: data[-20:],
    "a flipped bit": lambda data: data[:-10] + bytes([data[-10] ^ 1]) + data[-9:],
    "a wrong CRC": lambda data: data[:-1] + bytes([data[-1] ^ 1]),
    "a chunk beyond the end": lambda data: shard_index_changed(data, 0, len(data)),
    "a chunk at 2^63": lambda data: shard_index_changed(data, 2, 2**63),
    "a chunk that is longer": lambda data: shard_index_changed(data, 1, 31),
    "a chunk of 2^64 - 1 bytes": lambda data: shard_index_changed(data, 1, 2**64 - 1),
}


@pytest.mark.parametrize("name", INDEX_FAULTS)
def test_a_damaged_shard_index_is_refused(name: str) -> None:
    storage = saved(STATE, LAYOUT)
    file = "layers/c.0.0.0"
    assert len(storage.read(file)) == 4 * 5 * 3 * 2 + 4 * 16 + 4
    plain = as_plain(storage, **{file: INDEX_FAULTS[name](storage.read(file))})
    with pytest.raises(CorruptCheckpoint, match=file):
        st.load_plain_tensors(plain)
    assert st.verify(plain)


def inside(chunk: list[int], codec: dict[str, Any]) -> dict[str, Any]:
    """Return the field that says how chunks lie in a chunk."""
    how = {"chunk_shape": chunk, "codecs": [codec], "index_codecs": [LITTLE, {"name": "crc32c"}]}
    return {"codecs": [{"name": "sharding_indexed", "configuration": how}]}


HOSTILE: dict[str, dict[str, Any]] = {
    "another format": {"zarr_format": 4},
    "no node": {"node_type": "leaf"},
    "no shape": {"shape": None},
    "a huge shape": {"shape": [2**40, 2**40]},
    "a negative shape": {"shape": [-1, 6]},
    "no chunks": {"chunk_grid": None},
    "another grid": {"chunk_grid": {"name": "rectilinear", "configuration": {}}},
    "chunks without a shape": {"chunk_grid": {"name": "regular", "configuration": {}}},
    "chunks of nothing": regular([0, 6]),
    "other names of chunks": {"chunk_key_encoding": {"name": "mine"}},
    "names that climb": {"chunk_key_encoding": {"name": "default", "configuration": {"separator": "/../"}}},
    "no codecs": {"codecs": None},
    "codecs of nothing": {"codecs": [None]},
    "transformers": {"storage_transformers": [{"name": "x"}]},
    "code": {"codecs": [{"name": "bytes"}, {"name": "numcodecs.pickle"}]},
    "code inside": inside([1, 1], {"name": "pickle"}),
    "inner chunks that do not fit": inside([3, 6], LITTLE),
    "more inner chunks than bytes": {"shape": [2**30, 6], **regular([2**30, 6]), **inside([1, 1], LITTLE)},
    "more chunks than can be counted": {"shape": [2**40, 6], **regular([1, 1])},
    "the key of another": {"attributes": {"shardtree": {"key": "layers"}}},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_metadata_is_refused_quickly(name: str) -> None:
    storage = saved(STATE, LAYOUT)
    document = json.loads(storage.read("w/zarr.json")) | HOSTILE[name]
    started = time.process_time()
    with pytest.raises(CheckpointingException, match="w"):
        st.load_plain_tensors(as_plain(storage, **{"w/zarr.json": json.dumps(document).encode()}))
    assert time.process_time() - started < QUICK


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b"3", b"\xff", b"[" * 100_000, b'{"node_type": "array"}'])
def test_a_folder_with_another_zarr_json_is_no_checkpoint(data: bytes) -> None:
    storage = MemoryStorage()
    storage.write("zarr.json", [memoryview(data)], durable=False)
    with pytest.raises((CorruptCheckpoint, NotACheckpoint)):
        st.load_plain_tensors(storage)


SAVED = saved(STATE, LAYOUT)


def test_from_what_no_save_of_ours_wrote_nothing_is_removed() -> None:
    with pytest.raises(StrategyError, match="was written by another program"):
        st.remove_sharded_tensors(as_plain(SAVED), "")


def test_a_removal_that_dies_leaves_what_loads() -> None:
    calls: list[Any] = []
    st.remove_sharded_tensors(st.testing.watched(copied(SAVED), before=calls.append), "w")
    for number in range(len(calls)):
        storage = copied(SAVED)

        def fail(call: Any, number: int = number) -> None:
            if call.number >= number:
                raise Killed(call)

        with pytest.raises(Killed):
            st.remove_sharded_tensors(st.testing.watched(storage, before=fail), "w")
        found = st.load_plain_tensors(storage, options=st.LoadOptions(verify="all"))
        assert set(found) in ({"layers", "w"}, {"layers"})
        assert all(torch.equal(found[key], STATE.tensors[key]) for key in found)
