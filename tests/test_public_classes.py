"""tests/golden/at-73b114f: files that name private modules are loaded for ever, wherever the classes are now."""

from __future__ import annotations

import pickle
import zlib
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest

import shardtree as st
from shardtree.conversion._journal import Journal, results_of
from shardtree.core.codec import _addresses, decode_tree, encode_tree, named_types
from shardtree.core.moved import new_address
from shardtree.formats.archives import decode_archive, encode_archive
from shardtree.storage import MemoryStorage
from shardtree.testing import outline
from shardtree.trees import Record
from tests.golden import public_classes as golden
from tests.golden.addresses import pickled_as, public_modules

FOLDER = Path(__file__).parent / "golden" / "at-73b114f"
PICKLES = pickle.loads(zlib.decompress((FOLDER / "pickles.z").read_bytes()))

NEWER = {
    *(f"shardtree.kit.{name}" for name in ("Copies", "DeferredMetadata", "HeaderEntry", "IndexMetadata")),
    *(f"shardtree.kit.{name}" for name in ("LoadPlan", "Resolution", "Runs", "StoredChunks")),
    "shardtree.plans.ScaledValues",
    "shardtree.storage.Refusal",
    "shardtree.storage.Refusals",
    "shardtree.storage.SaveReport",
    "shardtree.strategies.Checked",
    "shardtree.testing.ResumeProblem",
    "shardtree.trees.NumericDifference",
    "shardtree.trees.WorstElement",
}
"""Classes that came after the files: rows of the table that these can't hold."""

CHANGED = {
    "shardtree.AsyncRequest": "has `publish` since",
    "shardtree.SaveOptions": "has `report` since",
    "shardtree.checkpoint.OpenCheckpoint": "holds a checkpoint",
    "shardtree.plans.Explanation": "has `kept` since",
    "shardtree.plans.Gap": "has `why` since",
    "shardtree.plans.Unexpected": "has `refusal` since",
    "shardtree.quantised.Form": "has `without` since, and holds parts",
    "shardtree.quantised.Part": "has `shape` since",
    "shardtree.storage.Capabilities": "has `locked` since",
    "shardtree.storage.ReadReport": "has `kept` since",
    "shardtree.strategies.Checkpoint": "holds traits",
    "shardtree.strategies.FormatTraits": "has `writes_common` since",
    "shardtree.strategies.PendingSave": "holds options of a save",
    "shardtree.strategies.Replaced": "holds a sibling, which has `refusals` since",
    "shardtree.strategies.VerifyReport": "has `bytes_checked` since",
}
"""Classes whose fields have changed since. None is anybody's state: they describe a call, or hold functions. Their
pickles are found, but lack the new fields."""


def public_classes() -> dict[type, set[str]]:
    """Return the classes of the public modules' `__all__` that can be stored, with all their public addresses."""
    classes: dict[type, set[str]] = {}
    for module in public_modules():
        for name in getattr(module, "__all__", ()):
            value = getattr(module, name)
            if isinstance(value, type) and value.__module__.startswith("shardtree") and is_stored(value):
                classes.setdefault(value, set()).add(f"{module.__name__}.{name}")
    return classes


def is_stored(kind: type) -> bool:
    """Return whether a class's instances are stored with its name: enums, dataclasses, named tuples."""
    try:
        return bool(named_types([kind]))
    except st.CheckpointingException:
        return False


def same(left: Any, right: Any) -> bool:
    """Return whether two values are of one type and equal to the bit."""
    return bool(outline(left) == outline(right))


CLASSES = public_classes()
TYPES = tuple(CLASSES)


# The table


def stored_as(kind: type) -> str:
    (name,) = named_types([kind])
    return name


def test_every_public_class_is_stored_by_a_public_address() -> None:
    assert len(CLASSES) > 100
    assert {stored_as(kind): kind for kind in CLASSES if stored_as(kind) not in CLASSES[kind]} == {}
    assert len({stored_as(kind) for kind in CLASSES}) == len(CLASSES)


def test_a_class_that_the_root_has_is_stored_by_the_root_s_name() -> None:
    at_the_root = {stored_as(kind) for kind, names in CLASSES.items() if any(name.count(".") == 1 for name in names)}
    assert {name for name in at_the_root if name.count(".") != 1} == set()
    assert {"shardtree.Mesh", "shardtree.PartitionSpec", "shardtree.ShardedTensor"} <= at_the_root


IN_JOURNALS = {
    "shardtree.strategies.torch_dist._write.RankFile",
    "shardtree.strategies.zarr._save.RankFiles",
}
"""Stored names of classes that aren't public, which journals of conversions have, and the addresses that they had."""


def test_the_table_has_no_row_of_a_class_that_is_or_was_nowhere() -> None:
    lines = (line.split() for line in (FOLDER.parent / "addresses.txt").read_text().splitlines())
    was = {pickled for _, *last in lines for pickled in last}
    for address, name in _addresses.STORED_NAMES.items():
        kind = resolve_name(name)
        assert kind in CLASSES or name in IN_JOURNALS, name
        now = {pickled_as(kind), *map(new_address, was), *map(new_address, IN_JOURNALS)}
        assert new_address(address) in now, address


def test_every_public_class_has_an_instance_in_the_files() -> None:
    assert {stored_as(kind) for kind in CLASSES} == golden.INSTANCES.keys() | NEWER
    assert golden.INSTANCES.keys() - PICKLES.keys() == golden.NOT_PICKLED
    assert all(type(value) is resolve_name(name) for name, value in golden.INSTANCES.items())


# Files


@pytest.mark.parametrize("backend", golden.FORMATS)
def test_a_checkpoint_gives_the_classes(backend: str) -> None:
    tree = golden.tree(backend)
    options = st.LoadOptions(types=TYPES)
    common = st.load_common_state_dict(FOLDER / backend, options=options)["common"]
    assert common.keys() == tree["common"].keys()
    assert len(common) > (35 if backend in ("safetensors", "torch_dist") else 3)
    assert [name for name in common if not same(common[name], tree["common"][name])] == []
    cell = st.load({"object": tree["object"].without_data()}, FOLDER / backend, options=options)["object"]
    assert same(cell, tree["object"].data)


@pytest.mark.parametrize("backend", ["safetensors", "zarr"])
def test_without_the_classes_it_gives_records_by_public_addresses(backend: str) -> None:
    common = st.load_common_state_dict(FOLDER / backend)["common"]
    assert common.pop("shardtree.trees.Record", golden.INSTANCES["shardtree.trees.Record"]).type_name == "train.Config"
    assert {name: value.type_name for name, value in common.items()} == {name: name for name in common}


@pytest.mark.parametrize("name", sorted(PICKLES.keys() - CHANGED.keys()))
def test_a_pickle_gives_the_instance(name: str) -> None:
    assert same(content(pickle.loads(PICKLES[name])), content(golden.INSTANCES[name]))


@pytest.mark.parametrize("name", sorted(golden.NOT_PICKLED))
def test_what_no_pickle_holds_still_refuses(name: str) -> None:
    with pytest.raises((TypeError, st.CheckpointingException), match="pickl"):
        pickle.dumps(golden.INSTANCES[name])


def content(value: Any) -> Any:
    """Return a value, or the fields of an open checkpoint, without what it has read."""
    if isinstance(value, st.checkpoint.OpenCheckpoint):
        return content(value.checkpoint), value.metadata
    if isinstance(value, st.strategies.Checkpoint):
        return {field.name: getattr(value, field.name) for field in fields(value) if field.name != "cache"}
    return value


@pytest.mark.parametrize("name", sorted(CHANGED))
def test_a_pickle_of_a_class_that_has_changed_is_found(name: str) -> None:
    assert type(pickle.loads(PICKLES[name])) is resolve_name(name)


@pytest.mark.parametrize("backend", golden.FORMATS)
def test_a_conversion_goes_on_that_was_begun_before(backend: str) -> None:
    load_classes_of(backend)
    assert batches_done(backend) == {0}


def load_classes_of(backend: str) -> None:
    """Load the classes of a format that journals name, as every conversion to it does."""
    source = MemoryStorage()
    st.save({"w": golden.tree(backend)["w"]}, source)
    st.convert(source, MemoryStorage(), backend=backend)


def batches_done(backend: str) -> set[int]:
    """Return the batches that a conversion of then has written, as one of now reads its journal."""
    folder = MemoryStorage()
    data = (FOLDER / f"{backend}.done").read_bytes()
    for name, length in decode_tree(data)["lengths"].items():
        folder.write(name, [memoryview(bytes(length))], durable=False)
    folder.write(".convert-0/000000.done", [memoryview(data)], durable=False)
    return {*results_of(Journal(folder, ".convert-0"), 1)}


# Moves: a class whose module has another name now, and a row for it


@pytest.fixture(params=["shardtree.Mesh", "shardtree.StrategyAction", "shardtree.traces.Box"])
def moved(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the public address of a class that has moved."""
    name: str = request.param
    kind = resolve_name(name)
    monkeypatch.setitem(_addresses.STORED_NAMES, f"shardtree.errors.{kind.__name__}", name)
    monkeypatch.setattr(import_module("shardtree.errors"), kind.__name__, kind, raising=False)
    monkeypatch.setattr(kind, "__module__", "shardtree.errors")
    return name


def test_a_class_that_has_moved_is_found_in_old_files(moved: str) -> None:
    kind, value = resolve_name(moved), golden.INSTANCES[moved]
    options = st.LoadOptions(types=(kind,))
    assert same(st.load_common_state_dict(FOLDER / "safetensors", options=options)["common"][moved], value)
    types = (*TYPES, kind)
    everything = st.load_common_state_dict(FOLDER / "torch_dist", options=st.LoadOptions(types=types))
    assert same(everything["common"][moved], value)


def test_a_class_that_has_moved_is_stored_as_before(moved: str) -> None:
    kind, value = resolve_name(moved), golden.INSTANCES[moved]
    assert stored_as(kind) == moved
    assert decode_tree(encode_tree([value])) == [Record(moved, decode_tree(encode_tree([value]))[0].fields)]
    assert same(decode_tree(encode_tree([value]), types=(kind,)), [value])
    assert same(decode_archive(encode_archive([value]), what="archive", types=(kind,)), [value])


@pytest.mark.parametrize(
    ("backend", "held", "stored"),
    [
        ("safetensors", "shardtree.strategies.index._save.RankFiles", "shardtree.strategies.RankFiles"),
        ("zarr", "shardtree.strategies.zarr._save.RankFiles", "shardtree.strategies.zarr._save.RankFiles"),
    ],
    ids=["a public class", "a private class"],
)
def test_a_conversion_goes_on_whose_classes_have_moved(
    backend: str, held: str, stored: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_classes_of(backend)
    kind = resolve_name(held)
    monkeypatch.delattr(import_module(held.rpartition(".")[0]), kind.__name__)
    monkeypatch.setattr(import_module("shardtree.errors"), kind.__name__, kind, raising=False)
    monkeypatch.setattr(kind, "__module__", "shardtree.errors")
    assert batches_done(backend) == set(), "it would be written again"
    monkeypatch.setitem(_addresses.STORED_NAMES, f"shardtree.errors.{kind.__name__}", stored)
    assert batches_done(backend) == {0}


def test_a_class_that_has_moved_without_a_row_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(st.Mesh, "__module__", "shardtree.core.layouts._mesh")
    assert stored_as(st.Mesh) not in CLASSES[st.Mesh], "the table's test fails"
    common = st.load_common_state_dict(FOLDER / "safetensors", options=st.LoadOptions(types=(st.Mesh,)))
    assert type(common["common"]["shardtree.Mesh"]) is Record


def test_a_name_of_others_stays_what_it_is() -> None:
    record = Record("train._config.Config", {"rate": 0.5})
    assert decode_tree(encode_tree(record)) == record
    near = Record("shardtree.layouts.meshes._mesh.Mesh2", {})
    assert decode_tree(encode_tree(near)) == near
