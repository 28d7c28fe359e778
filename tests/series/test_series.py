"""A series of checkpoints: listing, saving, resuming, the dry run, and what a removal leaves alone."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch

import shardtree as st
from shardtree.shell.storage import claim, folder_in, make_folder, owner_note, release, storage_at
from shardtree.storage import LocalStorage, MemoryStorage, Storage
from shardtree.testing import Call, watched
from shardtree.world import World
from tests.options import save_keywords

SAVE_ID = "save-20260102T030405-0123456789abcdef"
NOT_SYNCED = st.SaveOptions(durable=False)


def tree(value: float = 1.0, world: World | None = None) -> dict[str, Any]:
    place = [] if world is None else [(0, world.rank, world.size)]
    return {"w": st.ShardedTensor.from_rank_offsets("w", torch.full((2, 3), value), *place), "step": value}


def target() -> dict[str, Any]:
    return {"w": st.ShardedTensor.from_rank_offsets("w", torch.empty(2, 3))}


def saved(root: Any, *numbers: int, **options: Any) -> st.CheckpointSeries:
    series = st.CheckpointSeries(root)
    for number in numbers:
        series.save(tree(float(number)), number, **save_keywords(durable=False, **options))
    return series


def numbers(series: st.CheckpointSeries) -> list[int]:
    return [step.number for step in series.steps()]


@pytest.fixture(params=["local", "memory", "objects"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    if request.param == "objects":
        return storage_at(f"memory://{uuid4().hex}/run")
    return LocalStorage(str(tmp_path / "run")) if request.param == "local" else MemoryStorage()


def test_an_empty_root_has_no_steps(root: Storage) -> None:
    series = st.CheckpointSeries(root)
    assert (series.steps(), series.latest(), series.latest_verified(), series.clean()) == ((), None, None, ())
    with pytest.raises(st.errors.NotACheckpoint, match="no finished step"):
        series.load(target())
    saved(root, 7)
    with pytest.raises(st.errors.NotACheckpoint, match="found only others, from 7 to 7"):
        series.at(8)


def test_metrics_and_pins_are_noted_with_a_step_and_later(root: Storage) -> None:
    series = saved(root, 1)
    series.save(tree(), 2, metrics={"loss": torch.tensor(0.5), "bad": float("nan")}, pinned=True)
    first, second = series.steps()
    assert (first.metrics, first.pinned, second.pinned) == ({}, False, True)
    assert second.metrics["loss"] == 0.5 and second.metrics["bad"] != second.metrics["bad"]
    series.note(1, {"loss": 0.25})
    series.note(first, {"accuracy": 1})
    series.pin(1)
    series.unpin(second)
    first, second = series.steps()
    assert (first.metrics, first.pinned, second.pinned) == ({"loss": 0.25, "accuracy": 1.0}, True, False)
    assert st.retention.best_step(series.steps(), "loss") == first


@pytest.mark.parametrize(
    ("names", "folders"),
    [
        ("iter_{:07d}", {"iter_0000042": 42, "iter_43": 43}),
        ("{}", {"42": 42, "0043": 43}),
        ("{:03d}-ema", {"042-ema": 42}),
    ],
)
def test_folders_of_other_programs_are_steps(names: str, folders: dict[str, int], tmp_path: Path) -> None:
    for folder, number in folders.items():
        st.save(tree(float(number)), tmp_path / folder, "torch_dist", options=NOT_SYNCED)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("42")
    series = st.CheckpointSeries(tmp_path, names)
    assert {step.folder: step.number for step in series.steps()} == folders
    assert all(abs(step.time - (tmp_path / step.folder).stat().st_mtime) < 5 for step in series.steps())
    series.save(tree(44.0), 44, options=NOT_SYNCED)
    assert series.load(target(), 42)["step"] == 42.0


@pytest.mark.parametrize("backend", ["safetensors", "torch_dist"])
def test_a_step_is_saved_once_unless_it_may_be_replaced_with_its_record(backend: str, tmp_path: Path) -> None:
    series = saved(tmp_path, 5, metrics={"loss": 1.0}, sharded_strategy=backend)
    (tmp_path / "step_00000005" / "notes.txt").write_text("mine")
    with pytest.raises(st.errors.AlreadyACheckpoint):
        series.save(tree(9.0), 5, metrics={"loss": 9.0}, sharded_strategy=backend)
    assert series.steps()[0].metrics == {"loss": 1.0}
    for metrics in ({"loss": 9.0}, {}):
        series.save(tree(9.0), 5, metrics=metrics, overwrite=True, sharded_strategy=backend)
        assert (series.steps()[0].metrics, series.load(target())["step"]) == (metrics, 9.0)
    assert (tmp_path / "step_00000005" / "notes.txt").read_text() == "mine"
    assert os.listdir(tmp_path) == ["step_00000005"]


def test_a_checkpoint_of_one_file_is_listed_and_stays(tmp_path: Path) -> None:
    weight = tree()["w"]
    st.save([weight], tmp_path / "model", sharded_strategy=("huggingface", 1), options=NOT_SYNCED)
    (tmp_path / "model" / "model.safetensors").rename(tmp_path / "step_1.safetensors")
    series = st.CheckpointSeries(tmp_path, "step_{}.safetensors")
    series.save(tree(), 2, options=NOT_SYNCED)
    assert numbers(series) == [1, 2]
    assert series.plan_removal(st.retention.keep_last(1)).kept[1] == ("cannot be removed: it is a single file",)


def test_another_spelling_of_a_step_is_the_same_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    st.save(tree(5.0), tmp_path / "step_5", options=NOT_SYNCED)
    series = st.CheckpointSeries(tmp_path)
    with pytest.raises(st.errors.AlreadyACheckpoint):
        series.save(tree(), 5)
    st.save(tree(6.0), tmp_path / "step_00000005", options=NOT_SYNCED)
    assert [step.folder for step in series.steps()] == ["step_00000005"]
    assert "are the same step" in caplog.text


def test_unfinished_and_failed_steps_are_not_listed(root: Storage) -> None:
    series = saved(root, 1, 2)
    request = series.save(tree(3.0), 3, async_sharded_save=True)
    assert request is not None
    assert numbers(series) == [1, 2]
    with pytest.raises(st.CheckpointingException):
        series.save({"w": st.ShardedTensor.from_rank_offsets("w", torch.ones(2)), "bad": open}, 4, metrics={"loss": 0})
    root.make_folder("step_00000005")
    make_folder(folder_in(root, "step_00000006"), SAVE_ID)
    assert numbers(series) == [1, 2]
    request.execute_sync()
    assert numbers(series) == [1, 2, 3]
    assert "step_00000004" not in root.names()


def test_a_request_that_fails_takes_its_note_back(monkeypatch: pytest.MonkeyPatch) -> None:
    root = MemoryStorage()
    series = saved(root, 1, metrics={"loss": 1.0})
    request = series.save(tree(), 1, metrics={"loss": 2.0}, overwrite=True, async_sharded_save=True)
    new = series.save(tree(), 2, metrics={"loss": 2.0}, async_sharded_save=True)
    assert request is not None and new is not None
    for one in (request, new):
        one.async_fn()
        one.abandon()
    assert [(step.number, step.metrics) for step in series.steps()] == [(1, {"loss": 1.0})]
    assert root.names() == ("step_00000001",)


def test_a_queue_saves_in_the_background_and_removal_leaves_what_is_on_its_way(root: Storage) -> None:
    series = saved(root, 1, 2)
    with st.AsyncCallsQueue() as queue:
        for number in (3, 4):
            request = series.save(tree(float(number)), number, metrics={"loss": 1 / number}, async_sharded_save=True)
            queue.schedule_async_request(request)
        series.remove(series.plan_removal(st.retention.keep_last(1)))
        assert set(numbers(series)) <= {2, 3, 4}
        queue.maybe_finalize_async_calls(blocking=True)
        assert numbers(series) == [2, 3, 4]
    assert [step.metrics.get("loss") for step in series.steps()] == [None, 1 / 3, 0.25]


KEEP_LAST = st.retention.keep_last(2)


def test_after_going_back_a_step_stays_and_what_lies_ahead_can_be_dropped(
    root: Storage, caplog: pytest.LogCaptureFixture
) -> None:
    series = st.CheckpointSeries(root, keep=KEEP_LAST)
    for number in (100, 200, 300):
        series.save(tree(), number)
    assert "is saved behind" not in caplog.text  # a kind of storage may be warned of, once in a process
    series.save(tree(), 110)
    assert numbers(series) == [110, 200, 300] and series.latest().number == 300  # type: ignore[union-attr]
    assert "step 110 is saved behind step 300" in caplog.text
    assert str(series.plan_removal()) == str(series.plan_removal(KEEP_LAST))
    series.pin(200)
    assert series.drop_after(110) == (300,) and numbers(series) == [110, 200]
    series.unpin(200)
    assert series.drop_after(110) == (200,) and series.drop_after(110) == () and numbers(series) == [110]
    with pytest.raises(st.errors.NotACheckpoint, match="no step 100"):
        series.drop_after(100)
    caplog.clear()
    series.save(tree(), 120)
    assert numbers(series) == [110, 120] and not caplog.records


POLICIES: dict[str, Any] = {
    "last": st.retention.keep_last(1),
    "any": st.retention.keep_any(st.retention.keep_best(2, "loss"), st.retention.keep_every(300)),
    "a function": lambda steps: [steps[0].number],
}


@pytest.mark.parametrize("way", ["at once", "by request", "by queue"])
@pytest.mark.parametrize("policy", POLICIES)
def test_no_policy_removes_a_step_by_its_own_save(policy: str, way: str) -> None:
    with st.AsyncCallsQueue() as queue:
        series = st.CheckpointSeries(MemoryStorage(), keep=POLICIES[policy], queue=queue if way == "by queue" else None)
        # Going back, and worse than all that is there: each policy alone would drop it.
        for loss, number in enumerate((100, 200, 300, 110, 30, 120)):
            request = series.save(tree(), number, metrics={"loss": loss}, async_sharded_save=way == "by request")
            if way == "by request":
                request.execute_sync()  # type: ignore[union-attr]
            queue.maybe_finalize_async_calls(blocking=True)
            assert number in numbers(series)
    assert len(numbers(series)) < 6
    assert 120 not in POLICIES[policy](series.steps()), "the policy alone would drop it"


def test_a_removal_that_fails_after_a_save_is_a_warning_and_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    def refuse(call: Call) -> None:
        if broken and call.method == "remove" and call.name.endswith("metadata.json"):
            raise st.errors.StorageError("permission denied")

    broken = [True]
    series = st.CheckpointSeries(watched(MemoryStorage(), before=refuse), keep=st.retention.keep_last(1))
    for number in range(3):
        series.save(tree(), number)
    assert numbers(series) == [2], "the rest is not listed any more"
    assert "a step is saved, and others could not be removed: series: steps under" in caplog.text
    broken.clear()
    series.save(tree(), 3)
    assert numbers(series) == [3] and series.clean() == ()


def test_what_a_policy_raises_is_raised_and_the_step_is_there(root: Storage) -> None:
    series = st.CheckpointSeries(root, keep=lambda steps: [steps[0].metrics["loss"]])
    with pytest.raises(KeyError, match="loss"):
        series.save(tree(), 7)
    assert numbers(series) == [7]


def test_the_newest_that_verifies_is_asked_for(root: Storage, caplog: pytest.LogCaptureFixture) -> None:
    series = saved(root, 1, 2, 3)
    third = folder_in(root, "step_00000003")
    folder = next(name for name in third.names() if name.startswith("save-"))
    data = bytearray(third.read(f"{folder}/00000-of-00001.safetensors"))
    data[-1] ^= 1
    third.replace(f"{folder}/00000-of-00001.safetensors", bytes(data), durable=False)
    folder_in(root, "step_00000002").replace("metadata.json", b'{"sharded_backend": 1}', durable=False)
    latest, sound = series.latest(), series.latest_verified()
    assert latest is not None and sound is not None
    assert (latest.number, sound.number) == (3, 1)
    assert "step 3 is passed over" in caplog.text and "step 2 is passed over" in caplog.text


def test_the_dry_run_changes_nothing_and_says_what_goes(root: Storage) -> None:
    series = saved(root, 10, 20, 30, 40)
    series.pin(10)
    folder_in(root, "step_00000020").replace("notes.txt", b"mine", durable=False)
    plan = series.plan_removal(st.retention.keep_any(st.retention.keep_last(1), st.retention.keep_every(30)))
    assert [(step.number, step.others) for step in plan.going] == [(20, ("notes.txt",))]
    assert plan.kept == {10: ("pinned",), 30: ("keep_every(30)",), 40: ("the newest", "keep_last(1)")}
    assert numbers(series) == [10, 20, 30, 40]
    text = str(plan)
    assert f"goes: {plan.nbytes:,} bytes in {len(plan.going[0].files)} files; 1 other file stays" in text
    assert "stays: the newest, keep_last(1)" in text and "1 step goes" in text
    assert series.remove(plan) == (20,)
    assert numbers(series) == [10, 30, 40]
    assert root.names("step_00000020") == ("notes.txt",)
    assert series.remove(plan) == ()
    assert series.clean() == ("step_00000020",)


def test_links_are_left_alone(tmp_path: Path) -> None:
    series = saved(tmp_path / "run", 2, 3)
    saved(tmp_path / "elsewhere", 1)
    os.symlink(tmp_path / "elsewhere" / "step_00000001", tmp_path / "run" / "step_00000001")
    moved = tmp_path / "elsewhere" / "metadata.json"
    (tmp_path / "run" / "step_00000002" / "metadata.json").rename(moved)
    os.symlink(moved, tmp_path / "run" / "step_00000002" / "metadata.json")
    plan = series.plan_removal(st.retention.keep_last(1))
    assert plan.going == ()
    assert plan.kept[1] == ("cannot be removed: its folder is a link",)
    assert plan.kept[2] == ("cannot be removed: some of its files are links",)
    assert series.remove(plan) == () and numbers(series) == [1, 2, 3]
    (folder,) = (tmp_path / "run" / "step_00000003").glob("save-*")
    os.symlink(folder.rename(tmp_path / "elsewhere" / folder.name), folder)
    plan = series.plan_removal(st.retention.keep_steps([2]))
    assert plan.kept[3][0] == "the newest"
    saved(tmp_path / "run", 4)
    plan = series.plan_removal(st.retention.keep_steps([2]))
    assert plan.kept[3] == ("cannot be removed: some of its files are links",), "a folder of files is one, too"


@pytest.fixture
def live() -> Iterator[bytes]:
    held = claim(SAVE_ID)
    yield owner_note(SAVE_ID)
    release(SAVE_ID)
    del held


def test_a_step_that_is_being_saved_again_stays(live: bytes) -> None:
    root = MemoryStorage()
    series = saved(root, 1, 2)
    plan = series.plan_removal(st.retention.keep_last(1))
    root.write(f"step_00000001/{SAVE_ID}/owner.json", [memoryview(live)], durable=False)
    assert series.plan_removal(st.retention.keep_last(1)).kept[1] == ("cannot be removed: a save to it is in progress",)
    assert series.remove(plan) == ()
    release(SAVE_ID)
    assert series.remove(series.plan_removal(st.retention.keep_last(1))) == (1,)
    assert root.names() == ("step_00000002",)


def test_what_changed_since_the_plan_stays(root: Storage, caplog: pytest.LogCaptureFixture) -> None:
    series = saved(root, 1, 2, 3, 4, 5)
    plan = series.plan_removal(st.retention.keep_last(1))
    series.save(tree(9.0), 1, overwrite=True)
    series.pin(2)
    root.remove("step_00000005/metadata.json")
    assert series.remove(plan) == (3,)
    assert numbers(series) == [1, 2, 4]
    for said in ("changed since the plan", "by now it is pinned", "by now it is the newest"):
        assert said in caplog.text


def test_a_record_that_cannot_be_read_keeps_its_step(root: Storage, caplog: pytest.LogCaptureFixture) -> None:
    series = saved(root, 1, 2, metrics={"loss": 1.0})
    for data in (b"{", b"[]", b'{"step_record":2,"time":1,"metrics":{},"pinned":false,"removing":[]}'):
        root.replace("step_00000001/shardtree-step.json", data, durable=False)
        assert series.plan_removal(st.retention.keep_last(1)).kept[1] == ("pinned",)
        with pytest.raises(st.errors.CorruptCheckpoint, match=r"is not a record of a step|not valid JSON"):
            series.note(1, {"loss": 2.0})
    assert root.read("step_00000001/shardtree-step.json").startswith(b'{"step_record":2')


def test_a_damaged_step_of_ours_can_go_and_one_of_others_stays(tmp_path: Path) -> None:
    series = saved(tmp_path, 1, 3)
    saved(tmp_path, 2, sharded_strategy=("torch_dist", 1))
    for number in (1, 2):
        (tmp_path / f"step_0000000{number}" / "metadata.json").write_bytes(b"{]")
    plan = series.plan_removal(st.retention.keep_last(1))
    assert "is not known which files" in plan.kept[2][0]
    assert "in progress" in plan.kept[1][0], "its save may be about to be committed"
    for path in (tmp_path / "step_00000001").rglob("*"):
        os.utime(path, (1e9, 1e9))
    assert series.remove(series.plan_removal(st.retention.keep_last(1))) == (1,)
    assert sorted(os.listdir(tmp_path)) == ["step_00000002", "step_00000003"]


def test_two_processes_may_remove_at_once(root: Storage) -> None:
    series = saved(root, *range(12))
    plan = series.plan_removal(st.retention.keep_last(2))
    failures: list[BaseException] = []

    def run() -> None:
        try:
            series.remove(plan)
            series.remove(series.plan_removal(st.retention.keep_last(2)))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    series.clean()
    assert failures == []
    assert numbers(series) == [10, 11]
    assert root.names() == ("step_00000010", "step_00000011")


def test_a_failure_is_told_once_all_others_went(root: Storage) -> None:
    plan = saved(root, 1, 2, 3).plan_removal(st.retention.keep_last(1))

    def refuse(call: Call) -> None:
        if call.method == "replace" and call.name.startswith("step_00000001/"):
            raise st.errors.StorageError("permission denied")

    with pytest.raises(st.errors.StorageError, match="step_00000001: permission denied"):
        st.CheckpointSeries(watched(root, refuse)).remove(plan)
    assert numbers(st.CheckpointSeries(root)) == [1, 3]


def test_a_new_save_into_a_half_removed_folder_counts(root: Storage) -> None:
    series = saved(root, 1, 2)
    plan = series.plan_removal(st.retention.keep_last(1))
    files = [[mark.name, mark.nbytes, mark.changed] for mark in plan.going[0].files]
    note = {"step_record": 1, "time": None, "metrics": {}, "pinned": False, "removing": files}
    root.replace("step_00000001/shardtree-step.json", json.dumps(note).encode(), durable=False)
    assert numbers(series) == [2], "its removal was begun"
    root.remove("step_00000001/metadata.json")
    st.save(tree(5.0), folder_in(root, "step_00000001"), options=NOT_SYNCED)
    assert numbers(series) == [1, 2]
    series.clean()
    assert series.load(target(), 1)["step"] == 5.0
    series.save(tree(6.0), 1, overwrite=True)
    assert series.load(target(), 1)["step"] == 6.0


def test_dead_saves_are_cleaned_and_live_ones_are_not(live: bytes) -> None:
    root = MemoryStorage()
    series = saved(root, 1)
    root.write(f"step_00000002/{SAVE_ID}/owner.json", [memoryview(live)], durable=False)
    root.write("step_00000003/save-20260102T030405-1111111111111111/owner.json", [memoryview(b"{}")], durable=False)
    root.write("step_00000004/notes.txt", [memoryview(b"mine")], durable=False)
    assert series.clean() == ("step_00000002", "step_00000004")
    release(SAVE_ID)
    assert series.clean() == ("step_00000004",)
    assert root.names() == ("step_00000001", "step_00000004")


def test_ranks_act_together() -> None:
    root = MemoryStorage()

    def train(world: World) -> list[Any]:
        series = st.CheckpointSeries(root, world=world)
        for number in (1, 2, 3):
            series.save(tree(float(number), world), number, metrics={"loss": float(number)})
        gone = series.remove(series.plan_removal(st.retention.keep_best(1, "loss")))
        found = series.load({"w": tree(0.0, world)["w"]}, 1)
        return [gone, series.steps(), found["step"], series.latest()]

    results = st.simulate(3, train)
    assert results[0] == results[1] == results[2]
    assert results[0][0] == (2,) and results[0][2] == 1.0
    assert [step.metrics for step in results[0][1]] == [{"loss": 1.0}, {"loss": 3.0}]


def test_listing_reads_little(caplog: pytest.LogCaptureFixture) -> None:
    root = MemoryStorage()
    saved(root, *range(20))
    calls: list[Call] = []
    with caplog.at_level(logging.WARNING):
        st.CheckpointSeries(watched(root, calls.append)).steps()
    assert len(calls) <= 1 + 20 * 5
    assert caplog.text == ""
