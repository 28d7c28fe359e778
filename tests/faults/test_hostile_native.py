"""Native checkpoints made to hurt, their hashes all right: every entry point ends in bounded time and 100 MB."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as some
from typer.testing import CliRunner

import shardtree as st
from shardtree.cli._app import app
from shardtree.errors import CheckpointingException, UnsupportedValue
from shardtree.shell.table.index import COLUMNS, Index
from tests.faults.entry_points import QUICK, entry_points
from tests.faults.forged import (
    COMMON,
    DATA,
    INDEX,
    SAVE,
    SOUND_DATA,
    SOUND_INDEX,
    chunks,
    common_of,
    forge,
    hashed,
    tensors,
    texts,
)
from tests.faults.sampling import usually
from tests.fuzz.watch import Growth

MOST_SECONDS = 10.0
"""Of processor time, for a call: ten times what an idle machine needs, so that only a wrong order of growth fails."""

MOST_BYTES = 100_000_000
"""By which a call may let the process grow, at its largest."""

LONGEST = 30_000
"""Characters in an error's message."""

MODULUS = 2**61 - 1  # integers are hashed modulo this
HUGE = 2**63 - 1


def measured(call: Callable[[], Any]) -> tuple[bool, float, int]:
    """Return whether a call gave a result, its seconds of processor time, and by how many bytes the process grew."""
    growth, begin = Growth(), time.process_time()
    try:
        call()
        sound = True
    except CheckpointingException as error:
        assert 0 < len(str(error)) < LONGEST
        sound = False
    return sound, time.process_time() - begin, growth.most()


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a sound checkpoint; every entry point has been called once, so that no measure counts an import."""
    folder = tmp_path_factory.mktemp("sound")
    forge(folder / "kept")
    for _, call in entry_points(forge(folder / "warm"), folder / "elsewhere", folder / "kept"):
        call()
    return folder / "kept"


def check(folder: Path, elsewhere: Path, sound: Path) -> set[str]:
    """Call every entry point within the bounds, and return which of them gave a result."""
    fine = set()
    for name, call in entry_points(folder, elsewhere, sound):
        is_result, seconds, growth = measured(call)
        assert seconds < MOST_SECONDS, f"{name} took {seconds:.1f} s"
        assert growth < MOST_BYTES, f"{name} took {growth / 1e6:.0f} MB"
        fine |= {name} if is_result else set()
    return fine


def zeros(count: int) -> np.ndarray[Any, Any]:
    return np.zeros(count, np.int64)


def same_chunks(folder: Path) -> Path:
    """One box, stored twenty thousand times, in bytes of its own each."""
    count = 20_000
    found = tensors(["w"], [[2**40]]) | chunks(zeros(count), zeros(count)[:, None], np.full((count, 1), 4), 0, 1)
    return forge(folder, data=bytes(4 * count), columns=found | {"chunk_byte": np.arange(count) * 4})


def nested_chunks(folder: Path) -> Path:
    """Boxes of which each holds all that come after it."""
    count = 500
    offset = np.arange(count)[:, None]
    place = np.concatenate([[0], np.cumsum(count - offset)[:-1]])
    columns = tensors(["w"], [[2**40]]) | chunks(zeros(count), offset, count - offset, place, 1)
    return forge(folder, data=bytes(count * count), columns=columns)


def crossing_bars(folder: Path) -> Path:
    """Rows in one half of a matrix and columns in the other: along each axis, half of all boxes begin together."""
    count, k = 2000, 1000
    rows = np.stack([np.arange(k), zeros(k)], axis=1), np.tile([1, k], (k, 1))
    columns = np.stack([np.full(k, k), np.arange(k)], axis=1), np.tile([k, 1], (k, 1))
    offset, shape = (np.concatenate(pair) for pair in zip(rows, columns, strict=True))
    found = tensors(["w"], [[2 * k, k]]) | chunks(zeros(count), offset, shape, np.arange(count) * k, 1)
    return forge(folder, data=bytes(2 * k * k), columns=found)


def one_place_for_many(folder: Path) -> Path:
    """Twenty thousand tensors in the same megabyte: 20 GB from a small file."""
    count, size = 20_000, 999_000
    names = sorted(f"k{number}" for number in range(count))
    shape = np.full((count, 1), size)
    columns = tensors(names, shape) | chunks(np.arange(count), zeros(count)[:, None], shape, 0, 1)
    return forge(folder, data=bytes(size), columns=columns)


def one_place_for_many_objects(folder: Path) -> Path:
    """Two thousand objects in the same megabyte."""
    data, count = common_of(["a" * 1_000_000]), 2000
    columns = tensors(["w"], [[4]]) | chunks([0], [[0]], [[4]], 0, 1)
    places = {"object_file": zeros(count), "object_byte": zeros(count), "object_length": np.full(count, len(data))}
    names = texts("object", sorted(f"o{number}/shard_0_1" for number in range(count)))
    return forge(folder, data=data, columns=columns | names | places)


def a_file_twice(folder: Path) -> Path:
    """The same file under two names, so that its bytes seem to be twice there."""
    blocks = np.repeat(hashed(SOUND_INDEX, SOUND_DATA).block_hash, 2)
    files = texts("file", [DATA, DATA.replace("/", "/./")]) | {"file_length": np.full(2, len(SOUND_DATA))}
    columns = files | {"file_block": np.array([0, 1, 2]), "block_hash": blocks}
    return forge(folder, columns=columns)


def many_files(folder: Path) -> Path:
    """Two thousand ranks' files, of which one is there."""
    count = 2000
    names = texts("file", [DATA, *(f"{SAVE}/{rank:05d}-of-02001.safetensors" for rank in range(1, count))])
    lengths = np.concatenate([[len(SOUND_DATA)], zeros(count - 1)])
    hashes = hashed(SOUND_INDEX, SOUND_DATA).block_hash
    blocks = np.concatenate([[0], np.full(count, len(hashes))])
    return forge(folder, columns=names | {"file_length": lengths, "file_block": blocks, "block_hash": hashes})


def one_tensor(shape: list[int], box: list[int], dtype: str = "uint8") -> Callable[[Path], Path]:
    columns = tensors(["w"], [shape], dtype) | chunks([0], [[0] * len(shape)], [box], 0, 1)
    return lambda folder: forge(folder, columns=columns)


def evil_keys(folder: Path) -> Path:
    """Keys that would be paths, markup, or orders to a terminal."""
    names = ["../../evil", "a/../../b", "/abs", "C:\\x", ".", "..", "zarr.json", "_shardtree/index", "a\0b", "a\nb"]
    names = sorted([*names, "\x1b]0;evil\x07", "[/b]", "[link=http://x]y", "\u202egnp", "x" * 100_000])
    shape = np.ones((len(names), 1), np.int64)
    columns = tensors(names, shape) | chunks(np.arange(len(names)), shape - 1, shape, np.arange(len(names)), 1)
    return forge(folder, columns=columns)


def sparse(name: str, length: int) -> Callable[[Path], Path]:
    """A file that says that it is very long, and takes no space."""

    def made(folder: Path) -> Path:
        with (forge(folder) / name).open("r+b") as file:
            file.truncate(length)
        return folder

    return made


def instead(name: str, data: bytes) -> Callable[[Path], Path]:
    return lambda folder: forge(folder, files={name: data})


def shares(text: str) -> Callable[[Path], Path]:
    return lambda folder: forge(folder, columns=texts("object", [text]))


def common(structure: Any, *blobs: tuple[str, list[int], bytes]) -> Callable[[Path], Path]:
    return lambda folder: forge(folder, common=common_of(structure, *blobs))


def fields(**changes: Any) -> Callable[[Path], Path]:
    return lambda folder: forge(folder, fields=changes)


def number(text: str) -> dict[str, str]:
    return {"$": "int", "hex": text}


def colliding(count: int) -> list[dict[str, str]]:
    return [number(f"{(16 + step) * MODULUS:x}") for step in range(count)]


def within(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


HARMLESS: dict[str, Callable[[Path], Path]] = {
    "crossing bars": crossing_bars,
    "many files": many_files,
    "256 axes": one_tensor([1] * 256, [1] * 256),
    "nothing times 2^57": one_tensor([0, 2**57], [0, 2**57]),
    "keys": evil_keys,
    "object of huge shape": shares("o/shard_0_" + "9" * 30),
    "object of many digits": shares("o/shard_0_" + "9" * 5000),
    "object of many axes": shares("o/shard_" + ".".join("0" * 10_000) + "_" + ".".join("1" * 10_000)),
    "object outside of its shape": shares("o/shard_5_2"),
    "object without a key": shares("/shard_0_1"),
    "a number of a million digits": common({"n": number("f" * 1_000_000)}),
    "a key of many digits": common({"$": "dict", "items": [[number("f" * 100_000), 1]]}),
    "a range to a far number": common({"$": "range", "start": 0, "stop": number("f" * 100_000), "step": 1}),
    "a size of many numbers": common({"$": "torch.Size", "lengths": [2**62] * 1000}),
    "a cursor beyond its file": common({"$": "io.BytesIO", "position": 2**62, "entry": "0"}, ("U8", [3], b"abc")),
    "a deque without end": common({"$": "deque", "maxlen": 2**62, "items": []}),
    "an empty tensor of huge shape": common({"$": "tensor", "entry": "0"}, ("F32", [0, 2**40, 2**20], b"")),
    "names of attributes": common({"__class__": 3, "a\0b": 4, "[/b]": 1, "\x1b]0;evil\x07": 2, "x" * 100_000: 5}),
    "values that steer": common({"a": "[/b]", "b": "\x1b[31m", "c": "x" * 1_000_000}),
    "no dict": common(5),
    "content of no kind": common({"content_metadata": 5}),
    "as deep as may be": common(b"[" * 99 + b"1" + b"]" * 99),
    "a save that climbs": fields(save_id="../../x"),
    "the folder as the save": fields(save_id="."),
    "a deep field": fields(x=within(400)),
}
"""Of which every entry point may give a result."""

CHECKPOINTS: dict[str, Callable[[Path], Path]] = {
    **HARMLESS,
    "same chunks": same_chunks,
    "nested chunks": nested_chunks,
    "one place for many": one_place_for_many,
    "one place for many objects": one_place_for_many_objects,
    "a file twice": a_file_twice,
    "an axis of 2^57, nearly empty": one_tensor([2**57], [4]),
    "a gigabyte, nearly empty": one_tensor([2**30], [4]),
    "rows of 2^44, nearly empty": one_tensor([2**44, 6], [4, 6]),
    "columns of 2^44, nearly empty": one_tensor([6, 2**44], [4, 6]),
    "planes of 2^22 squared, nearly empty": one_tensor([2**22, 2**22, 6], [1, 4, 6]),
    "bytes that overflow": one_tensor([2**62, 4], [1, 4]),
    "a dtype of no torch": one_tensor([4], [4], "float31"),
    "object without a shape": shares("o"),
    "object of negative shape": shares("o/shard_-1_1"),
    "keys of one hash": common({"$": "dict", "items": [[key, 0] for key in colliding(20_000)]}),
    "members of one hash": common({"$": "set", "items": colliding(5_000)}),
    "tuples of one hash": common({"$": "set", "items": [{"$": "tuple", "items": [n]} for n in colliding(5_000)]}),
    "a size beyond 64 bits": common({"$": "torch.Size", "lengths": [2**70]}),
    "lists in lists": common(b"[" * 100_000 + b"]" * 100_000),
    "an anchor and its alias": common(b'{"a": &a [1, *a]}'),
    "a reference to itself": common({"a": {"$": "ref", "path": []}}),
    "a pickle": common({"$": "pickle", "entry": "0"}, ("U8", [4], b"cos\n")),
    "a name twice": common(b'{"a":1,"a":2}'),
    "zero bytes": common(bytes(30_000_000)),
    "names that climb": fields(index={"name": "../../x", "length": 1, "digest": "0" * 16}),
    "an absolute name": fields(common={"name": "/dev/zero", "length": 1, "digest": "0" * 16}),
    "a backslash": fields(index={"name": "..\\..\\x", "length": 1, "digest": "0" * 16}),
    "a zero byte in a name": fields(index={"name": "a\0b", "length": 1, "digest": "0" * 16}),
    "a very long name": fields(index={"name": "x" * 100_000, "length": 1, "digest": "0" * 16}),
    "a backend of a megabyte": fields(sharded_backend="x" * 1_000_000),
    "a backend that steers": fields(sharded_backend="[/b]\x1b[31m"),
    "a version of 4000 digits": fields(sharded_backend_version=10**4000),
    "metadata.json, deep": instead("metadata.json", b"[" * 100_000),
    "metadata.json, a name twice": instead("metadata.json", b'{"sharded_backend":"safetensors","sharded_backend":"x"}'),
    "metadata.json, a million digits": instead("metadata.json", b'{"a":' + b"9" * 1_000_000 + b"}"),
    "metadata.json, 50 MB of spaces": instead("metadata.json", b" " * 50_000_000),
    "metadata.json, 1 TB": sparse("metadata.json", 2**40),
    "data file, 1 TB": sparse(DATA, 2**40),
    "index, 1 TB": sparse(INDEX, 2**40),
    "common file, 1 TB": sparse(COMMON, 2**40),
    "data file, cut": instead(DATA, SOUND_DATA[:-1]),
    "header of 2^63 bytes": lambda folder: forge(folder, common=(2**63).to_bytes(8, "little") + b"{}"),
    "header that is cut": lambda folder: forge(folder, common=(100).to_bytes(8, "little") + b"{}"),
    "index, header of 2^64 bytes": lambda folder: forge(folder, index=b"\xff" * 8 + b"{}"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", usually(list(CHECKPOINTS), 30))
def test_every_entry_point_ends_within_bounds(name: str, sound: Path, tmp_path: Path) -> None:
    beside = tmp_path / "beside.txt"
    beside.write_text("mine")
    folder = CHECKPOINTS[name](tmp_path / "a" / "checkpoint")
    fine = check(folder, tmp_path / "b" / "elsewhere", sound)
    assert fine < {found for found, _ in entry_points(folder, tmp_path, sound)} or name in HARMLESS
    assert beside.read_text() == "mine"
    assert {path.name for path in tmp_path.iterdir()} <= {"a", "b", "beside.txt"}


def busy(seconds: float) -> None:
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


@pytest.mark.exhaustive
def test_the_measures_catch_what_is_slow_and_what_is_large(sound: Path) -> None:
    """The planted faults."""
    assert measured(lambda: busy(MOST_SECONDS))[1] > MOST_SECONDS
    assert measured(lambda: np.ones(MOST_BYTES // 4))[2] > MOST_BYTES
    with pytest.raises(ZeroDivisionError):
        measured(lambda: 1 // 0)


def test_a_dtype_of_no_torch_concerns_its_tensor_alone(tmp_path: Path) -> None:
    folder = forge(tmp_path, columns=texts("dtype", ["float31", "int8"]))
    loaded = st.load({"b": st.ShardedTensor("b", None, torch.int8, (8,), (8,), (0,), None)}, folder)
    assert loaded["b"].tolist() == list(range(8)) and loaded["step"] == 7
    assert st.open_checkpoint(folder)["b"].data.read().tolist() == list(range(8))
    assert not st.verify(folder)
    for call in (st.load_plain_tensors, lambda folder: st.open_checkpoint(folder)["w"]):
        with pytest.raises(UnsupportedValue, match=r"'w'(.|\n)*float31"):
            call(folder)
    assert CliRunner().invoke(app, ["inspect", str(folder)]).exit_code == 0
    st.remove_sharded_tensors(folder, "w")
    assert list(st.load_plain_tensors(folder)) == ["b"]


@pytest.mark.parametrize("name", [DATA, INDEX, COMMON, "metadata.json", SAVE])
def test_no_link_leads_a_change_out_of_the_folder(name: str, tmp_path: Path) -> None:
    folder, outside = forge(tmp_path / "checkpoint"), tmp_path / "outside"
    shutil.move(folder / name, outside)
    (folder / name).symlink_to(outside)
    before = contents(outside)
    for call in (partial(st.remove_sharded_tensors, folder, "w"), partial(st.remove_sharded_tensors, folder, "")):
        measured(call)
    measured(partial(st.save, {"step": 8}, folder, overwrite=True, options=QUICK))
    if name != SAVE:  # what is in a folder that a link names, is in the checkpoint
        assert contents(outside) == before
    assert outside.exists()


def contents(path: Path) -> dict[str, bytes]:
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return {file.name: file.read_bytes() for file in files}


def test_a_save_that_a_link_stands_for_is_not_emptied_as_a_left_over(tmp_path: Path) -> None:
    other = forge(tmp_path / "other")
    folder = forge(tmp_path / "checkpoint")
    link = folder / "save-20200102T030405-0123456789abcdef"
    link.symlink_to(other / SAVE)
    st.save({"step": 8}, folder, overwrite=True, options=st.SaveOptions(durable=False, stale_after=0.0))
    assert not st.verify(other)


@pytest.mark.parametrize("files", [["notes.txt"], ["../outside.txt"], [f"{SAVE}/../notes.txt"], ["link/notes.txt"]])
def test_nothing_that_no_save_wrote_is_removed(files: list[str], tmp_path: Path) -> None:
    (tmp_path / "outside.txt").write_text("mine")
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "notes.txt").write_text("mine")
    folder = forge(tmp_path / "checkpoint", columns=texts("file", files), files={"notes.txt": SOUND_DATA})
    (folder / "link").symlink_to(tmp_path / "far")
    for call in (
        partial(st.remove_sharded_tensors, folder, ""),
        partial(st.save, {"step": 8}, folder, overwrite=True, options=st.SaveOptions(durable=False, stale_after=0.0)),
    ):
        measured(call)
    assert (folder / "notes.txt").read_bytes() == SOUND_DATA
    assert (tmp_path / "outside.txt").read_text() == (tmp_path / "far" / "notes.txt").read_text() == "mine"


NUMBERS = some.sampled_from([0, 1, 2, 3, 4, 5, 6, 7, 8, 24, 64, -1, -2, 2**31, 2**32, 2**60, HUGE, -HUGE - 1])
CHANGES = some.lists(
    some.tuples(
        some.sampled_from([name for name in COLUMNS if not name.endswith("_text") and name != "block_hash"]),
        some.integers(0, 99),
        some.one_of(NUMBERS, some.integers(-3, 3).map(lambda step: f"{step:+d}")),
    ),
    min_size=1,
    max_size=3,
)
WHOLE = {"w": torch.arange(24.0).reshape(4, 6), "b": torch.arange(8, dtype=torch.int8)}


def changed(index: Index, changes: list[tuple[str, int, int | str]]) -> dict[str, Any]:
    """Return columns with other numbers in some rows."""
    columns: dict[str, Any] = {}
    for name, place, value in changes:
        column = columns.setdefault(name, np.array(getattr(index, name)))
        if column.size:
            flat = column.reshape(-1)
            flat[place % flat.size] = (
                value if isinstance(value, int) else np.clip(flat[place % flat.size], -9, 99) + int(value)
            )
    return columns


def touched(columns: dict[str, Any]) -> set[str]:
    """Return the tensors that changed columns say something new of."""
    rows = {number for name, column in columns.items() for number in _numbers(name, column)}
    return {["b", "w"][number] for number in rows if number < 2}


def _numbers(name: str, column: Any) -> list[int]:
    """Return which tensors a column's differences are about; all where that isn't one row a tensor or chunk."""
    old = getattr(SOUND_INDEX, name)
    if name.startswith(("chunk_", "key_")) and name not in ("key_start", "chunk_key"):
        return np.flatnonzero((column != old).reshape(len(old), -1).any(axis=1)).tolist()
    return [0, 1] if (column != old).any() and not name.startswith("object_") else []


def untouched_is_as_it_was(read: Callable[[Path], dict[str, torch.Tensor]], folder: Path, about: set[str]) -> bool:
    """The law: an error of ours, or tensors of which those that nothing was said about are as they were."""
    try:
        found = read(folder)
    except CheckpointingException:
        return True
    return all(key in about or torch.equal(found[key], whole) for key, whole in WHOLE.items() if key in found)


@pytest.mark.slow
@settings(max_examples=40)
@given(CHANGES)
def test_changed_columns_are_refused_or_leave_the_rest_as_it_was(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[str, int, int | str]]
) -> None:
    columns = changed(SOUND_INDEX, changes)
    assume(columns)
    folder = forge(tmp_path_factory.mktemp("changed"), columns=columns)
    assert untouched_is_as_it_was(st.load_plain_tensors, folder, touched(columns))
    for _, call in list(entry_points(folder, folder / "elsewhere", folder))[:10]:
        measured(call)
    shutil.rmtree(folder)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in COLUMNS if not name.endswith("_text") and name != "block_hash"])
def test_each_column_wrong_in_turn_is_refused_or_leaves_the_rest_as_it_was(name: str, tmp_path: Path) -> None:
    for value in (-1, 2**40, HUGE, -HUGE - 1):
        for place in (0, -1):
            columns = changed(SOUND_INDEX, [(name, place, value)])
            folder = forge(tmp_path / f"{value} {place}", columns=columns)
            assert untouched_is_as_it_was(st.load_plain_tensors, folder, touched(columns))
            measured(partial(st.verify, folder))
            measured(partial(st.remove_sharded_tensors, folder, "b"))


def test_changed_columns_catches_a_reader_of_the_wrong_tensor(tmp_path: Path) -> None:
    """The planted fault."""
    folder = forge(tmp_path, columns=changed(SOUND_INDEX, [("chunk_byte", 1, "+4")]))
    assert touched(changed(SOUND_INDEX, [("chunk_byte", 1, "+4")])) == {"w"}
    assert not untouched_is_as_it_was(lambda _: {key: whole + 1 for key, whole in WHOLE.items()}, folder, {"w"})
