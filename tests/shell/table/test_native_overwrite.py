"""Overwriting and removing: only when asked, in one step, and of the files only those that saves have written."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress

import pytest
import torch

import shardtree as st
from shardtree.errors import CheckpointReplaced, StorageError
from shardtree.shell.table import encode_metadata, remove_save
from shardtree.storage import LocalStorage, MemoryStorage
from shardtree.testing import watched
from tests.faults.sampling import sample
from tests.shell.checkpoint.parts import Killed

NOT_SYNCED = st.SaveOptions(durable=False)
DEAD = "save-20200101T000000-0123456789abcdef"


def tree(value, rank=0, ranks=1):
    part = torch.full((4 // ranks,), value)
    return {"w": st.ShardedTensor.from_rank_offsets("w", part, (0, rank, ranks)), "value": value}


def value_in(folder):
    loaded = st.load(tree(0), folder)
    assert loaded["w"].tolist() == [loaded["value"]] * 4
    return loaded["value"]


def save_folders(folder):
    return [path.name for path in folder.iterdir() if path.name.startswith("save-")]


def leave_over(folder, name, age):
    """What a save that died so many seconds ago leaves."""
    (folder / name).mkdir()
    (folder / name / "00000-of-00001.safetensors").write_bytes(b"half")
    for path in (folder / name / "00000-of-00001.safetensors", folder / name):
        os.utime(path, (time.time() - age,) * 2)


def test_files_that_nothing_refers_to_go_with_the_tensors_that_are_removed(tmp_path):
    tensors = [st.ShardedTensor.from_rank_offsets(key, torch.full((2,), rank)) for rank, key in enumerate("ab")]
    st.simulate(2, lambda world: st.save({"s": tensors[world.rank], "step": 4}, tmp_path, world=world))
    (save,) = save_folders(tmp_path)
    opened = st.open_checkpoint(tmp_path)
    st.remove_sharded_tensors(tmp_path, "b")
    left = sorted(os.listdir(tmp_path / save))
    assert left == ["00000-of-00002.safetensors", "common.safetensors", "index-1.safetensors"]
    with pytest.raises(CheckpointReplaced):
        opened["b"].data.read()
    assert opened["a"].data.read().tolist() == [0, 0]
    st.remove_sharded_tensors(tmp_path, "")
    assert st.load_plain_tensors(tmp_path) == {} and st.load_common_state_dict(tmp_path) == {"step": 4}
    assert sorted(os.listdir(tmp_path / save)) == ["common.safetensors", "index-2.safetensors"]


def test_files_that_no_save_wrote_are_never_removed(tmp_path):
    st.save(tree(1), tmp_path)
    (old,) = save_folders(tmp_path)
    mine = [tmp_path / "notes.txt", tmp_path / old / "notes.txt", tmp_path / "save-mine" / "00000-of-00001.safetensors"]
    mine += [tmp_path / old / "folder" / "00000-of-00001.safetensors"]
    for path in mine:
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    st.save(tree(2), tmp_path, overwrite=True, options=st.SaveOptions(stale_after=0))
    assert [path.read_text() for path in mine] == ["mine"] * 4
    assert not (tmp_path / old / "common.safetensors").exists()
    assert value_in(tmp_path) == 2


def test_left_overs_of_dead_saves_go_and_those_of_live_ones_stay(tmp_path):
    st.save(tree(1), tmp_path)
    alive = DEAD.replace("2020", "2021")
    leave_over(tmp_path, DEAD, age=7200)
    leave_over(tmp_path, alive, age=60)
    st.save(tree(2), tmp_path, overwrite=True)
    assert not (tmp_path / DEAD).exists() and (tmp_path / alive).exists()
    st.save(tree(3), tmp_path, overwrite=True, options=st.SaveOptions(stale_after=30))
    assert not (tmp_path / alive).exists()
    assert value_in(tmp_path) == 3


def test_a_left_over_with_one_fresh_file_is_alive(tmp_path):
    leave_over(tmp_path, DEAD, age=7200)
    (tmp_path / DEAD / "00001-of-00002.safetensors").write_bytes(b"now")
    os.utime(tmp_path / DEAD, (time.time() - 7200,) * 2)
    st.save(tree(1), tmp_path)
    assert (tmp_path / DEAD).exists()


@pytest.mark.parametrize("token", [None, "ab" * 8], ids=["of this process", "of another machine"])
def test_an_old_save_whose_removal_was_interrupted_goes_with_the_next(tmp_path, token):
    def begin(folder):
        st.save(tree(1), folder, options=NOT_SYNCED)
        if token:  # as if another machine had saved it
            old = save_folders(folder)[0]
            (folder / old).rename(folder / f"{old[:-16]}{token}")
            fields = json.loads((folder / "metadata.json").read_text().replace(old, f"{old[:-16]}{token}"))
            (folder / "metadata.json").write_bytes(encode_metadata(fields))
        return LocalStorage(str(folder))

    calls = []
    st.save(tree(2), watched(begin(tmp_path / "all"), before=calls.append), overwrite=True, options=NOT_SYNCED)
    committed = max(call.number for call in calls if call.method == "replace")
    for number in sample(range(committed + 1, len(calls)), 8):
        folder = tmp_path / f"{number}"

        def strike(call, number=number):
            if call.number >= number:
                raise Killed

        with suppress(Killed):
            st.save(tree(2), watched(begin(folder), before=strike), overwrite=True, options=NOT_SYNCED)
        assert value_in(folder) == 2
        st.save(tree(3), folder, overwrite=True, options=NOT_SYNCED)
        st.save(tree(4), folder, overwrite=True, options=NOT_SYNCED)
        left = [name for name in save_folders(folder) if os.listdir(folder / name)]
        assert len(left) == 1 and value_in(folder) == 4, calls[number]
        assert token or save_folders(folder) == left, calls[number]


def test_a_race_between_overwriting_saves_is_noticed_on_every_rank():
    folder = MemoryStorage()
    st.save(tree(1), folder)

    def race(world):
        slow = st.save(tree(2, world.rank, 2), folder, overwrite=True, async_sharded_save=True, world=world)
        st.save(tree(3, world.rank, 2), folder, overwrite=True, world=world)
        with pytest.raises(CheckpointReplaced, match="changed by another save"):
            slow.execute_sync()
        return True

    assert st.simulate(2, race) == [True, True]
    assert value_in(folder) == 3


def test_a_folder_that_ranks_do_not_share_is_noticed(tmp_path):
    def save_apart(world):
        mine = tmp_path / ("other" if world.rank == 2 else "one")
        with pytest.raises(StorageError, match=r"is not shared: rank 2 does not see"):
            st.save(tree(1, world.rank, 4), mine, world=world)
        return True

    assert st.simulate(4, save_apart) == [True] * 4
    assert not st.is_checkpoint(tmp_path / "one") and not st.is_checkpoint(tmp_path / "other")


def test_a_note_of_its_owner_that_a_crash_left_means_nothing(tmp_path):
    st.save(tree(1), tmp_path)
    (kept,) = save_folders(tmp_path)
    (tmp_path / kept / "owner.json").write_text("{")
    (tmp_path / ".metadata.json.0123456789abcdef.new").write_text("{")
    assert value_in(tmp_path) == 1 and st.verify(tmp_path) == ()
    st.save(tree(2), tmp_path, overwrite=True, options=st.SaveOptions(stale_after=-1e9))
    assert value_in(tmp_path) == 2 and len(list(tmp_path.iterdir())) == 2


def test_a_save_that_was_taken_for_dead_is_not_committed(tmp_path):
    st.save(tree(1), tmp_path)
    slow = st.save(tree(2), tmp_path, overwrite=True, async_sharded_save=True)
    written = [slow.async_fn()]
    remove_save(
        LocalStorage(str(tmp_path)), max(save_folders(tmp_path), key=lambda name: (tmp_path / name).stat().st_ctime)
    )
    with pytest.raises(StorageError, match="does not see"):
        slow.commit(written)
    assert value_in(tmp_path) == 1
