"""verify's law in every format: what changes in a file is found, or lies in what verify says it couldn't check."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, reduce
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some

import shardtree as st
from shardtree.errors import CheckpointingException
from shardtree.shell.table import find_strategy
from shardtree.storage import LocalStorage
from shardtree.strategies import default_strategies
from tests.options import load_keywords
from tests.shell.checkpoint.parts import files as walk
from tests.shell.checkpoint.parts import saved_by, whole
from tests.shell.table.folders import Files, flipped, folder_of

FIXTURES = Path(__file__).parents[1] / "fixtures"
NATIVE, TORCH_DIST, VERIFY = ("safetensors", 1), ("torch_dist", 1), st.StrategyAction.VERIFY


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """A sound checkpoint, and what verify says that it couldn't check of it."""

    files: Files
    unchecked: tuple[st.strategies.Unchecked, ...]


def saved(sharded: Any, common: Any = None, *, plain: bool = True) -> Files:
    def tree(rank: int) -> dict[str, Any]:
        part = torch.arange(12.0).reshape(2, 6) + rank
        shards = {
            "w": whole("w", part, (0, rank, 2)),
            "b": whole("b", torch.ones(3, dtype=torch.bfloat16), replica_id=rank),
        }
        return shards | ({"o": st.ShardedObject("o", {"rank": rank}, (2,), (rank,)), "step": 3} if plain else {})

    folder = saved_by([tree(rank) for rank in range(2)], sharded_strategy=sharded, common_strategy=common)
    return {name: folder.read(name) for name in walk(folder)}


def fixture(name: str) -> Files:
    return {
        path.relative_to(FIXTURES / name).as_posix(): path.read_bytes()
        for path in sorted((FIXTURES / name).rglob("*"))
        if path.is_file() and path.name not in ("truth.safetensors", "fsdp_config.json")  # no reader takes these
    }


def with_manifest(files: Files) -> Files:
    hashes = {name: sha256(data).hexdigest() for name, data in files.items()}
    text = json.dumps({"algorithm": "sha256", "files": hashes}, indent=2)
    return files | {"integrity.json": text.encode()}


FORMATS: dict[str, Callable[[], Files]] = {
    "native": lambda: saved(NATIVE),
    "torch_dist": lambda: saved(TORCH_DIST),
    "torch_dist beside a native common state": lambda: saved(TORCH_DIST, NATIVE),
    "torch_dist of Megatron-Core, with integrity.json": lambda: with_manifest(fixture("megatron_0140_torch_dist_flat")),
    "dcp": lambda: saved(("dcp", 1)),
    "zarr 3": lambda: saved(("zarr", 3)),
    "zarr 3 of another program": lambda: others_zarr(),
    "zarr 1": lambda: fixture("megatron_old_zarr"),
    "huggingface": lambda: saved(("huggingface", 1), plain=False),
    "ZeRO-1": lambda: fixture("deepspeed_zero1_dp2"),
    "ZeRO-3": lambda: fixture("deepspeed_zero3_dp4"),
    "files of DTensors": lambda: fixture("dtensor_fsdp2_w4"),
}
CHECKED_WHOLE = ["native", "torch_dist of Megatron-Core, with integrity.json", "zarr 3"]


def others_zarr() -> Files:
    files = saved(("zarr", 3))
    root = {"zarr_format": 3, "node_type": "group", "attributes": {}}
    arrays = {name: data for name, data in files.items() if name.partition("/")[0] in ("w", "b")}
    return {**arrays, "zarr.json": json.dumps(root).encode()}


@cache
def case(name: str) -> Case:
    files = FORMATS[name]()
    damage, report = verified(files)
    assert damage == report.damage == ()
    # Each byte was checked or is known not to be; DeepSpeed's `latest` only says which folder is meant.
    assert report.bytes_checked + report.unchecked_nbytes == sum(len(files[file]) for file in files if file != "latest")
    assert report.sound is (None if report.unchecked else True)
    return Case(files, report.unchecked)


def verified(files: Files, **options: Any) -> tuple[tuple[st.strategies.Damage, ...], st.strategies.VerifyReport]:
    reports: list[st.strategies.VerifyReport] = []
    damage = st.verify(folder_of(files), report=reports.append, **load_keywords(**options))
    return damage, reports[0]


def is_found(files: Files, **options: Any) -> bool:
    try:
        damage, report = verified(files, **options)
        assert (report.sound is False) == bool(damage) and report.damage == damage
        return bool(damage)
    except CheckpointingException:
        return True


def check_flip(one: Case, name: str, bit: int, **options: Any) -> None:
    """A flipped bit is found, or is one that verify says it can't see."""
    known = any(unchecked.covers(name, bit // 8) for unchecked in one.unchecked)
    assert known or is_found(flipped(one.files, name, bit), **options), (name, bit)


def places(one: Case) -> some.SearchStrategy[tuple[str, int]]:
    """Any bit of any file: each file as likely as another, its ends likelier than its middle."""

    def bits(name: str) -> some.SearchStrategy[tuple[str, int]]:
        last = 8 * len(one.files[name]) - 1
        middle = some.integers(0, last)
        return some.tuples(some.just(name), middle | some.integers(0, min(last, 999)) | middle.map(lambda n: last - n))

    return some.sampled_from([name for name, data in sorted(one.files.items()) if data]).flatmap(bits)


@pytest.mark.parametrize("name", ["native", *(pytest.param(name, marks=pytest.mark.slow) for name in [*FORMATS][1:])])
def test_a_flipped_bit_of_any_file_is_found_or_known_to_be_unchecked(name: str) -> None:
    one = case(name)

    @settings(max_examples=50, deadline=None)
    @given(places(one))
    def law(place: tuple[str, int]) -> None:
        check_flip(one, *place)

    law()


def test_all_damage_is_listed_at_once_with_the_keys_of_tensors_and_objects() -> None:
    files = case("native").files
    names = [name for name in files if "index" not in name and "/" in name]
    damage, _ = verified(reduce(lambda changed, name: flipped(changed, name, 8 * len(changed[name]) - 1), names, files))
    assert {one.file for one in damage} == {*names} and len(damage) == len(names) == 3
    assert {one.keys for one in damage if "00001-of" in one.file} == {("w", "o/shard_1_2")}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", FORMATS)
def test_every_byte_of_every_file(name: str) -> None:
    one = case(name)
    for file, data in one.files.items():
        for byte in range(len(data)):
            check_flip(one, file, 8 * byte + byte % 8)


@pytest.mark.parametrize("name", FORMATS)
def test_these_formats_have_checksums_for_every_byte(name: str) -> None:
    assert (case(name).unchecked == ()) == (name in CHECKED_WHOLE)


def test_a_save_without_checksums_is_checked_in_part(tmp_path: Path) -> None:
    st.save({"w": whole("w", torch.ones(9)), "step": 1}, tmp_path, options=st.SaveOptions(checksums=False))
    reports: list[st.strategies.VerifyReport] = []
    assert st.verify(tmp_path, report=reports.append) == ()
    (report,) = reports
    assert report.sound is None and report.unchecked_nbytes > 0 and report.bytes_checked > 0


def test_a_common_state_that_nothing_checks_is_unchecked() -> None:
    files = FORMATS["torch_dist beside a native common state"]()
    table = {row: default_strategies[row] for row in default_strategies if row != (VERIFY, *NATIVE)}
    reports: list[st.strategies.VerifyReport] = []
    assert st.verify(folder_of(files), report=reports.append, strategies=table) == ()
    why = "the format safetensors 1 cannot check a common state"
    assert why in {one.why for one in reports[0].unchecked} and reports[0].sound is None


@pytest.mark.parametrize("name", ["torch_dist", "dcp"])
def test_most_bytes_of_archives_that_count_have_checksums(name: str) -> None:
    one = case(name)
    needle = torch.arange(12.0).numpy().tobytes()
    (file,) = [file for file, data in one.files.items() if needle in data]
    begin = one.files[file].index(needle)
    assert not any(unchecked.covers(file, begin + at) for unchecked in one.unchecked for at in range(len(needle)))


def changes(one: Case, name: str) -> dict[str, Files]:
    data = one.files[name]
    gone = {other: content for other, content in one.files.items() if other != name}
    return {
        "one byte less": one.files | {name: data[:-1]},
        "one byte more": one.files | {name: data + b"\0"},
        "empty": one.files | {name: b""},
        "gone": gone,
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_a_file_of_another_length_or_none_is_found(name: str) -> None:
    one = case(name)
    for file, data in one.files.items():
        whole = any(unchecked.covers(file, len(data)) for unchecked in one.unchecked if not unchecked.spans)
        for change, files in changes(one, file).items():
            # Without these nobody knows that they were there; a pickle may go on after its end.
            silent = change == "gone" and (file == "integrity.json" or (file == "metadata.json" and "beside" in name))
            silent |= change == "gone" and name == "zarr 1" and "shard_" in file
            silent |= whole and change in ("one byte more", "gone")
            assert is_found(files) or silent or not data, (file, change)


@pytest.mark.parametrize("name", CHECKED_WHOLE)
def test_two_files_that_changed_places_are_found(name: str) -> None:
    one = case(name)
    names = sorted(one.files)
    for left, right in pairwise(names):
        if one.files[left] != one.files[right]:
            assert is_found(one.files | {left: one.files[right], right: one.files[left]}), (left, right)


# Planted faults.


def without_headers(checkpoint: Any) -> tuple[Any, ...]:
    """A row that takes no notice of files' first blocks, in which their headers are."""
    row = find_strategy(VERIFY, *NATIVE)
    assert row is not None
    return tuple(one for one in row(checkpoint) if "-of-" not in one.file or getattr(one, "begin", 1))


def all_checked(checkpoint: Any) -> tuple[Any, ...]:
    """A row that claims to have checked what it can't."""
    row = find_strategy(VERIFY, *TORCH_DIST)
    assert row is not None
    kinds = st.strategies
    return tuple(
        kinds.Checked(one.file, one.nbytes) if isinstance(one, kinds.Unchecked) else one for one in row(checkpoint)
    )


def test_the_law_of_flips_catches_a_row_that_skips_headers() -> None:
    one = case("native")
    name = next(name for name in one.files if "-of-" in name)
    table = dict(default_strategies) | {(VERIFY, *NATIVE): without_headers}
    with pytest.raises(AssertionError):
        check_flip(one, name, 8 * 100, strategies=table)


def test_the_law_of_flips_catches_a_row_that_claims_too_much() -> None:
    one = case("torch_dist")
    table = dict(default_strategies) | {(VERIFY, *TORCH_DIST): all_checked}
    claimed = Case(one.files, verified(one.files, strategies=table)[1].unchecked)
    data = one.files["__0_0.distcp"]
    with pytest.raises(AssertionError):
        check_flip(claimed, "__0_0.distcp", 8 * (data.index(b"FB") + 8), strategies=table)


# What couldn't be checked is said.


def test_files_of_which_a_row_says_nothing_are_unchecked() -> None:
    table = dict(default_strategies) | {(VERIFY, *TORCH_DIST): lambda checkpoint: ()}
    report = verified(case("torch_dist").files, strategies=table)[1]
    assert report.sound is None and "__0_0.distcp" in {one.file for one in report.unchecked}


def test_without_a_report_the_log_says_what_was_not_checked(caplog: pytest.LogCaptureFixture) -> None:
    files = case("huggingface").files
    assert st.verify(folder_of(files)) == ()
    assert "could not be checked: this format carries no checksums" in caplog.text
    caplog.clear()
    assert st.verify(folder_of(case("native").files)) == ()
    assert caplog.text == ""


def test_unchecked_bytes_lie_in_the_files() -> None:
    for name in FORMATS:
        one = case(name)
        for unchecked in one.unchecked:
            length = len(one.files[unchecked.file])
            spans = unchecked.spans or ((0, length),)
            assert sum(end - begin for begin, end in spans) == unchecked.nbytes <= length
            assert all(0 <= begin < end <= length for begin, end in spans)


# Chunks of other programs, packed by their codecs.


@pytest.mark.parametrize("codec", ["crc32c", "gzip", "zstd"])
def test_chunks_of_codecs(codec: str, tmp_path: Path) -> None:
    zarr = pytest.importorskip("zarr")
    packed = {"crc32c": zarr.codecs.Crc32cCodec, "gzip": zarr.codecs.GzipCodec, "zstd": zarr.codecs.ZstdCodec}[codec]()
    group = zarr.open_group(str(tmp_path / "data"), mode="w", zarr_format=3)
    array = group.create_array("w", shape=(8, 6), chunks=(4, 6), dtype="int32", compressors=[packed])
    array[...] = torch.arange(48).reshape(8, 6).numpy()
    folder = LocalStorage(str(tmp_path / "data"))
    one = Case({name: folder.read(name) for name in walk(folder)}, ())
    damage, report = verified(one.files)
    assert damage == ()
    chunks = {unchecked.file for unchecked in report.unchecked if not unchecked.file.endswith("zarr.json")}
    assert chunks == (set() if codec == "crc32c" else {"w/c/0/0", "w/c/1/0"})
    if codec == "crc32c":
        for byte in range(len(one.files["w/c/1/0"])):
            check_flip(one, "w/c/1/0", 8 * byte)
        broken = bytes(len(one.files["w/c/1/0"]))
        ((found,), _) = verified(one.files | {"w/c/1/0": broken})
        assert found.regions == (st.strategies.Region("w", (4, 0), (8, 6)),)


def test_a_folder_on_disk_is_checked_as_one_in_memory(tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "megatron_0161_tp2", tmp_path / "copy")
    assert st.verify(tmp_path / "copy", options=st.LoadOptions(threads=3)) == ()
