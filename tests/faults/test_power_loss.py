"""A power failure at any moment of a save, which may lose whatever wasn't waited for: old or new can be loaded."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from threading import RLock
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as draws

import shardtree as st
from shardtree.shell.storage import Buffer
from shardtree.storage import MemoryStorage, wrapped
from tests.faults.sampling import usually
from tests.options import save_keywords

OLD, NEW = 1.0, 2.0
RANKS = 2
FORMATS = {"native": ("safetensors", 1), "torch_dist": ("torch_dist", 1), "dcp": ("dcp", 1), "zarr": ("zarr", 3)}


@dataclass
class Step:
    """One change: an entry of a folder that is made, renamed or removed, with the file's content.

    Attributes:
        kind: "file", "folder", "move" or "remove".
        name: of the entry.
        data: of a file.
        source: what a move takes away.
        kept: the number of steps by when the entry is on the medium, None while it isn't.
        whole: whether the file's data is on the medium before the step is over.
    """

    kind: str
    name: str
    data: bytes = b""
    source: str = ""
    kept: int | None = None
    whole: bool = True


class Notes:
    """What notes each change of a storage, and what is waited for, before or after the storage's own calls."""

    def __init__(self, inner: MemoryStorage) -> None:
        self.inner, self.lock, self.steps = inner, RLock(), list[Step]()

    def write(self, name: str, buffers: Iterable[Buffer], *, durable: bool) -> int:
        data = b"".join(buffers)
        with self.lock:
            self.steps.append(Step("file", name, data, whole=durable))
            return self.inner.write(name, [memoryview(data)], durable=durable)

    def write_parts(self, name: str, length: int, parts: Any, *, durable: bool) -> None:
        with self.lock:
            self.inner.write_parts(name, length, parts, durable=durable)
            self.steps.append(Step("file", name, self.inner.read(name), whole=durable))

    def replace(self, name: str, data: bytes, *, durable: bool) -> None:
        with self.lock:
            self.steps.append(Step("file", name, data, whole=durable))
            self.inner.replace(name, data, durable=durable)
            if durable:
                self.sync_folder(name.rpartition("/")[0])

    def move(self, old: str, new: str) -> None:
        with self.lock:
            whole = all(step.whole for step in self.steps if step.name == old)
            self.steps.append(Step("move", new, self.inner.read(old), old, whole=whole))
            self.inner.move(old, new)

    def remove(self, name: str) -> None:
        with self.lock:
            if self.inner.length(name) is not None:
                self.steps.append(Step("remove", name))
            self.inner.remove(name)

    def make_folder(self, name: str = "", *, durable: bool = True) -> None:
        with self.lock:
            parts = name.split("/")
            for folder in ("/".join(parts[: count + 1]) for count in range(len(parts))):
                if folder and not self.inner.is_folder(folder):
                    self.steps.append(Step("folder", folder, kept=len(self.steps) + 1 if durable else None))
            self.inner.make_folder(name, durable=durable)

    def sync_folder(self, name: str = "") -> None:
        with self.lock:
            for step in self.steps:
                if step.kept is None and name in {step.name.rpartition("/")[0], step.source.rpartition("/")[0]}:
                    step.kept = len(self.steps)


NOTED = ("write", "write_parts", "replace", "move", "remove", "make_folder", "sync_folder")


def tree(world: Any, value: float) -> dict[str, Any]:
    shard = st.ShardedTensor.from_rank_offsets("w", torch.full((2, 3), value), (0, world.rank, world.size))
    return {"w": shard, "step": value}


def save(storage: Any, value: float, form: str, **options: Any) -> None:
    st.simulate(
        RANKS,
        lambda world: st.save(tree(world, value), storage, FORMATS[form], world=world, **save_keywords(**options)),
    )


def value_in(storage: MemoryStorage) -> float | None:
    if not st.is_checkpoint(storage):
        return None
    ((_, tensor),) = st.load_plain_tensors(storage, options=st.LoadOptions(verify="all")).items()
    value = float(st.load_common_state_dict(storage)["step"])
    assert tensor.tolist() == [[value] * 3] * (2 * RANKS)
    return value


def after_failure(steps: list[Step], moment: int, lose: Any) -> MemoryStorage:
    """Return what is on the medium when the power fails after so many steps; `lose` says what else is lost."""
    files: dict[str, bytes] = {}
    lost: list[str] = []
    for step in steps[:moment]:
        if (step.kept is None or step.kept > moment) and lose():
            lost += [f"{step.name}/"] if step.kind == "folder" else []
            continue
        if step.kind == "remove":
            files.pop(step.name, None)
        elif step.kind != "folder":
            files.pop(step.source, None)
            files[step.name] = step.data if step.whole or not lose() else b""
    storage = MemoryStorage()
    for name, data in files.items():
        if not any(name.startswith(folder) for folder in lost):
            storage.write(name, [memoryview(data)], durable=True)
    return storage


def steps_of(form: str, before: str | None, notes_of: type[Notes] = Notes, **options: Any) -> list[Step]:
    notes = notes_of(MemoryStorage())
    storage = wrapped(notes.inner, **{name: getattr(notes, name) for name in NOTED})
    if before:
        save(storage, OLD, before)
        notes.steps.append(Step("remove", "nothing"))
        for step in notes.steps:
            step.kept = 0 if step.kept is None else step.kept
    save(storage, NEW, form, overwrite=bool(before), **options)
    return notes.steps


def check_power_law(steps: list[Step], before: float | None, draw: Any) -> None:
    """Raise unless old or new can be loaded, and new if the save had returned."""
    begun = next((number + 1 for number, step in enumerate(steps) if step.name == "nothing"), 0)
    moment = draw(draws.integers(begun, len(steps)), label="steps that were done")
    found = value_in(after_failure(steps, moment, lambda: draw(draws.booleans(), label="lost")))
    done = moment == len(steps)
    assert found in ((NEW,) if done else (before, NEW)), f"{found} is there after {moment} steps of {len(steps)}"


@pytest.mark.slow
@pytest.mark.parametrize(("form", "before"), [("native", "native"), *((form, None) for form in FORMATS)])
def test_a_power_failure_leaves_the_old_checkpoint_or_the_new(form: str, before: str | None) -> None:
    steps = steps_of(form, before)

    @settings(max_examples=60, deadline=None)
    @given(draws.data())
    def check(data: draws.DataObject) -> None:
        check_power_law(steps, OLD if before else None, data.draw)

    check()


@pytest.mark.parametrize("form", usually(list(FORMATS), 1))
def test_of_every_format_a_power_failure_leaves_none_or_all_of_it(form: str) -> None:
    steps = steps_of(form, None)

    @settings(max_examples=500, deadline=None)
    @given(draws.data())
    def check(data: draws.DataObject) -> None:
        check_power_law(steps, None, data.draw)

    check()


class Hasty(Notes):
    """The planted fault: nothing waits for the data of files."""

    def write(self, name: str, buffers: Iterable[Buffer], *, durable: bool) -> int:
        return super().write(name, buffers, durable=False)


class Loose(Notes):
    """The planted fault: nothing waits for folders, but where metadata.json is replaced."""

    def sync_folder(self, name: str = "") -> None:
        if self.steps[-1].name == "metadata.json":
            self.steps[-1].kept = len(self.steps)


@pytest.mark.slow
@pytest.mark.parametrize("fault", [Hasty, Loose])
def test_the_law_catches(fault: type[Notes]) -> None:
    steps = steps_of("native", None, fault)

    @settings(max_examples=300, deadline=None, database=None, report_multiple_bugs=False)
    @given(draws.data())
    def check(data: draws.DataObject) -> None:
        check_power_law(steps, None, data.draw)

    with pytest.raises((AssertionError, st.CheckpointingException)):
        check()
