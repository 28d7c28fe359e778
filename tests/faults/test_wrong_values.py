"""A value of another type in any place of DeepSpeed's and verl's files is an error of ours, or changes nothing."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache
from random import Random
from typing import Any

import pytest

import shardtree as st
from shardtree.errors import CheckpointingException, CorruptCheckpoint
from shardtree.formats.rank_archives import ValueAt
from tests.faults.sampling import EXHAUSTIVE, SEED
from tests.faults.wrong_values import OTHER_TYPES, value_ends, with_value
from tests.fuzz.seeds import Files
from tests.fuzz.slots import Slot, slots
from tests.shell.table.folders import folder_of as stored

FORMATS = ("deepspeed", "universal", "dtensor_files")

SHARES = 240
"""Parts of all cases, of which a usual run tries one."""


@cache
def cases(name: str, seed: int = SEED) -> list[tuple[Slot, int, str]]:
    """Return each place of the pickles of a format's files with each value, in an order of no kind."""
    places = [(slot, end) for slot in slots(name) if slot.kind == "pickle" for end, _ in value_ends(slot.seed)]
    chosen = Random(f"{seed} {name}")
    # One value in each of very many places, and all values in some.
    found = [(*place, chosen.choice(list(OTHER_TYPES))) for place in chosen.sample(places, min(len(places), 4000))]
    found += [(*place, value) for place in chosen.sample(places, 200) for value in OTHER_TYPES]
    return chosen.sample(found, len(found))


Call = Callable[[Any], object]

CALLS: tuple[Call, ...] = (
    st.load_sharded_metadata,
    st.load_common_state_dict,
    st.load_plain_tensors,
    st.verify,
    lambda place: st.compare(place, place),
)


def foreign(files: Files, calls: Sequence[Call] = CALLS) -> list[str]:
    """Return the errors that aren't ours, of every way to read a checkpoint."""
    storage, found = stored(files), []
    for call in calls:
        try:
            call(storage)
        except CheckpointingException as error:
            assert 0 < len(str(error)) < 10_000
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}"[:200])
    return found


PLACE = re.compile(
    r"saved(\[| is )"  # the path of a value
    r"|(at|before) byte \d"  # what isn't a pickle of data
    r"|param_shapes|partition_count|hyperparameter groups|rank \d+'s part of '"  # what files contradict
    r"|\n  '[^'\n]+': "  # a tensor, and how much of it files have
)


def unplaced(files: Files, name: str) -> list[str]:
    """Return the errors that don't name a file and a place in it, of what reads all of the files' values."""
    storage, found = stored(files), []
    for call in (st.load_sharded_metadata, st.load_common_state_dict):
        try:
            call(storage)
        except CheckpointingException as error:
            text = str(error)
            # Where files contradict each other, it may be another one that is named, and what is wrong with it.
            names_it = name.partition(",")[0] in text or ".pt'" in text
            found += [] if names_it and PLACE.search(text) else [text]
    return found


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("law", "seed"),
    [
        (lambda files, name: foreign(files), SEED),
        # Always the same cases: words for a place are listed above, and a rare error of another kind is one of ours.
        (unplaced, 0),
    ],
    ids=["an error of ours", "names the file and the place"],
)
@pytest.mark.parametrize(
    "share", [0, *(pytest.param(share, marks=EXHAUSTIVE) for share in range(1, SHARES))], ids=lambda share: f"{share}"
)
@pytest.mark.parametrize("name", FORMATS)
def test_a_value_of_another_type_is(name: str, share: int, law: Callable[[Files, str], list[str]], seed: int) -> None:
    wrong = {}
    for slot, end, value in cases(name, seed)[share::SHARES]:
        found = law(slot.files(with_value(slot.seed, end, OTHER_TYPES[value])), slot.name)
        wrong |= {f"{slot.name}, byte {end}: {value}": found} if found else {}
    assert not wrong


@pytest.mark.slow
def test_the_planted_fault_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that takes any type raises what isn't ours."""
    monkeypatch.setattr(ValueAt, "of", lambda self, *kinds: self.value)
    calls = [st.load_sharded_metadata]
    changed = (slot.files(with_value(slot.seed, end, OTHER_TYPES[value])) for slot, end, value in cases("universal"))
    assert any(foreign(files, calls) for files in changed)


@pytest.mark.parametrize(
    ("read", "found"),
    [
        (lambda at: at.member("a").items()[1].of(int), "saved['a'][1] is True, a bool, expected an int"),
        (lambda at: at.member("a").items()[2].count(), "saved['a'][2] is -1, an int, expected 0 or more, in 64 bits"),
        (lambda at: at.member("b").of(dict, list), "saved['b'] is nothing, expected a dict or a list"),
        (lambda at: at.member("d").shape(), "saved['d'] is a list, expected a shape whose elements 64 bits can count"),
        (lambda at: at.members(str), "saved is a dict, expected keys that are each a str, not 7, an int"),
        (lambda at: at.member("e").of(str), "saved['e'] is an int, expected a str"),
        (
            lambda at: at.member("f").members(int),
            "saved['f'] is a dict, expected keys of 0 or more, in 64 bits, not an int",
        ),
        (
            lambda at: at.member("g").members(int, str),
            "saved['g'] is a dict, expected keys of 0 or more, in 64 bits, not -1, an int",
        ),
    ],
)
def test_the_error_names_the_file_and_the_place(read: Any, found: str) -> None:
    value = {"a": [1, True, -1], "d": [2**40, 2**40], "e": 10**5000, "f": {10**5000: 0}, "g": {-1: 0}, 7: 0}
    where = "'f.pt' has a value of an unexpected type or size\n  found "
    with pytest.raises(CorruptCheckpoint, match=re.escape(f"{where}{found}\n")):
        read(ValueAt(value, "f.pt"))
