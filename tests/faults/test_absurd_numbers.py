"""Absurd numbers in the metadata of every format end every call in a result or an error of ours, in bounded memory.

A usual run tries six changes of each format. `-m exhaustive` tries every number of every place of every format's files,
with each absurd number, in parts: to run one format's, add ``-k dcp`` or its name.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import pytest

from shardtree.errors import CheckpointingException
from tests.faults.entry_points import entry_points
from tests.faults.sampling import EXHAUSTIVE, SEED
from tests.faults.wrong_values import with_absurd_numbers
from tests.fuzz.seeds import Files, write_files
from tests.fuzz.slots import FORMATS, slots

PARTS = 24

MOST_SECONDS = 30.0
"""Of processor time for a call; nearly all take hundredths, and planning 2**16 pieces a few seconds."""

MOST_BYTES = 1_500_000_000
"""By which the process may grow; that much isn't there for a tensor of 2**31 elements."""


@contextmanager
def bounded_memory() -> Iterator[None]:
    """Refuse what would take much more memory: a tensor that is made as large as it claims to be ends there."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    status = Path("/proc/self/status").read_text().splitlines()
    used = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmSize"))
    resource.setrlimit(resource.RLIMIT_AS, (used + MOST_BYTES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def problems(files: Files) -> Iterator[str]:
    """Yield what is wrong with each call on a checkpoint."""
    with TemporaryDirectory() as place:
        folder = write_files(Path(place) / "checkpoint", files)
        for name, call in entry_points(folder, Path(place) / "elsewhere"):
            begin = time.process_time()
            try:
                call()
            except CheckpointingException:
                pass
            except Exception as error:
                yield f"{name}: {type(error).__name__} {str(error)[:100]}"
            seconds = time.process_time() - begin
            if seconds > MOST_SECONDS:
                yield f"{name}: {seconds:.1f} s"


def found(name: str, count: int, part: int = 0) -> list[str]:
    """Return what is wrong with the calls on some changes of a format's checkpoints, or on a part of all."""
    cases = [(slot, *change) for slot in slots(name) for change in with_absurd_numbers(slot)]
    chosen = Random(SEED).sample(cases, count) if count else cases[part::PARTS]
    sound = slots(name)[0]
    wrong = [f"sound: {problem}" for problem in problems(sound.files(sound.seed))]
    with bounded_memory():
        return wrong + [f"{what}: {each}" for slot, what, data in chosen for each in problems(slot.files(data))]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", FORMATS)
def test_absurd_numbers_are_refused_in_bounded_time_and_memory(name: str) -> None:
    assert found(name, 6) == []


@EXHAUSTIVE
@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("name", FORMATS)
def test_all_absurd_numbers_are(name: str, part: int) -> None:
    assert found(name, 0, part) == []
