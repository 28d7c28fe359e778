"""The eight strict modes: which keys are an error, logged, returned or left out; beside Megatron-Core's own choice."""

from __future__ import annotations

import logging

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some

import shardtree as st
from shardtree.errors import KeyMismatch
from tests.shell.checkpoint import parts

MODES = list(st.StrictHandling)
RAISING = {st.StrictHandling.RAISE_UNEXPECTED, st.StrictHandling.RAISE_ALL}
RETURNING = {st.StrictHandling.RETURN_UNEXPECTED, st.StrictHandling.RETURN_ALL}
LOGGING = {st.StrictHandling.LOG_UNEXPECTED, st.StrictHandling.LOG_ALL}
NAMES = "abcdef"


def leaf(key, replica_id=0):
    """A tensor for the first names, an object for the others."""
    if key in "abcd":
        return st.ShardedTensor.from_rank_offsets(key, torch.full((2,), ord(key)), replica_id=replica_id)
    return st.ShardedObject(key, key, (1,), (0,), replica_id)


def saved(keys):
    return parts.saved({key: leaf(key) for key in keys} | {"step": 1})


def outcome(call):
    """What a call gives: what is loaded with missing and unexpected keys, or that it raised."""
    try:
        found = call()
    except KeyMismatch:
        return "raised"
    tree, *keys = found if isinstance(found, tuple) else (found,)
    return {key for key in tree if key != "step"}, keys


def load_on_ranks(stored, asked, mode):
    """The outcome on each rank, each of which asks for its own keys."""
    folder = saved(stored)

    def on_rank(world):
        target = {key: leaf(key, sum(key in asked[rank] for rank in range(world.rank))) for key in asked[world.rank]}
        return outcome(lambda: st.load(target, folder, strict=mode, world=world))

    return st.simulate(len(asked), on_rank)


def expected(stored, asked, mode):
    """The same by the definitions: unexpected is one rank's, missing is everybody's."""
    everywhere = set().union(*asked)
    missing = stored - everywhere if mode.value.endswith("_all") else set()
    unexpected = [keys - stored for keys in asked]
    strictly = mode is st.StrictHandling.ASSUME_OK_UNEXPECTED or mode in RAISING
    if (strictly and any(unexpected)) or (mode in RAISING and missing):
        return ["raised"] * len(asked)
    return [
        (keys & stored, [missing, extra] if mode in RETURNING else [])
        for keys, extra in zip(asked, unexpected, strict=True)
    ]


keys = some.sets(some.sampled_from(NAMES))


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.filterwarnings("ignore")
def test_each_mode_does_what_its_name_says_on_every_rank(mode):
    @settings(max_examples=12)
    @given(keys, some.lists(keys, min_size=1, max_size=3))
    def law(stored, asked):
        assert load_on_ranks(stored, asked, mode) == expected(stored, asked, mode)

    law()


def test_the_law_sees_one_mode_taken_for_another():
    stored, asked = {"a", "b"}, [{"a"}, {"c"}]
    found = load_on_ranks(stored, asked, st.StrictHandling.RETURN_UNEXPECTED)
    assert found != expected(stored, asked, st.StrictHandling.RETURN_ALL)


@pytest.mark.parametrize("mode", MODES)
def test_only_logging_modes_log_and_name_every_key(mode, caplog):
    caplog.set_level(logging.DEBUG)
    if mode in RAISING:
        with pytest.raises(KeyMismatch, match=r"'d'"):
            st.load({"a": leaf("a"), "d": leaf("d")}, saved("ab"), strict=mode)
    elif mode is not st.StrictHandling.ASSUME_OK_UNEXPECTED:
        st.load({"a": leaf("a"), "d": leaf("d")}, saved("ab"), strict=mode)
    lines = [record.getMessage() for record in caplog.records if record.name == "shardtree"]
    assert len(lines) == (mode in LOGGING)
    for text in lines:
        assert "unexpected (asked for, not stored): 'd'" in text
        assert ("'b'" in text) == (mode is st.StrictHandling.LOG_ALL)


# All keys are named: as attributes of the error, which shows some of each kind, and in the log.

MANY = some.sets(some.integers(0, 40), max_size=30)


def named_by(error):
    return set(error.missing), set(error.unexpected)


def shown_by(error):
    """A planted fault: only what the text shows."""
    lines = str(error).splitlines()
    kinds = ("missing (", "unexpected (")
    return tuple({line.split("'")[1] for line in lines if line.strip().startswith(kind)} for kind in kinds)


def check_all_named(stored, asked, named):
    folder = parts.saved_tensors(**{f"k{n}": torch.zeros(1) for n in stored})
    target = {f"k{n}": parts.whole(f"k{n}", torch.zeros(1)) for n in asked}
    missing, unexpected = ({f"k{n}" for n in keys} for keys in (stored - asked, asked - stored))
    if not missing and not unexpected:
        return
    with pytest.raises(KeyMismatch) as raised:
        st.load(target, folder, strict="raise_all")
    assert named(raised.value) == (missing, unexpected)
    assert list(raised.value.missing) == sorted(missing) and list(raised.value.unexpected) == sorted(unexpected)
    for kind, keys in (("missing (", missing), ("unexpected (", unexpected)):
        assert (kind in str(raised.value)) == bool(keys)
        assert len(str(raised.value).splitlines()) <= 13


@settings(max_examples=30)
@given(MANY, MANY)
def test_an_error_has_all_keys_and_shows_some_of_each_kind(stored, asked):
    check_all_named(stored, asked, named_by)


def test_the_law_catches_keys_that_are_only_shown():
    check_all_named(set(range(20)), {30}, named_by)
    with pytest.raises(AssertionError):
        check_all_named(set(range(20)), {30}, shown_by)


# Keys that all differ by one prefix.


@pytest.mark.parametrize("strict", ["assume_ok_unexpected", "raise_unexpected", "raise_all"])
def test_keys_that_differ_by_one_prefix_are_told_of_once(strict):
    folder = parts.saved(st.prefix({key: leaf(key) for key in "abcd"}, "model."))
    with pytest.raises(KeyMismatch, match=r"4 keys are stored with 'model\.' before them") as raised:
        st.load({key: leaf(key) for key in "abcd"}, folder, strict=strict)
    text = str(raised.value)
    assert "st.prefix(tree, 'model.')" in text and "did you mean" not in text and "missing (" not in text
    assert raised.value.unexpected == tuple("abcd")


# What is in the common state.


@pytest.mark.parametrize("strict", ["assume_ok_unexpected", "raise_unexpected"])
@pytest.mark.parametrize("key", ["w", "model.w"])
def test_a_tensor_of_the_common_state_is_said_to_be_there(key, strict):
    folder = parts.saved({"model": {"w": torch.zeros(2)}, "a": leaf("a")})
    shard = st.ShardedTensor.from_rank_offsets(key, torch.zeros(2))
    target = {"model": {"w": shard}} if key == "w" else {"elsewhere": shard}
    how = rf"'{key}'(: not stored as shards: it)? is a plain tensor of the common state"
    said = rf"{how} at tree\['model'\]\['w'\]\n[\s\S]*Leave plain tensors"
    with pytest.raises(KeyMismatch, match=said):
        st.load(target, folder, strict=strict)
    assert set(st.load(target, folder, strict="ignore_all")) == {"model"}


def test_an_unexpected_shard_without_data_in_a_list_is_an_error_since_positions_would_shift():
    with pytest.raises(st.errors.TreeError):
        st.load({"list": [leaf("a"), leaf("d").without_data()]}, saved("a"), strict="ignore_all")
