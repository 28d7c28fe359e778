"""Whatever the system refuses, every rank hears which file and why, the old checkpoint stays whole, a retry works."""

from __future__ import annotations

import errno
import os
import shutil
from collections import Counter
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import pytest

import shardtree
from tests.faults.sampling import sample
from tests.faults.warm_saver import (
    NEW,
    NEXT,
    OLD,
    READS,
    RENAMES,
    SYNCS,
    WRITES,
    Ends,
    Job,
    Point,
    Saver,
    inject,
    listing,
    prepared,
    traced_points,
    value_in,
    was_injected,
)

REMOVING = {"unlink", "unlinkat", "rmdir"}
RETRIED = {*WRITES.split(","), *SYNCS.split(","), "ftruncate", "open", "openat"}  # by Python, after an interruption
ERRORS = {
    **dict.fromkeys(WRITES.split(","), ("ENOSPC", "EDQUOT", "EIO")),
    **dict.fromkeys(SYNCS.split(","), ("EIO", "ENOSPC")),
    **dict.fromkeys(("fsync", "fdatasync"), ("EIO", "ENOSPC", "EINVAL")),  # EINVAL: there is no such call here
    **dict.fromkeys(RENAMES.split(","), ("EACCES", "EIO", "ENOSPC")),
    **dict.fromkeys(("mkdir", "mkdirat", "open", "openat"), ("EACCES", "EROFS", "EMFILE", "ENOSPC")),
    **dict.fromkeys(("ftruncate", "fallocate"), ("ENOSPC", "EPERM")),
    **dict.fromkeys(("chmod", "fchmod", "fchmodat"), ("EPERM",)),
    **dict.fromkeys(REMOVING, ("EACCES", "EIO", "EROFS")),
}


def check_errors(ends: Ends, folder: str, cause: str) -> None:
    """Raise unless every rank has an error of ours that names a file in the folder and the cause."""
    for end in ends:
        assert not end["silent"] and not end["signal"], ends
        assert end["error"] is not None, f"one rank heard nothing: {ends}"
        assert "CheckpointingException" in end["kinds"], ends
        # A save syncs the folder's parent too.
        named = folder in end["text"] or f"{os.path.dirname(folder)!r}" in end["text"]
        assert named and os.strerror(getattr(errno, cause)) in end["text"], ends


def check_refused(saver: Saver, job: Job, old: Path, point: Point, cause: str, folder: Path, *, for_good: bool) -> str:
    """Raise unless a save with a call refused ends as it should; return how it ended."""
    there, log = replace(job, folder=str(folder)), folder.with_suffix(".log")
    # A rank's threads share its calls out anew in each save, so that the call of that number may not come.
    for _ in range(5):
        shutil.rmtree(folder, ignore_errors=True)
        if old.exists():
            shutil.copytree(old, folder)
        names = listing(str(folder))
        ends = saver(there, inject(point, f"error={cause}", log, for_good=for_good))
        if was_injected(log, str(folder)):
            break
    else:
        shutil.rmtree(folder, ignore_errors=True)
        return "missed"
    saved = value_in(there)
    assert saved in (OLD if old.exists() else None, NEW), f"{saved} after {cause} at {point}"
    if all(end["error"] is None for end in ends):
        assert saved == NEW, f"taken for saved after {cause} at {point}"
    else:
        check_errors(ends, str(folder), cause)
    # What can't be removed, or not be looked for, stays until the next save.
    if saved != NEW and point.call not in REMOVING and not (for_good and point.call.startswith("open")):
        assert Counter(listing(str(folder))) <= Counter(names), f"left over after {cause} at {point}"
    check_retry(saver, there, f"{cause} at {point}")
    return "did without" if ends[0]["error"] is None else "error"


def check_retry(saver: Saver, job: Job, after: str) -> None:
    """Raise unless the next save works, and leaves nothing but its own; removes the folder."""
    saved = value_in(job)
    ends = saver(replace(job, value=NEXT, overwrite=saved is not None, storage="sound"))
    assert [end["error"] for end in ends] == [None] * job.ranks, f"{ends} after {after}"
    assert value_in(job) == NEXT, f"after {after}"
    shutil.rmtree(job.folder)


def check_refusals(
    saver: Saver, job: Job, tmp_path: Path, most: int, calls: Collection[str] = ERRORS.keys()
) -> Counter[str]:
    """Refuse each such call of a save, or a sample of them, for each reason, once and for good; return how many."""
    old = prepared(saver, job, tmp_path / "old")
    if old.exists():
        shutil.copytree(old, tmp_path / "traced")
    points = traced_points(saver, replace(job, folder=str(tmp_path / "traced")), tmp_path)
    refused = [point for point in points if point.call in calls]
    tries = [
        (point, cause, for_good) for point in refused for cause in ERRORS[point.call] for for_good in (False, True)
    ]
    # A small sample may hold nothing but calls that a save does without; it never does without a write.
    writes = [each for each in tries if each[0].call in WRITES.split(",")][:1]
    seen: Counter[str] = Counter()
    wrong: list[str] = []
    for number, (point, cause, for_good) in enumerate([*sample(tries, most), *writes]):
        try:
            seen[check_refused(saver, job, old, point, cause, tmp_path / f"{number}", for_good=for_good)] += 1
        except (AssertionError, shardtree.CheckpointingException) as error:
            wrong.append(f"{error}"[:500])
    assert not wrong, "\n".join([f"{len(wrong)} of {seen.total() + len(wrong)}", *wrong])
    assert seen["missed"] <= seen.total() / 20, seen
    return seen


JOBS = {
    **{f"over an old one, ranks {ranks}": Job(ranks=ranks, overwrite=True) for ranks in (1, 2)},
    **{f"into an empty folder, ranks {ranks}": Job(ranks=ranks) for ranks in (1, 2)},
    **{
        f"{name}, ranks {ranks}": Job(ranks=ranks, backend=(name, version))
        for ranks in (1, 2)
        for name, version in (("torch_dist", 1), ("dcp", 1), ("zarr", 3), ("huggingface", 1))
    },
}


@pytest.mark.slow
@pytest.mark.usefixtures("strace")
@pytest.mark.parametrize(("name", "most"), [("over an old one, ranks 1", 10), ("over an old one, ranks 2", 3)])
def test_a_refused_call_is_an_error_and_the_old_checkpoint_stays(
    name: str, most: int, saver: Saver, tmp_path: Path
) -> None:
    assert check_refusals(saver, JOBS[name], tmp_path, most)["error"]


@pytest.mark.exhaustive
@pytest.mark.timeout(3000)
@pytest.mark.usefixtures("strace")
@pytest.mark.parametrize("name", JOBS)
def test_every_refused_call_is_an_error_and_the_old_checkpoint_stays(name: str, saver: Saver, tmp_path: Path) -> None:
    print(f"\n{name}: {dict(check_refusals(saver, JOBS[name], tmp_path, 100_000))}")  # noqa: T201


@pytest.mark.slow
@pytest.mark.usefixtures("strace")
def test_a_disk_that_fails_as_it_begins_with_a_large_file_is_an_error(saver: Saver, tmp_path: Path) -> None:
    seen = check_refusals(saver, Job(overwrite=True, columns=2_500_000), tmp_path, 4, ["sync_file_range"])
    assert seen["error"] and not seen["did without"]


@pytest.mark.slow
@pytest.mark.usefixtures("strace")
def test_the_law_catches_a_refused_write_that_is_taken_for_one(saver: Saver, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"\d+ of 11"):
        check_refusals(saver, Job(overwrite=True, storage="deaf"), tmp_path, 10, WRITES.split(","))


def check_interruptions(saver: Saver, job: Job, tmp_path: Path, most: int) -> None:
    old = prepared(saver, job, tmp_path / "old")
    shutil.copytree(old, tmp_path / "traced")
    points = traced_points(saver, replace(job, folder=str(tmp_path / "traced")), tmp_path)
    for number, point in enumerate(sample([point for point in points if point.call in RETRIED], most)):
        there = replace(job, folder=str(tmp_path / f"{number}"))
        shutil.copytree(old, there.folder)
        log = tmp_path / "interrupted.log"
        ends = saver(there, inject(point, "error=EINTR", log))
        assert was_injected(log, there.folder), point
        assert [end["error"] for end in ends] == [None] * job.ranks, f"{ends} after {point}"
        assert value_in(there) == NEW


@pytest.mark.usefixtures("strace")
def test_a_call_that_is_interrupted_is_made_again(saver: Saver, tmp_path: Path) -> None:
    check_interruptions(saver, JOBS["over an old one, ranks 1"], tmp_path, 4)


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
@pytest.mark.usefixtures("strace")
@pytest.mark.parametrize("ranks", [1, 2])
def test_every_call_that_is_interrupted_is_made_again(ranks: int, saver: Saver, tmp_path: Path) -> None:
    check_interruptions(saver, JOBS[f"over an old one, ranks {ranks}"], tmp_path, 10_000)


def read_faults(point: Point) -> list[tuple[str, str | None]]:
    """Return what may happen at a call of a load: strace's option, and the cause that the error has to name."""
    if point.call in ("read", "readv", "pread64", "preadv", "preadv2"):
        # No bytes: the file seems to end.
        return [("error=EIO", "EIO"), ("retval=0", None), ("error=EINTR", "nothing")]
    return [("error=EIO", "EIO"), ("error=EACCES", "EACCES")]


def check_reads(saver: Saver, job: Job, tmp_path: Path, most: int) -> Counter[str]:
    """Raise if a load of which a read fails or comes back short does anything but say so, or return what was saved."""
    folder = prepared(saver, replace(job, do="save", overwrite=True), tmp_path / "old")
    there = replace(job, folder=str(folder), value=OLD)
    tries = [(point, *fault) for point in traced_points(saver, there, tmp_path, READS) for fault in read_faults(point)]
    seen: Counter[str] = Counter()
    for point, fault, cause in sample(tries, most):
        log = tmp_path / "read.log"
        [end] = saver(there, inject(point, fault, log))
        assert was_injected(log, str(folder)), point
        said = f"{fault} at {point}: {end}"
        assert not end["silent"] and not end["signal"], said
        seen["did without" if end["error"] is None else "error"] += 1
        if end["error"] is not None:
            assert "CheckpointingException" in end["kinds"] and str(folder) in end["text"], said
            assert cause is None or os.strerror(getattr(errno, cause)) in end["text"], said
        elif point.call in ("read", "pread64", "preadv", "preadv2") and cause == "EIO":
            raise AssertionError(f"nobody minded {said}")
    assert value_in(there) == OLD
    return seen


@pytest.mark.usefixtures("strace")
def test_a_read_that_fails_or_comes_back_short_is_an_error(saver: Saver, tmp_path: Path) -> None:
    assert check_reads(saver, Job(do="load"), tmp_path, 8)["error"]


LOADS = [
    (name, version, verify)
    for name, version in (("safetensors", 1), ("torch_dist", 1), ("dcp", 1), ("zarr", 3), ("huggingface", 1))
    for verify in ("all", "whole")
]


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
@pytest.mark.usefixtures("strace")
@pytest.mark.parametrize(("name", "version", "verify"), LOADS)
def test_every_read_that_fails_or_comes_back_short_is_an_error(
    name: str, version: int, verify: str, saver: Saver, tmp_path: Path
) -> None:
    print(f"\n{name}: {check_reads(saver, Job(backend=(name, version), do='load', verify=verify), tmp_path, 100_000)}")  # noqa: T201
