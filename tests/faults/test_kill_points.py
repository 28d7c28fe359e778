"""A save killed at any write, fsync, rename or other change to its folder leaves the old checkpoint or the new one."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

import shardtree
from tests.faults.sampling import sample
from tests.faults.warm_saver import (
    NEW,
    NEXT,
    OLD,
    RENAMES,
    SYNCS,
    WRITES,
    Job,
    Point,
    Saver,
    inject,
    listing,
    prepared,
    traced_points,
    value_in,
)

pytestmark = pytest.mark.usefixtures("strace")

SIGKILL, SIGXFSZ = 9, 25
LARGE = {"tensors": 5, "columns": 300_000}  # 12 MB a rank: several writes a file, and room reserved ahead


def scenarios() -> Iterator[tuple[str, Job]]:
    for ranks in (1, 2):
        yield f"over an old one, ranks {ranks}", Job(ranks=ranks, overwrite=True)
        yield f"into an empty folder, ranks {ranks}", Job(ranks=ranks)
        for backend in (("torch_dist", 1), ("dcp", 1), ("zarr", 3), ("huggingface", 1)):
            yield f"{backend[0]}, into an empty folder, ranks {ranks}", Job(ranks=ranks, backend=backend)
            yield f"{backend[0]}, over an old one, ranks {ranks}", Job(ranks=ranks, backend=backend, overwrite=True)
    yield "torch_dist over native", Job(backend=("torch_dist", 1), old_backend=("safetensors", 1), overwrite=True)
    yield "native over torch_dist", Job(old_backend=("torch_dist", 1), overwrite=True)
    yield "over an old one, all ranks die", Job(ranks=2, overwrite=True, all_die=True)
    yield "over an old one, large", Job(overwrite=True, **LARGE)


SCENARIOS = dict(scenarios())


def check_point(saver: Saver, job: Job, old: Path, point: Point, folder: Path) -> float | None:
    """Raise unless a save killed at a point leaves old or new whole, and the next one works; return what it left."""
    if old.exists():
        shutil.copytree(old, folder)
    before = OLD if old.exists() else None
    there = replace(job, folder=str(folder))
    ends = saver(there, inject(point, "signal=KILL", folder.with_suffix(".log")))
    if job.ranks > 1 and not any(end["signal"] or end["error"] for end in ends):
        assert value_in(there) == NEW  # the other rank made a folder first this time: there was no such call
        return NEW
    assert ends[point.rank]["signal"] == SIGKILL, f"not killed at {point}: {ends}"
    others = [end for rank, end in enumerate(ends) if rank != point.rank and not job.all_die]
    found = value_in(there)
    assert found in (before, NEW), f"{found} after {point}"
    for end in others:
        check_survivor(end, point, saved=found == NEW)
    check_next_save(saver, there, point)
    return found


def check_survivor(end: dict[str, object], point: Point, *, saved: bool) -> None:
    """Raise unless a rank that wasn't killed has heard of it in time, or had been told that all is saved."""
    assert not end["silent"] and not end["signal"], f"{end} after {point}"
    if end["error"] is None:
        assert saved, f"a rank believes that it has saved, after {point}"
    else:
        assert "CheckpointingException" in list(end["kinds"]), f"{end} after {point}"  # type: ignore[call-overload]


def check_next_save(saver: Saver, job: Job, point: Point | str) -> None:
    """Raise unless a save to the same folder works, and nothing is there then but what it wrote."""
    ends = saver(replace(job, value=NEXT, overwrite=job.overwrite or value_in(job) is not None))
    assert not any(end["error"] for end in ends), f"{ends} after {point}"
    assert value_in(job) == NEXT
    fresh = Path(f"{job.folder}.fresh")
    saver(replace(job, folder=str(fresh), value=NEXT, overwrite=False, storage="sound"))
    assert listing(job.folder) == listing(str(fresh)), f"left over after {point}"
    shutil.rmtree(fresh)
    shutil.rmtree(job.folder)


def check_points(
    saver: Saver, job: Job, tmp_path: Path, pick: Callable[[Sequence[Point]], list[Point]] = list
) -> tuple[list[Point], list[float | None]]:
    """Kill a save at each of its points, or those that are picked; return them and what each left."""
    old = prepared(saver, job, tmp_path / "old")
    if old.exists():
        shutil.copytree(old, tmp_path / "traced")
    points = pick(traced_points(saver, replace(job, folder=str(tmp_path / "traced")), tmp_path))
    left = [check_point(saver, job, old, point, tmp_path / f"{n}") for n, point in enumerate(points)]
    return points, left


def counts(points: list[Point], left: list[float | None]) -> str:
    kinds = {
        name: kind
        for kind, names in (("write", WRITES), ("fsync", SYNCS), ("rename", RENAMES))
        for name in names.split(",")
    }
    calls = Counter(kinds.get(point.call, "other") for point in points)
    found = Counter({OLD: "old", NEW: "new", None: "none"}[value] for value in left)
    return f"{len(points)} points {dict(calls)} left {dict(found)}"


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "count"), [(1, 8), (2, 4)])
@pytest.mark.parametrize("place", ["over an old one", "into an empty folder"])
def test_a_save_killed_at_a_call_leaves_the_old_checkpoint_or_the_new(
    place: str, ranks: int, count: int, saver: Saver, tmp_path: Path
) -> None:
    check_points(saver, SCENARIOS[f"{place}, ranks {ranks}"], tmp_path, partial(sample, count=count))


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", SCENARIOS)
def test_a_save_killed_at_every_call(name: str, saver: Saver, tmp_path: Path) -> None:
    points, left = check_points(saver, SCENARIOS[name], tmp_path)
    print(f"\n{name}: {counts(points, left)}")  # noqa: T201
    assert len(points) > 10


def check_torn(saver: Saver, job: Job, old: Path, length: int, folder: Path) -> None:
    """Raise unless a save that is killed where a file would get longer leaves the old one, and the next works."""
    shutil.copytree(old, folder)
    there = replace(job, folder=str(folder), file_bytes=length)
    ends = saver(there)
    assert [end["signal"] for end in ends] == [SIGXFSZ], ends
    assert value_in(there) == OLD, f"torn at {length}"
    check_next_save(saver, replace(there, file_bytes=None), f"a file torn at {length} bytes")


@pytest.mark.slow
@pytest.mark.parametrize("length", [0, 7, 200, 400, 1000])
def test_a_save_killed_inside_a_write_leaves_the_old_checkpoint(length: int, saver: Saver, tmp_path: Path) -> None:
    job = Job(overwrite=True)
    check_torn(saver, job, prepared(saver, job, tmp_path / "old"), length, tmp_path / "torn")


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
def test_a_save_killed_inside_any_write(saver: Saver, tmp_path: Path) -> None:
    job = Job(overwrite=True)
    old = prepared(saver, job, tmp_path / "old")
    longest = max(path.stat().st_size for path in old.rglob("*") if path.is_file())
    for length in range(0, longest, 17):
        check_torn(saver, job, old, length, tmp_path / f"torn-{length}")


def of_metadata(points: Sequence[Point]) -> list[Point]:
    return [point for point in points if "metadata.json" in point.line]


@pytest.mark.slow
def test_the_law_catches_a_metadata_file_written_in_place(saver: Saver, tmp_path: Path) -> None:
    with pytest.raises((AssertionError, shardtree.CheckpointingException)):
        check_points(saver, Job(overwrite=True, storage="in place"), tmp_path, of_metadata)


@pytest.mark.slow
def test_the_law_catches_left_overs(saver: Saver, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="left over"):
        check_points(saver, Job(overwrite=True, storage="untidy"), tmp_path, partial(sample, count=2))
