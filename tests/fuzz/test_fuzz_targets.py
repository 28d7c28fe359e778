"""The fuzz targets on their seeds and on changes of them, the same each time and without atheris: they can't rot."""

from __future__ import annotations

import gc
import json
from contextlib import suppress
from pathlib import Path
from random import Random
from zlib import crc32

import numpy as np
import pytest

import shardtree as st
from tests.faults.sampling import sample
from tests.fuzz import targets
from tests.fuzz.mutators import BY_KIND, change_bytes, changed
from tests.fuzz.slots import FORMATS, checkpoint_of, seed_inputs, slots
from tests.fuzz.targets import Finding, try_input
from tests.fuzz.watch import watched
from tests.shell.table.folders import folder_of

INPUTS = 40
SEEDS, WARMING = 16, 6
"""How many of a format's seeds a run tries, and how many are read before memory is measured."""

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="memory is measured as Linux does"),
]


@pytest.fixture(scope="module", params=FORMATS)
def name(request: pytest.FixtureRequest) -> str:
    """Return a format of which all has been imported and made once."""
    found: str = request.param
    # Hugging Face's too: a changed file may look like one of its, and loads the code for them.
    for other in {found, "huggingface"}:
        for _, data in sample([*seed_inputs(other)], WARMING):
            with suppress(Finding):
                try_input(other, data)
    return found


@pytest.mark.slow
def test_the_seeds_are_sound_checkpoints_whatever_place_they_fill(name: str) -> None:
    for number, data in sample([*seed_inputs(name)], SEEDS):
        files = checkpoint_of(name, data)
        assert try_input(name, data) > 5, (number, slots(name)[data[0]].name)
        if "digest" in files.get("metadata.json", b"").decode():
            assert not st.verify(folder_of(files))


@pytest.mark.slow
def test_changed_seeds_end_well(name: str) -> None:
    random = Random(crc32(name.encode()))
    seeds = [data for _, data in seed_inputs(name)]
    for _ in range(INPUTS):
        data = changed(name, random.choice(seeds), random, change_bytes)
        data = changed(name, data, random, change_bytes) if random.random() < 0.3 else data
        try_input(name, data)


@pytest.mark.parametrize("kind", BY_KIND)
def test_changes_depend_on_nothing_but_the_random_numbers(kind: str) -> None:
    seed = next(slot.seed for format_name in FORMATS for slot in slots(format_name) if slot.kind == kind)
    made = [[BY_KIND[kind](seed, Random(number)) for number in range(20)] for _ in range(2)]
    assert made[0] == made[1] and len(set(made[0])) > 10


def test_an_input_gets_past_the_checksums() -> None:
    """Changed structure, index and fields are read as they are, not refused for their hash."""
    for place in ("common, structure", "index, columns", "metadata.json, sealed"):
        number, slot = next((n, slot) for n, slot in enumerate(slots("safetensors")) if slot.name == place)
        change = {
            "common, structure": b'{"step":8}',
            "metadata.json, sealed": slot.seed.replace(b'"index"', b'"indes"'),
        }
        body = change.get(place, b"\xff" * len(slot.seed))
        storage = folder_of(checkpoint_of("safetensors", bytes([number]) + body))
        try:
            st.load_common_state_dict(storage)
            st.load_sharded_metadata(storage)
        except st.CheckpointingException as error:
            assert "hash" not in str(error), place


def read_without_checks(name: str, data: bytes) -> None:
    for content in checkpoint_of(name, data).values():
        json.loads(content)["sharded_backend"]


def leak(name: str, data: bytes) -> None:
    np.ones(50_000_000)


def spend(name: str, data: bytes) -> None:
    sum(range(30_000_000))


def touch(name: str, data: bytes) -> None:
    Path("/etc/hostname").exists()
    Path("/etc/hosts").open().close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "finding"), [(read_without_checks, "Error: "), (leak, " MB"), (spend, r"\d s$"), (touch, "touched")]
)
def test_a_target_catches_planted_faults(fault: object, finding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "_calls", lambda files, is_bounded: [lambda: fault("safetensors", b"\0{}")])
    if fault is spend:
        monkeypatch.setattr(targets, "MOST_SECONDS", 0.05)
    gc.collect()  # memory of earlier tests that is freed meanwhile would hide a growth
    with pytest.raises(Finding, match=finding):
        try_input("safetensors", b"\0{}")


def test_what_is_watched_ends_with_the_block() -> None:
    with watched() as log:
        Path("/etc/hosts").open().close()
    before = len(log)
    Path("/etc/hosts").open().close()
    assert before == len(log) == 1
