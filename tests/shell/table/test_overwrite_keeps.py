"""What a save never changes: other names of files, rights of folders, and checkpoints that others made meanwhile."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

import shardtree as st
from shardtree.errors import CheckpointReplaced, StorageError, StrategyError
from tests.formats.test_overwrite_formats import FOREIGN, FORMATS, NEW, OLD, PAIRS, sampled, save, tree, value_in

# -- files with other names


@pytest.mark.parametrize("form", ["dcp", "torch_dist", "zarr"])
def test_a_backup_by_hard_links_keeps_its_values(tmp_path: Path, form: str) -> None:
    folder, backup = tmp_path / "step", tmp_path / "backup"
    save(folder, OLD, form)
    shutil.copytree(folder, backup, copy_function=os.link)
    for name in (".metadata", "metadata.json", "zarr.json"):  # no checkpoint any more: written to where it is
        (folder / name).unlink(missing_ok=True)
    save(folder, NEW, form)
    assert value_in(folder) == NEW and value_in(backup) == OLD


@pytest.mark.parametrize(("old", "new"), sampled(PAIRS))
def test_so_does_one_of_a_checkpoint_that_is_replaced(tmp_path: Path, old: str, new: str) -> None:
    folder, backup = tmp_path / "step", tmp_path / "backup"
    save(folder, OLD, old)
    shutil.copytree(folder, backup, copy_function=os.link)
    save(folder, NEW, new, overwrite=True)
    assert value_in(folder) == NEW and value_in(backup) == OLD


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "step").mkdir()
    (tmp_path / "step" / "__0_0.distcp").symlink_to(tmp_path / "mine")
    save(tmp_path / "step", NEW, "dcp")
    assert (tmp_path / "mine").read_text() == "mine" and value_in(tmp_path / "step") == NEW


# -- rights


def test_rights_of_folders_that_are_kept_are_kept(tmp_path: Path) -> None:
    folder = tmp_path / "step"
    save(folder, OLD, "dcp")
    (folder / "secret" / "empty").mkdir(parents=True)
    (folder / "secret" / "key").write_text("mine")
    (folder / "fixed").mkdir()
    (folder / "fixed" / "notes").write_text("mine")
    rights = {"": 0o2755, "secret": 0o700, "secret/empty": 0o1777, "fixed": 0o555}
    for name, mode in rights.items():
        (folder / name).chmod(mode)
    save(folder, NEW, "dcp", overwrite=True)
    assert {name: stat.S_IMODE((folder / name).stat().st_mode) for name in rights} == rights
    assert (folder / "secret" / "key").read_text() == "mine" and value_in(folder) == NEW
    (folder / "fixed").chmod(0o755)


@pytest.mark.skipif(not hasattr(os, "setxattr"), reason="the system has no extended attributes")
def test_attributes_of_folders_are_kept(tmp_path: Path) -> None:
    folder = tmp_path / "step"
    save(folder, OLD, "dcp")
    (folder / "mine").mkdir()
    try:
        for name in (folder, folder / "mine"):
            os.setxattr(name, "user.note", b"kept")
    except OSError:
        pytest.skip("the file system has no extended attributes")
    save(folder, NEW, "dcp", overwrite=True)
    assert [os.getxattr(name, "user.note") for name in (folder, folder / "mine")] == [b"kept"] * 2


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root gives files away")
def test_whoever_owns_a_folder_still_does_when_root_saves(tmp_path: Path) -> None:
    folder = tmp_path / "step"
    save(folder, OLD, "dcp")
    (folder / "mine").mkdir()
    for name in (folder, folder / "mine"):
        os.chown(name, 1234, 4321)
    save(folder, NEW, "dcp", overwrite=True)
    owners = [(found.st_uid, found.st_gid) for found in (folder.stat(), (folder / "mine").stat())]
    assert owners == [(1234, 4321)] * 2


# -- checkpoints in checkpoints


@pytest.mark.slow
@pytest.mark.parametrize("outer", ["native", "dcp", "zarr"])
@pytest.mark.parametrize("new", ["native", "zarr"])
def test_checkpoints_inside_a_checkpoint_stay(tmp_path: Path, outer: str, new: str) -> None:
    folder = tmp_path / "step"
    save(folder, OLD, outer)
    own = [path for path in folder.iterdir() if path.is_dir() and not st.is_checkpoint(path)]
    places = [folder / "eval", *own, *(path / "deep" for path in own)]
    for number, place in enumerate(places):
        save(place, 10.0 + number, "native")
    save(folder, NEW, new, overwrite=True)
    assert value_in(folder) == NEW
    assert [value_in(place) for place in places] == [10.0 + number for number in range(len(places))]


# -- another machine's save


def far_away(folder: Path) -> None:
    """Let the save that is on its way to a folder be one of another machine."""
    (note,) = folder.glob("save-*/owner.json")
    note.write_text(json.dumps({**json.loads(note.read_text()), "host": "far"}))


@pytest.mark.parametrize("later", FOREIGN)
@pytest.mark.parametrize("first", ["native", "dcp", "zarr"])
def test_a_checkpoint_that_came_meanwhile_is_not_replaced(tmp_path: Path, first: str, later: str) -> None:
    folder = tmp_path / "step"
    slow = st.save(tree(OLD, "native"), folder, FORMATS[first][0], async_sharded_save=True)
    far_away(folder)
    assert slow is not None
    written = slow.async_fn()
    save(folder, NEW, later)
    with pytest.raises(CheckpointReplaced, match=r"by now|changed by another save"):
        slow.commit([written])
    slow.abandon()
    assert value_in(folder) == NEW


def test_where_the_current_directory_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, gone = tmp_path / "step", tmp_path / "gone"
    save(folder, OLD, "dcp")
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    save(folder, NEW, "dcp", overwrite=True)
    assert value_in(folder) == NEW
    with pytest.raises(StorageError, match="absolute path"):
        save("step", NEW, "dcp")


def test_a_name_too_long_for_one_beside_it_is_an_error(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 255)
    save(folder, OLD, "dcp")
    with pytest.raises(StorageError, match=r"(?s)too long.*Save to a new folder"):
        save(folder, NEW, "dcp", overwrite=True)
    assert value_in(folder) == OLD and len(os.listdir(tmp_path)) == 1


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can mount")
def test_a_folder_with_a_file_system_mounted_in_it_is_not_replaced(tmp_path: Path) -> None:
    folder = tmp_path / "step"
    save(folder, OLD, "dcp")
    (folder / "disk").mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "none", folder / "disk"], capture_output=True, check=False).returncode:
        pytest.skip("nothing can be mounted here")
    try:
        with pytest.raises(StrategyError, match="a file system is mounted in it"):
            save(folder, NEW, "dcp", overwrite=True)
        assert value_in(folder) == OLD and os.path.ismount(folder / "disk") and os.listdir(tmp_path) == ["step"]
    finally:
        subprocess.run(["umount", folder / "disk"], check=True)


def test_a_save_on_its_way_is_seen_by_any_path(tmp_path: Path) -> None:
    folder, link = tmp_path / "step", tmp_path / "latest"
    save(folder, OLD, "native")
    link.symlink_to(folder)
    with st.AsyncCallsQueue() as queue:
        request = st.save(tree(NEW, "native"), folder, overwrite=True, async_sharded_save=True)
        assert request is not None
        queue.schedule_async_request(request)
        for path in (link, f"{folder}/", tmp_path / "step" / ".." / "step"):
            with pytest.raises(CheckpointReplaced, match="is not committed yet"):
                save(path, 3.0, "native", overwrite=True)
    assert value_in(folder) == NEW


def test_an_age_that_is_no_number_makes_nobody_dead(tmp_path: Path) -> None:
    folder = tmp_path / "step"
    save(folder, OLD, "dcp")
    slow = st.save(tree(3.0, "dcp"), folder, ("dcp", 1), overwrite=True, async_sharded_save=True)
    (note,) = tmp_path.glob(".step.*/owner.json")
    note.write_text(json.dumps({**json.loads(note.read_text()), "host": "far"}))
    save(folder, NEW, "native", overwrite=True, stale_after=float("nan"))
    assert note.is_file() and slow is not None
