"""Overwriting where a format has files with fixed names: the two folders are exchanged, and what isn't ours is kept."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import shardtree as st
from shardtree.errors import (
    AlreadyACheckpoint,
    CheckpointReplaced,
    CorruptCheckpoint,
    StorageError,
    StrategyError,
)
from shardtree.shell.storage import owner_note
from shardtree.storage import LocalStorage, MemoryStorage, wrapped
from shardtree.strategies import StrategyAction, default_strategies
from shardtree.testing import Call, watched
from tests.faults.sampling import SEED, first
from tests.options import save_keywords

NATIVE = ("safetensors", 1)
FORMATS: dict[str, tuple[Any, Any]] = {
    "native": (NATIVE, None),
    "torch_dist": (("torch_dist", 1), None),
    "dcp": (("dcp", 1), None),
    "zarr": (("zarr", 3), None),
    "huggingface": (("huggingface", 1), None),
    "huggingface and native": (("huggingface", 1), NATIVE),
}
FOREIGN = [name for name in FORMATS if name != "native"]
PAIRS = [(old, new) for old in FORMATS for new in FORMATS if (old, new) != ("native", "native")]
OLD, NEW = 1.0, 2.0
DEAD = "save-20200101T000000-0123456789abcdef"


def tree(value: float, form: str, rank: int = 0, ranks: int = 1) -> dict[str, Any]:
    """A tree that the format can hold: Hugging Face models hold tensors alone."""
    shards = {
        "w": st.ShardedTensor.from_rank_offsets("w", torch.full((2, 3), value), (0, rank, ranks)),
        "norm": st.ShardedTensor.from_rank_offsets("norm", torch.full((3,), value), replica_id=rank),
    }
    return shards if form == "huggingface" else {**shards, "step": value}


def save(storage: Any, value: float, form: str, ranks: int = 1, **options: Any) -> None:
    st.simulate(
        ranks,
        lambda world: st.save(
            tree(value, form, world.rank, ranks), storage, *FORMATS[form], world=world, **save_keywords(**options)
        ),
    )


def value_in(storage: Any) -> float | None:
    """Return which checkpoint is there, having read all of it; None if there is none."""
    if not st.is_checkpoint(storage):
        return None
    tensors = st.load_plain_tensors(storage, options=st.LoadOptions(verify="all"))
    (value,) = {number for tensor in tensors.values() for number in tensor.flatten().tolist()}
    common = st.load_common_state_dict(storage)
    assert set(tensors) == {"w", "norm"} and common in ({}, {"step": value})
    return float(value)


def inside(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()}


def sampled(pairs: list[tuple[str, str]]) -> list[Any]:
    """Every pair, but only so many of them usually that each format is once on each side."""
    by_seed = SEED % len(FORMATS)
    usual = [pair for number, pair in enumerate(pairs) if (number - by_seed) % (len(FORMATS) + 1) == 0]
    return [pair if pair in usual else pytest.param(*pair, marks=pytest.mark.exhaustive) for pair in pairs]


@pytest.mark.parametrize(("old", "new"), sampled(PAIRS))
def test_every_format_replaces_every_other_as_a_whole(tmp_path: Path, old: str, new: str) -> None:
    folder, fresh = tmp_path / "step", tmp_path / "fresh"
    save(folder, OLD, old)
    with pytest.raises(AlreadyACheckpoint, match="overwrite=True"):
        save(folder, NEW, new)
    save(folder, NEW, new, overwrite=True)
    save(fresh, NEW, new)
    assert value_in(folder) == NEW
    assert len(inside(folder)) == len(inside(fresh)), "files of the old checkpoint stay"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fresh", "step"]


def snapshot(storage: MemoryStorage) -> MemoryStorage:
    return MemoryStorage(dict(storage._files), dict(storage._folders), count(10**6))


class Killed(Exception):
    """What a storage raises from the call on at which its process is dead."""


def dying(storage: MemoryStorage, number: int) -> Any:
    def strike(call: Call) -> None:
        if call.number >= number:
            raise Killed(f"at {call}")

    return watched(storage, before=strike)


def check_kill_law(old: str, new: str, ranks: int, *, step: int = 1, storage_of: Any = watched) -> int:
    """Raise unless a save that dies at any call leaves old or new, and the next one leaves nothing but its own files.

    Files that aren't a checkpoint's are there all the time. Returns how many calls there are.
    """
    begin, notes = MemoryStorage(), [memoryview(b"mine")]
    save(begin, OLD, old, ranks)
    for name in ("config.json", "deep/down/notes.txt"):
        begin.write(name, notes, durable=True)
    calls: list[Call] = []
    save(watched(storage_of(snapshot(begin)), before=calls.append), NEW, new, ranks, overwrite=True)
    for number in range(first(step), len(calls) + 1, step):
        storage = snapshot(begin)
        done = False
        with suppress(Killed, st.CheckpointingException):
            save(dying(storage_of(storage), number), NEW, new, ranks, overwrite=True)
            done = True
        found = value_in(storage)
        assert found in ((NEW,) if done else (OLD, NEW)), f"{found} after {calls[number - 1]}"
        assert {"config.json", "deep"} <= set(storage.names()), f"lost after {calls[number - 1]}"
        save(storage_of(storage), NEW, new, ranks, overwrite=True, stale_after=0.0)
        assert value_in(storage) == NEW and storage.read("deep/down/notes.txt") == b"mine"
        assert storage.siblings() == (), f"left over beside it after {calls[number - 1]}"
        saves = [name for name in storage.names() if name.startswith("save-")]
        assert len(saves) == ("native" in new), f"left over: {saves} after {calls[number - 1]}"
    return len(calls)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new", "ranks"), [("torch_dist", "torch_dist", 1), ("huggingface", "native", 1), ("native", "zarr", 2)]
)
def test_a_save_that_dies_leaves_the_old_checkpoint_or_the_new(old: str, new: str, ranks: int) -> None:
    assert check_kill_law(old, new, ranks, step=2 * ranks - 1) > 20


@pytest.mark.exhaustive
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("old", "new"), PAIRS)
def test_for_every_pair_of_formats_old_or_new_is_left(old: str, new: str, ranks: int) -> None:
    check_kill_law(old, new, ranks)


def beside(storage: MemoryStorage, change: Callable[[Any], dict[str, Any]]) -> Any:
    """Return a storage whose sibling does some things in another way."""

    def sibling(name: str) -> Any:
        inner = storage.sibling(name)
        methods = {each: getattr(inner, each) for each in dir(inner) if not each.startswith("_")}
        return SimpleNamespace(**{**methods, **change(inner)})

    return wrapped(storage, sibling=sibling, siblings=storage.siblings)


def exchanged_first(storage: MemoryStorage) -> Any:
    """The planted fault: the folder takes the other one's place before anything is in it."""

    def hasty(inner: Any) -> dict[str, Any]:
        def make(note: bytes, *, durable: bool) -> None:
            inner.make(note, durable=durable)
            inner.exchange(durable=durable)

        return {"make": make}

    return beside(storage, hasty)


def removed_whole(storage: MemoryStorage) -> Any:
    """The planted fault: what isn't the checkpoint's isn't taken along."""
    return beside(storage, lambda _: {"share": lambda names, *, durable: ()})


@pytest.mark.parametrize(
    ("fault", "found"),
    [(exchanged_first, "not a checkpoint|None after"), (removed_whole, "lost|notes")],
)
def test_the_law_catches(fault: Any, found: str) -> None:
    with pytest.raises((AssertionError, st.CheckpointingException), match=found):
        check_kill_law("torch_dist", "torch_dist", 1, step=9, storage_of=fault)


# -- files that aren't a checkpoint's


def test_what_is_not_the_checkpoints_is_kept_as_it_is(tmp_path: Path) -> None:
    folder, other = tmp_path / "step", tmp_path / "other"
    save(folder, OLD, "torch_dist")
    other.mkdir()
    (other / "far.txt").write_text("far")
    (folder / "config.json").write_text("mine")
    (folder / "empty" / "deep").mkdir(parents=True)
    (folder / "link").symlink_to(other)
    with open(folder / "log.txt", "w") as log:
        save(folder, NEW, "zarr", overwrite=True)
        log.write("written after")
    assert (folder / "log.txt").read_text() == "written after"
    assert (folder / "config.json").read_text() == "mine" and (folder / "empty" / "deep").is_dir()
    assert (folder / "link").is_symlink() and (other / "far.txt").read_text() == "far"
    assert value_in(folder) == NEW and len(list(tmp_path.iterdir())) == 2


def test_a_file_that_the_new_checkpoint_needs_the_name_of_is_an_error(tmp_path: Path) -> None:
    folder = tmp_path / "step"
    save(folder, OLD, "native")
    (folder / "__0_0.distcp").write_text("mine")
    with pytest.raises(StorageError, match=r"__0_0\.distcp"):
        save(folder, NEW, "dcp", overwrite=True)
    assert value_in(folder) == OLD and (folder / "__0_0.distcp").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["step"]


# -- where a folder can be


def test_a_link_to_the_folder_stays_one(tmp_path: Path) -> None:
    real, link = tmp_path / "disk" / "step", tmp_path / "latest"
    save(real, OLD, "dcp")
    link.symlink_to(real)
    save(f"{link}/", NEW, "dcp", overwrite=True)
    assert link.is_symlink() and value_in(real) == NEW == value_in(link)
    assert [path.name for path in real.parent.iterdir()] == ["step"]


def test_the_current_directory_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "step", OLD, "dcp")
    monkeypatch.chdir(tmp_path / "step")
    with pytest.raises(StrategyError, match="current directory"):
        save(".", NEW, "dcp", overwrite=True)
    assert value_in(".") == OLD and os.listdir(tmp_path) == ["step"]


def test_a_file_system_that_can_not_exchange_is_found_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(one: str, other: str) -> None:
        raise OSError(22, "Invalid argument", one)

    save(tmp_path / "step", OLD, "native")
    monkeypatch.setattr("shardtree.shell.storage._local_sibling.exchange_folders", refuse)
    with pytest.raises(StrategyError, match="cannot exchange two folders"):
        save(tmp_path / "step", NEW, "dcp", overwrite=True)
    assert value_in(tmp_path / "step") == OLD and os.listdir(tmp_path) == ["step"]


def test_a_checkpoint_that_can_not_be_read_is_not_replaced_as_a_whole(tmp_path: Path) -> None:
    save(tmp_path / "step", OLD, "zarr")
    (tmp_path / "step" / "metadata.json").write_text("{")
    with pytest.raises(CorruptCheckpoint) as caught:
        save(tmp_path / "step", NEW, "dcp", overwrite=True)
    assert "new folder" in "".join(caught.value.__notes__)
    assert os.listdir(tmp_path) == ["step"]


# -- two at a time, and who was there before


def test_of_two_saves_that_race_the_second_to_finish_raises(tmp_path: Path) -> None:
    folder = tmp_path / "step"
    save(folder, OLD, "dcp")
    slow = st.save(tree(3.0, "dcp"), folder, ("dcp", 1), overwrite=True, async_sharded_save=True)
    save(folder, NEW, "torch_dist", overwrite=True)
    with pytest.raises(CheckpointReplaced, match="changed by another save"):
        slow.execute_sync()
    assert value_in(folder) == NEW and os.listdir(tmp_path) == ["step"]


@pytest.mark.parametrize(("old", "new"), sampled(PAIRS))
def test_an_open_checkpoint_says_that_it_was_replaced(old: str, new: str) -> None:
    storage = MemoryStorage()
    save(storage, OLD, old)
    opened = st.open_checkpoint(storage)
    lazy = opened["w"].data
    assert lazy[0].read().tolist() == [OLD] * 3
    save(storage, NEW, new, overwrite=True)
    with pytest.raises(CheckpointReplaced, match="replaced by a later save"):
        lazy.read()
    if old != "huggingface":
        with pytest.raises(CheckpointReplaced, match="replaced by a later save"):
            opened.common()


# -- left-overs


def left_beside(storage: Any, note: bytes) -> None:
    """What a save of the far past left that died before the exchange."""
    sibling = storage.sibling(DEAD)
    sibling.make(note, durable=False)
    sibling.storage.make_folder(DEAD, durable=False)
    sibling.storage.write("__0_0.distcp", [memoryview(b"half")], durable=False)


def test_of_a_save_on_another_machine_its_age_tells(tmp_path: Path) -> None:
    storage = LocalStorage(str(tmp_path / "step"))
    save(storage, OLD, "dcp")
    left_beside(storage, owner_note(DEAD).replace(b'"host": "', b'"host": "far-'))
    save(storage, NEW, "dcp", overwrite=True)
    assert storage.siblings() == (DEAD,)
    save(storage, OLD, "dcp", overwrite=True, stale_after=-1e9)
    assert storage.siblings() == ()


def test_an_old_checkpoint_that_was_exchanged_and_stayed_goes_with_the_next(tmp_path: Path) -> None:
    storage = LocalStorage(str(tmp_path / "step"))
    save(storage, OLD, "torch_dist")
    sibling = storage.sibling(DEAD)
    sibling.make(owner_note(DEAD), durable=False)
    save(sibling.storage, NEW, "zarr")
    sibling.exchange(durable=False)
    assert value_in(storage) == NEW and value_in(sibling.storage) == OLD
    (Path(sibling.storage.root) / "late.txt").write_text("mine")  # made in the old folder while it was exchanged
    save(storage, OLD, "dcp", overwrite=True)
    assert os.listdir(tmp_path) == ["step"] and (tmp_path / "step" / "late.txt").read_text() == "mine"


def test_a_folder_beside_whose_content_is_not_known_stays(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    storage = LocalStorage(str(tmp_path / "step"))
    save(storage, OLD, "dcp")
    left_beside(storage, owner_note(DEAD))
    (tmp_path / f".step.{DEAD}" / "inode").unlink()
    save(storage, NEW, "dcp", overwrite=True, stale_after=-1e9)
    assert storage.siblings() == (DEAD,) and "is the old checkpoint or an unfinished new one" in caplog.text


def test_two_saves_do_not_write_to_the_same_files_at_a_time() -> None:
    storage = MemoryStorage()
    request = st.save(tree(OLD, "dcp"), storage, ("dcp", 1), async_sharded_save=True)
    with pytest.raises((StorageError, CheckpointReplaced), match="in progress"):
        save(storage, NEW, "dcp")
    request.execute_sync()
    assert value_in(storage) == OLD


def test_a_format_that_does_not_tell_its_files_is_not_replaced() -> None:
    storage = MemoryStorage()
    save(storage, OLD, "dcp")
    table = {row: fn for row, fn in default_strategies.items() if row[:2] != (StrategyAction.LIST_FILES, "dcp")}
    with pytest.raises(StrategyError, match="list_files"):
        save(storage, NEW, "native", overwrite=True, strategies=table)
    assert value_in(storage) == OLD and storage.siblings() == ()
