"""What a zarr 3 folder says and this reader doesn't know is refused, unless it is marked as what may be ignored."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

import shardtree as st
from shardtree.errors import CheckpointingException, ShapeError, UnsafeFile, UnsupportedValue
from shardtree.formats.zarr import _extensions
from shardtree.formats.zarr._extensions import check_group, understood
from shardtree.storage import MemoryStorage
from tests.formats.zarr_nodes import LITTLE, V3_GROUP, encoded, regular, v3_node
from tests.shell.table.folders import folder_of

Node = dict[str, Any]
VALUES = torch.arange(4, dtype=torch.float32)
CHUNKS = {f"w/c/{at}": VALUES[2 * at : 2 * at + 2].numpy().tobytes() for at in range(2)}
PLAIN = v3_node([4], [2], "float32", chunk_key_encoding={"name": "default", "configuration": {"separator": "/"}})
GROUP: Node = json.loads(V3_GROUP)
IGNORED = {"name": "mine", "must_understand": False}
MARKS = [{}, {"name": "mine"}, {"must_understand": True}, {"must_understand": 0}, {"must_understand": "false"}]


def folder(node: Node, group: Node = GROUP, chunks: Mapping[str, bytes] = CHUNKS) -> MemoryStorage:
    return folder_of({"zarr.json": encoded(group), "w/zarr.json": encoded(node), **chunks})


def inner(codecs: list[Any]) -> Node:
    """Return an array whose chunks have chunks of these codecs inside; without files it is all fill value."""
    how = {"chunk_shape": [1], "codecs": codecs, "index_codecs": [LITTLE, {"name": "crc32c"}]}
    return PLAIN | {"codecs": [{"name": "sharding_indexed", "configuration": how}]}


POINTS: dict[str, Callable[[Any], Node]] = {
    "a field": lambda value: PLAIN | {"mine": value},
    "a field that is no object": lambda value: PLAIN | {"mine": list(value)},
    "extensions": lambda value: PLAIN | {"extensions": [value]},
    "a storage transformer": lambda value: PLAIN | {"storage_transformers": [{"name": "mine", **value}]},
    "a member of the chunk grid": lambda value: PLAIN | {"chunk_grid": regular([2])["chunk_grid"] | {"mine": value}},
    "a codec's member": lambda value: PLAIN | {"codecs": [LITTLE | {"mine": value}]},
    "an inner codec's member": lambda value: inner([LITTLE | {"mine": value}]),
}


@pytest.mark.parametrize("name", POINTS)
def test_an_extension_that_must_be_understood_is_refused_everywhere(name: str) -> None:
    for mark in MARKS:
        place = folder(POINTS[name](mark))
        for read in (st.load_plain_tensors, lambda place: st.convert(place, MemoryStorage(), backend="safetensors")):
            with pytest.raises(UnsupportedValue, match=r"w/zarr\.json' has unknown extensions\n"):
                read(place)
        assert "unknown extensions" in st.verify(place)[0].what


def test_a_grid_or_names_of_chunks_that_arent_known_are_refused_however_they_are_marked() -> None:
    for field in ("chunk_grid", "chunk_key_encoding"):
        with pytest.raises(UnsupportedValue, match=f"{field.replace('_', ' ')} 'mine'"):
            st.load_plain_tensors(folder(PLAIN | {field: IGNORED}))
        with pytest.raises(UnsupportedValue, match=f"{field.replace('_', ' ')} 'mine'"):
            st.load_plain_tensors(folder(PLAIN | {field: "mine"}))
    data_type = folder(PLAIN | {"data_type": IGNORED})
    assert st.load_plain_tensors(data_type) == {}
    with pytest.raises(UnsupportedValue, match="torch has no such dtype"):
        st.load([st.ShardedTensor.from_rank_offsets("w", VALUES)], data_type)


def test_what_may_be_ignored_is() -> None:
    for node in (
        PLAIN | {"mine": IGNORED, "other": {"must_understand": False}},
        PLAIN | {"storage_transformers": [IGNORED]},
        PLAIN | {"codecs": [LITTLE, IGNORED]},
    ):
        assert torch.equal(st.load_plain_tensors(folder(node))["w"], VALUES)
    assert st.load_plain_tensors(folder(inner([LITTLE, IGNORED]), chunks={}))["w"].tolist() == [0] * 4
    assert torch.equal(st.load_plain_tensors(folder(PLAIN, GROUP | {"mine": IGNORED}))["w"], VALUES)


def test_a_codec_that_isnt_known_runs_nothing_however_it_is_marked() -> None:
    pickled = {"name": "numcodecs.pickle"}
    with pytest.raises(UnsafeFile, match="pickle"):
        st.load_plain_tensors(folder(PLAIN | {"codecs": [LITTLE, pickled]}))
    node = understood(PLAIN | {"codecs": [LITTLE, pickled | {"must_understand": False}]}, "w")
    assert node["codecs"] == [LITTLE]  # taken out, so that the zarr package doesn't see it either


def test_groups_are_asked_too_the_outermost_and_those_within() -> None:
    with pytest.raises(UnsupportedValue, match=r"field 'mine'"):
        st.load_plain_tensors(folder(PLAIN, GROUP | {"mine": {}}))
    within = {f"layers/{name}": data for name, data in {"w/zarr.json": encoded(PLAIN), **CHUNKS}.items()}
    nested = folder_of({"zarr.json": V3_GROUP, "layers/zarr.json": encoded(GROUP | {"mine": {}}), **within})
    with pytest.raises(UnsupportedValue, match=r"layers/zarr\.json' has unknown extensions"):
        st.load_plain_tensors(nested)


def objects_in(value: Any) -> list[dict[str, Any]]:
    """Return the objects in JSON, the outermost first, without attributes, which may say anything."""
    if isinstance(value, list):
        return [each for part in value for each in objects_in(part)]
    if not isinstance(value, dict):
        return []
    return [value, *(each for name, part in value.items() if name != "attributes" for each in objects_in(part))]


@given(some.data())
def test_one_more_field_anywhere_is_refused_unless_it_is_marked(data: some.DataObject) -> None:
    node = deepcopy(data.draw(some.sampled_from([PLAIN, inner([LITTLE]), PLAIN | {"mine": IGNORED}])))
    places = [place for place in objects_in(node) if place.get("name") != "mine"]
    marked = data.draw(some.booleans())
    more = some.dictionaries(some.text(max_size=3), some.integers(), max_size=2)
    value = data.draw(more) | {"must_understand": False} if marked else data.draw(more | some.integers() | some.text())
    place = data.draw(some.sampled_from(places))
    place[data.draw(some.text(max_size=5).map(lambda text: f"{text}?"))] = value
    check_understood(node, marked=marked)


def check_understood(node: Node, *, marked: bool) -> None:
    """Raise unless an array with one more field is refused exactly where that field isn't marked."""
    if marked:
        assert understood(node, "w")["codecs"]
    else:
        with pytest.raises(UnsupportedValue, match="unknown extensions"):
            understood(node, "w")


def test_the_law_catches_a_reader_that_takes_any_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    node = PLAIN | {"codecs": [{"name": "bytes", "configuration": {"endian": "little", "swizzled": 1}}]}
    check_understood(node, marked=False)
    monkeypatch.setattr(_extensions, "_CONFIGURATIONS", {})
    with pytest.raises(pytest.fail.Exception):
        check_understood(node, marked=False)


def test_what_a_save_of_ours_writes_is_understood_whole() -> None:
    storage = MemoryStorage()
    tree = {"w": st.ShardedTensor.from_rank_offsets("w", torch.ones(4, 6, dtype=torch.bfloat16)), "step": 7}
    st.save(tree, storage, ("zarr", 3))
    check_group(json.loads(storage.read("zarr.json")), "zarr.json")
    document = json.loads(storage.read("w/zarr.json"))
    assert understood(document, "w") == document


def test_zarr_python_agrees_about_fields() -> None:
    zarr = pytest.importorskip("zarr")

    buffer = zarr.core.buffer.default_buffer_prototype().buffer

    def theirs(files: Mapping[str, bytes]) -> Any:
        store = zarr.storage.MemoryStore({name: buffer.from_bytes(data) for name, data in files.items()})
        return zarr.open_group(store, mode="r")["w"][:]

    def is_read(read: Callable[[Any], Any], value: Any) -> bool:
        try:
            read({"zarr.json": V3_GROUP, "w/zarr.json": encoded(PLAIN | {"mine": value}), **CHUNKS})
        except (CheckpointingException, ValueError, TypeError):
            return False
        return True

    for value in (IGNORED, {}, 3, {"must_understand": True}):
        ours = is_read(lambda files: st.load_plain_tensors(folder_of(files)), value)
        assert ours == is_read(theirs, value) == (value == IGNORED)


def test_a_chunk_that_isnt_there_has_no_value_where_the_fill_value_is_null() -> None:
    nodes = {"null": PLAIN | {"fill_value": None}, "missing": {**PLAIN}}
    del nodes["missing"]["fill_value"]
    half = {"w/c/0": CHUNKS["w/c/0"]}
    for how, node in nodes.items():
        whole, cut = folder(node), folder(node, chunks=half)
        assert torch.equal(st.load_plain_tensors(whole)["w"], VALUES)
        why = f"2 of 4 elements are stored: a chunk is not stored, and the array's fill_value is {how}\n"
        for read in (
            st.load_plain_tensors,
            lambda place: st.open_checkpoint(place)["w"].data.read(),
            lambda place: st.convert(place, MemoryStorage(), backend="safetensors"),
        ):
            with pytest.raises(ShapeError, match=why) as caught:
                read(cut)
            assert "without all ranks" not in str(caught.value)
        target = st.ShardedTensor.from_rank_offsets("w", torch.zeros(4))
        assert why.strip() in str(st.explain([target], cut))
        part = st.ShardedTensor.from_rank_offsets("w", torch.zeros(2), (0, 0, 2))
        [loaded] = st.load([part], cut, validate_access_integrity=False)
        assert torch.equal(loaded, VALUES[:2])
    assert st.load_plain_tensors(folder(PLAIN, chunks=half))["w"].tolist() == [0, 1, 0, 0]
