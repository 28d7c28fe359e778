"""File systems that can't sync folders or change permissions take saves of every format, and the save says so, once."""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import shardtree as st
from shardtree.errors import MetadataError, StorageError
from shardtree.shell.storage import can, with_own_refusals
from shardtree.shell.storage._refusals import elsewhere
from shardtree.storage import LocalStorage, Refusal, SaveReport, wrapped
from tests.formats.test_overwrite_formats import FOREIGN, FORMATS, NEW, OLD, tree, value_in

Refuse = Callable[..., None]


@pytest.fixture
def refuse(monkeypatch: pytest.MonkeyPatch) -> Refuse:
    """A function that makes one of `os`'s calls fail where a test of its first argument holds."""

    elsewhere.take()  # what another test's calls were refused isn't told again

    def refuse(name: str, code: int, where: Callable[[Any], bool] = lambda _: True) -> None:
        call = getattr(os, name)

        def refusing(first: Any, *rest: Any, **keywords: Any) -> Any:
            if where(first):
                raise OSError(code, os.strerror(code))
            return call(first, *rest, **keywords)

        monkeypatch.setattr(os, name, refusing)

    return refuse


def is_folder(descriptor: int) -> bool:
    return stat.S_ISDIR(os.fstat(descriptor).st_mode)


def is_file(descriptor: int) -> bool:
    return not is_folder(descriptor)


def save(
    folder: Any, value: float, form: str, ranks: int = 1, *, in_background: bool = False, **keywords: Any
) -> list[SaveReport]:
    """Save as users do by default, durably, and return each rank's reports, in order."""

    def run(world: Any) -> list[SaveReport]:
        reports: list[SaveReport] = []
        options = st.SaveOptions(report=reports.append)
        parts = tree(value, form, world.rank, ranks)
        arguments = {"world": world, "options": options, **keywords}
        if in_background:
            with st.AsyncCallsQueue() as queue:
                queue.schedule_async_request(
                    st.save(parts, folder, *FORMATS[form], async_sharded_save=True, **arguments)
                )
        else:
            st.save(parts, folder, *FORMATS[form], **arguments)
        return reports

    return [report for reports in st.simulate(ranks, run) for report in reports]


def kinds(reports: list[SaveReport]) -> list[list[str]]:
    return [sorted(refusal.kind for refusal in report.refusals) for report in reports]


def told(log: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage().partition("\n")[0] for record in log.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("form", FORMATS)
def test_a_folder_that_cant_be_synced_is_told_once_a_save(
    form: str, tmp_path: Path, refuse: Refuse, caplog: pytest.LogCaptureFixture
) -> None:
    codes = iter([errno.EINVAL, errno.ENOTSUP, errno.ENOSYS])
    for number, (value, keywords) in enumerate(
        [(OLD, {}), (NEW, {"overwrite": True}), (OLD, {"overwrite": True, "in_background": True})]
    ):
        refuse("fsync", next(codes), is_folder)
        caplog.clear()
        reports = save(tmp_path / "step", value, form, **keywords)
        assert kinds(reports) == [["sync"]], number
        assert len(told(caplog)) == 1 and "cannot be synced" in told(caplog)[0], told(caplog)
        assert value_in(tmp_path / "step") == value


def test_each_rank_tells_what_it_met(tmp_path: Path, refuse: Refuse, caplog: pytest.LogCaptureFixture) -> None:
    refuse("fsync", errno.EINVAL, is_folder)
    reports = save(tmp_path / "step", OLD, "native", ranks=2)
    assert len(reports) == 2 and ["sync"] in kinds(reports)
    assert len(told(caplog)) == sum(len(report.refusals) for report in reports)


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
def test_a_medium_that_fails_fails_the_save(code: int, tmp_path: Path, refuse: Refuse) -> None:
    save(tmp_path / "step", OLD, "dcp")
    refuse("fsync", code, is_folder)
    with pytest.raises(StorageError, match=os.strerror(code)):
        save(tmp_path / "step", NEW, "dcp", overwrite=True)
    with pytest.raises(StorageError, match=os.strerror(code)):
        save(tmp_path / "other", NEW, "native")
    assert value_in(tmp_path / "step") == OLD


@pytest.mark.parametrize("form", FORMATS)
def test_a_file_that_cant_be_synced_fails_the_save_and_says_what_to_pass(
    form: str, tmp_path: Path, refuse: Refuse
) -> None:
    refuse("fsync", errno.EINVAL, is_file)
    with pytest.raises(StorageError, match=r"cannot sync .*\n.*\n.*durable=False"):
        save(tmp_path / "step", OLD, form)
    assert not st.is_checkpoint(tmp_path / "step")
    options = st.SaveOptions(durable=False)
    st.save(tree(OLD, form), tmp_path / "step", *FORMATS[form], options=options)
    assert value_in(tmp_path / "step") == OLD


@pytest.mark.parametrize("form", FOREIGN)
def test_an_overwrite_without_chmod_keeps_what_it_can_and_tells_the_rest(
    form: str, tmp_path: Path, refuse: Refuse, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "step"
    save(folder, OLD, form)
    (folder / "notes").mkdir()
    (folder / "notes" / "mine").write_text("mine")
    folder.chmod(0o750)
    refuse("chmod", errno.EPERM)
    [report] = save(folder, NEW, form, overwrite=True)
    assert report.refusals == (Refusal("permissions", str(folder), os.strerror(errno.EPERM)),)
    assert [line for line in told(caplog) if "permissions" in line] == [str(report.refusals[0]).partition("\n")[0]]
    assert value_in(folder) == NEW and (folder / "notes" / "mine").read_text() == "mine"


def test_what_was_accepted_and_not_done_is_told_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refuse: Refuse
) -> None:
    folder = tmp_path / "step"
    save(folder, OLD, "dcp")
    folder.chmod(0o750)
    monkeypatch.setattr(os, "chmod", lambda *_: None)
    if os.getuid() == 0:
        os.chown(folder, 12345, 54321)
    refuse("chown", errno.EPERM)
    [report] = save(folder, NEW, "dcp", overwrite=True)
    expected = ["owner", "permissions"] if os.getuid() == 0 else ["permissions"]
    assert kinds([report]) == [expected]
    assert {refusal.kind: refusal.reason for refusal in report.refusals}["permissions"].endswith("instead of 750")


@pytest.mark.skipif(not hasattr(os, "setxattr"), reason="the system has no extended attributes")
def test_attributes_that_cant_be_copied_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refuse: Refuse
) -> None:
    save(tmp_path / "step", OLD, "dcp")
    monkeypatch.setattr(os, "listxattr", lambda _: ["security.selinux", "system.posix_acl_access"])
    monkeypatch.setattr(os, "getxattr", lambda *_: b"")
    refuse("setxattr", errno.ENOTSUP)
    [report] = save(tmp_path / "step", NEW, "dcp", overwrite=True)
    [refusal] = report.refusals
    assert refusal.kind == "attributes" and refusal.reason.startswith("system.posix_acl_access: ")


def test_a_chmod_that_fails_otherwise_fails_the_save(tmp_path: Path, refuse: Refuse) -> None:
    save(tmp_path / "step", OLD, "dcp")
    refuse("chmod", errno.EIO)
    with pytest.raises(StorageError, match=os.strerror(errno.EIO)):
        save(tmp_path / "step", NEW, "dcp", overwrite=True)
    assert value_in(tmp_path / "step") == OLD


@pytest.mark.parametrize("wrap", [LocalStorage, lambda root: wrapped(LocalStorage(root)), lambda root: root])
def test_a_storage_that_is_passed_again_tells_again(wrap: Any, tmp_path: Path, refuse: Refuse) -> None:
    storage = wrap(str(tmp_path / "step"))
    assert kinds(save(storage, OLD, "native")) == [[]]
    refuse("fsync", errno.EINVAL, is_folder)
    for value in (NEW, OLD):
        assert kinds(save(storage, value, "native", overwrite=True)) == [["sync"]]


def test_steps_conversions_and_removals_do_without_too(
    tmp_path: Path, refuse: Refuse, caplog: pytest.LogCaptureFixture
) -> None:
    refuse("fsync", errno.EINVAL, is_folder)
    reports: list[SaveReport] = []
    options = st.SaveOptions(report=reports.append)
    series = st.CheckpointSeries(tmp_path / "run")
    for step in (1, 2):
        series.save(tree(OLD, "native"), step, options=options)
    series.pin(1)
    st.convert(tmp_path / "run" / "step_00000002", tmp_path / "new", backend="dcp", save_options=options)
    assert kinds(reports) == [["sync"]] * 3
    assert value_in(tmp_path / "new") == OLD
    caplog.clear()
    elsewhere.take()
    st.remove_sharded_tensors(tmp_path / "run" / "step_00000001", "norm")
    assert len(told(caplog)) == 1 and "cannot be synced" in told(caplog)[0]


class Named(LocalStorage):
    """A subclass with a constructor of its own."""

    def __init__(self, root: str, name: str) -> None:
        object.__setattr__(self, "root", root)
        object.__setattr__(self, "name", name)


SHARED = {"around": lambda root: wrapped(LocalStorage(root)), "subclass": lambda root: Named(root, "mine")}


@pytest.mark.parametrize("wrap", SHARED.values(), ids=SHARED)
@pytest.mark.parametrize("form", ["native", "dcp"])
def test_a_report_has_no_refusals_of_other_calls(wrap: Any, form: str, tmp_path: Path, refuse: Refuse) -> None:
    (tmp_path / "good").mkdir()
    storage = wrap(str(tmp_path / "good" / "step"))
    refused = [True]
    refuse("fsync", errno.EINVAL, lambda descriptor: refused[0] and is_folder(descriptor))
    series = st.CheckpointSeries(tmp_path / "bad")
    series.save(tree(OLD, "native"), 1)
    series.pin(1)
    refused[0] = False
    assert kinds(save(storage, OLD, form)) == [[]]
    assert [refusal.kind for refusal in elsewhere.take()] == ["sync"]  # still the pin's
    refused[0] = True
    series.unpin(1)
    [report] = save(wrap(str(tmp_path / "good" / "second")), NEW, form)
    assert [refusal.kind for refusal in report.refusals] == ["sync"]
    assert report.refusals[0].path.startswith(str(tmp_path / "good"))
    refused[0] = False
    assert kinds(save(wrap(str(tmp_path / "good" / "third")), NEW, form)) == [[]]


@pytest.mark.parametrize("form", ["native", "dcp"])
def test_a_subclass_with_a_constructor_of_its_own_saves_and_replaces(form: str, tmp_path: Path, refuse: Refuse) -> None:
    storage = Named(str(tmp_path / "step"), "mine")
    save(storage, OLD, form)
    refuse("fsync", errno.EINVAL, is_folder)
    assert kinds(save(storage, NEW, form, overwrite=True)) == [["sync"]]
    assert value_in(tmp_path / "step") == NEW
    series = st.CheckpointSeries(Named(str(tmp_path / "run"), "mine"))
    series.save(tree(OLD, "native"), 1)
    assert [step.number for step in series.steps()] == [1]


def test_a_folder_of_a_saves_storage_has_its_refusals() -> None:
    storage = with_own_refusals(LocalStorage("/runs"))
    assert isinstance(storage, LocalStorage)
    assert storage.folder("step").refusals is storage.refusals is not elsewhere
    assert can(storage.sibling("save").storage).refusals is storage.refusals


# What is given to be called.


@pytest.mark.parametrize("name", ["report", "progress"])
def test_options_that_cant_be_called_are_refused_before_anything_is_written(name: str, tmp_path: Path) -> None:
    wrong: dict[str, Any] = {name: 3}
    with pytest.raises(MetadataError, match=rf"save: invalid options.{name}\n  found 3, expected a function"):
        st.save(tree(OLD, "native"), tmp_path / "step", options=st.SaveOptions(**wrong))
    assert not (tmp_path / "step").exists()


def test_a_report_that_raises_is_logged_and_no_rank_fails(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    told_to = []

    def run(world: Any) -> None:
        def report(result: SaveReport) -> None:
            told_to.append(world.rank)
            if world.rank == 1:
                raise RuntimeError("mine")

        options = st.SaveOptions(report=report)
        st.save(tree(OLD, "native", world.rank, 2), tmp_path / "step", world=world, options=options)

    st.simulate(2, run)
    assert sorted(told_to) == [0, 1] and value_in(tmp_path / "step") == OLD
    [record] = [each for each in caplog.records if each.levelno == logging.ERROR]
    assert "is saved, but SaveOptions(report=...) raised" in record.getMessage()
    assert record.exc_info is not None and str(record.exc_info[1]) == "mine"
