"""Ranks that want the same bytes read them once between them, and everybody gets what it asked for."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

import shardtree as st
from shardtree.errors import CheckpointingException, StrategyError
from shardtree.storage import MemoryStorage
from shardtree.testing import watched
from tests.options import load_keywords

SIZES = {"replicated": 4096, "rows": 512, "padded": 64, "empty": 0}
WHOLE = {key: torch.arange(size * 2, dtype=torch.int32).view(size, 2) for key, size in SIZES.items()}


def saved():
    folder = MemoryStorage()
    st.save({key: st.ShardedTensor.from_rank_offsets(key, tensor) for key, tensor in WHOLE.items()}, folder)
    return folder


FOLDER = saved()


def target(rank, ranks):
    rows = torch.zeros(SIZES["rows"] // ranks, 2, dtype=torch.int32)
    return {
        "replicated": st.ShardedTensor.from_rank_offsets(
            "replicated", torch.zeros_like(WHOLE["replicated"]), replica_id=rank
        ),
        "rows": st.ShardedTensor.from_rank_offsets("rows", rows, (0, rank, ranks)),
        "padded": st.ShardedTensor.from_rank_offsets(
            "padded", torch.full((100, 2), rank, dtype=torch.int32), replica_id=rank, allow_shape_mismatch=True
        ),
        "empty": st.ShardedTensor.from_rank_offsets("empty", WHOLE["empty"].clone(), replica_id=rank),
    }


def load_on(ranks, exchange, storage=FOLDER, **options):
    """What each rank got, and how many bytes it read."""

    def on_rank(world):
        reports = []
        loaded = st.load(
            target(world.rank, ranks),
            storage,
            world=world,
            **load_keywords(exchange=exchange, report=reports.append, **options),
        )
        (report,) = reports
        return loaded, report.bytes_read

    return st.simulate(ranks, on_rank)


def assert_everybody_has_everything(results):
    ranks = len(results)
    for rank, (loaded, _) in enumerate(results):
        assert torch.equal(loaded["replicated"], WHOLE["replicated"])
        assert torch.equal(loaded["rows"], WHOLE["rows"].chunk(ranks)[rank])
        assert torch.equal(loaded["padded"][:64], WHOLE["padded"]) and (loaded["padded"][64:] == rank).all()
        assert loaded["empty"].shape == (0, 2)


@pytest.mark.parametrize("exchange", ["always", "auto", "never"])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("donate", [False, True])
def test_every_rank_gets_what_it_asked_for(ranks, exchange, donate):
    assert_everybody_has_everything(load_on(ranks, exchange, donate=donate))


@pytest.mark.parametrize("ranks", [2, 4])
def test_each_byte_is_read_once_with_an_exchange(ranks):
    once = sum(WHOLE[key].nbytes for key in ("replicated", "rows")) + ranks * WHOLE["padded"].nbytes
    assert sum(count for _, count in load_on(ranks, "always")) == once


@pytest.mark.parametrize("ranks", [2, 4])
def test_each_rank_reads_for_itself_without(ranks):
    every = ranks * sum(WHOLE[key].nbytes for key in ("replicated", "padded")) + WHOLE["rows"].nbytes
    assert sum(count for _, count in load_on(ranks, "never")) == every


def test_the_check_sees_a_rank_that_got_nothing():
    results = load_on(2, "always")
    results[1][0]["replicated"].zero_()
    with pytest.raises(AssertionError):
        assert_everybody_has_everything(results)


def test_a_file_that_can_not_be_read_fails_every_rank():
    def broken(call):
        if call.method == "open" and "of-" in call.name:
            raise OSError("the medium is gone")

    def on_rank(world):
        with pytest.raises((CheckpointingException, OSError)):
            st.load(
                target(world.rank, 3),
                watched(FOLDER, before=broken),
                world=world,
                options=st.LoadOptions(exchange="always"),
            )
        return True

    assert st.simulate(3, on_rank) == [True] * 3


@pytest.mark.slow
@given(some.integers(1, 5), some.lists(some.sets(some.integers(0, 3)), min_size=1, max_size=5))
def test_any_choice_of_what_ranks_want_is_read_once_each(parts, wants):
    """Rank r asks for the parts wants[r]; integrity isn't checked, for nobody need ask for all of them."""
    size = 3 * parts * 4
    full = torch.arange(size)
    folder = MemoryStorage()
    st.save({"w": st.ShardedTensor.from_rank_offsets("w", full)}, folder)

    def on_rank(world):
        chosen = sorted(part for part in wants[world.rank])
        shards = {
            str(part): st.ShardedTensor.from_rank_offsets("w", torch.zeros(size // 4, dtype=torch.int64), (0, part, 4))
            for part in chosen
        }
        reports = []
        options = {"exchange": "always", "validate_access_integrity": False, "report": reports.append, "world": world}
        loaded = st.load(shards, folder, **load_keywords(**options))
        for part in chosen:
            assert torch.equal(loaded[str(part)], full.chunk(4)[part])
        return reports[0].bytes_read

    read = sum(st.simulate(len(wants), on_rank))
    assert read == len(set().union(*wants)) * full.nbytes // 4


@pytest.mark.parametrize("exchange", ["sometimes", None, True])
def test_another_choice_is_refused(exchange):
    with pytest.raises(StrategyError, match="'auto', 'always' or 'never'"):
        st.load({}, FOLDER, options=st.LoadOptions(exchange=exchange))
