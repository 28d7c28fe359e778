"""Several ranks convert together: the bits of one, each byte read and written once; killed, others go on with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import takewhile
from threading import current_thread
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

import shardtree as st
from shardtree.conversion import ConversionReport, _write, convert
from shardtree.conversion._identity import common_hash
from shardtree.errors import IntegrityError, StorageError
from shardtree.inspection._comparison import compare
from shardtree.storage import MemoryStorage
from shardtree.strategies import StrategyAction, default_strategies
from shardtree.testing import Call, global_states, rank_tree, state_layouts, watched
from shardtree.world import simulate
from tests.conversion.test_convert_formats import BACKENDS, HOLDS_TENSORS_ONLY, names
from tests.inspection.test_explain import payload
from tests.shell.checkpoint.parts import Killed, counted, saved
from tests.shell.checkpoint.parts import whole as tensor

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


# One tensor is most of it.
LARGE = torch.arange(1200.0).reshape(40, 30)
TENSORS = [tensor("w", LARGE), *(tensor(f"v{number}", torch.arange(20) + number) for number in range(6))]
TREE = {"model": dict(enumerate(TENSORS)), "rng": st.ShardedObject("rng", {"seed": 1}, (1,), (0,)), "step": 7}

SOURCE = saved(TREE)


def run(ranks: int, source: Any, folder: Any, **options: Any) -> list[ConversionReport]:
    options = {"backend": "safetensors", "max_bytes_in_flight": 400, **options}
    return simulate(ranks, lambda world: convert(source, folder, **options, world=world))


def doubled(tree: dict[str, Any]) -> dict[str, Any]:
    return {key: replace(leaf, data=leaf.data * 2) for key, leaf in tree.items()}


TRANSFORMS: dict[str, Callable[[Any], Any] | None] = {
    "none": None,
    "cast": partial(st.cast, dtype=torch.bfloat16),
    "prefix": st.bind(st.prefix, "new."),
}


def check_same(ranks: int, source: MemoryStorage, **options: Any) -> None:
    """Raise unless several ranks write what one does: the same files, as long, with the same elements."""
    alone, together = MemoryStorage(), MemoryStorage()
    (expected,) = run(1, source, alone, **options)
    reports = run(ranks, source, together, **options)
    assert reports == [expected] * ranks
    assert not compare(alone, together)
    assert names(together) == names(alone)


@pytest.mark.slow
@given(some.data())
def test_several_ranks_write_what_one_writes(data: some.DataObject) -> None:
    state = data.draw(global_states())
    layout, source = data.draw(state_layouts(state, 2)), MemoryStorage()
    simulate(2, lambda world: st.save(rank_tree(state, layout, world.rank), source, world=world))
    transform = TRANSFORMS[data.draw(some.sampled_from(sorted(TRANSFORMS)))]
    most = data.draw(some.sampled_from([64, 1 << 20]))
    check_same(data.draw(some.integers(1, 4)), source, transform=transform, max_bytes_in_flight=most)


def test_the_law_catches_a_rank_that_writes_something_else() -> None:
    row = (StrategyAction.SAVE_SHARDED, "safetensors", 1)

    def zeroed(pending: st.strategies.PendingSave, shards: Any) -> Any:
        # Ranks of the conversion are known by their threads' names only: a save's ranks are its batches.
        blank = [replace(leaf, data=torch.zeros_like(leaf.data.read())) for leaf in shards if leaf.key == "w"]
        mine = blank if _thread_rank() else []
        return default_strategies[row](pending, [*mine, *(leaf for leaf in shards if leaf.key != "w" or not mine)])

    with pytest.raises(AssertionError):
        check_same(3, saved(TENSORS), strategies={**default_strategies, row: zeroed}, verify=False)
    with pytest.raises(IntegrityError, match=r"'w': [0-9]+ of 1200 elements differ"):
        run(3, saved(TENSORS), MemoryStorage(), strategies={**default_strategies, row: zeroed})


def _thread_rank() -> int:
    words = current_thread().name.split()
    return int(words[1]) if words[0] == "rank" else 0


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS, ids=str)
@pytest.mark.parametrize("ranks", [2, 3])
def test_every_format_is_written_by_several(backend: tuple[str, int], ranks: int) -> None:
    leave_out = ["rng", "common"] if backend[0] in HOLDS_TENSORS_ONLY else []
    check_same(ranks, saved(TREE), backend=backend, leave_out=leave_out)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_each_byte_is_read_once_and_written_once(ranks: int) -> None:
    check_once(ranks)


def check_once(ranks: int) -> None:
    folder = saved(TENSORS)
    source, written = counted(folder), list[Call]()
    # Unchecked: else the whole block of a checksum is read where a batch ends in it, twice by neighbours.
    options: dict[str, Any] = {"verify": False, "load_options": st.LoadOptions(verify=None), "transform": doubled}
    run(ranks, source, watched(MemoryStorage(), after=written.append), **options)
    stored = sum(leaf.data.nbytes for leaf in TENSORS)
    assert payload(source.counts, folder) == stored, "bytes read"
    data = [call.name for call in written if call.method == "write" and "-of-" in call.name]
    assert len(data) == len(set(data)), "a file was written twice"


def test_the_law_catches_ranks_that_do_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def everything(sized: Sequence[tuple[int, int]], ranks: int) -> list[list[list[int]]]:
        return [[[number for number, _ in sized if number or not rank] for rank in range(ranks)]]

    monkeypatch.setattr(_write, "deal", everything)
    with pytest.raises(AssertionError, match="bytes read"):
        check_once(2)


@given(
    some.lists(some.integers(0, 100), min_size=1, max_size=80),
    some.integers(1, 5),
)
def test_batches_are_dealt_out_once_and_level(sizes: list[int], ranks: int) -> None:
    rounds = _write.deal(list(enumerate(sizes)), ranks)
    dealt = sorted(number for hands in rounds for hand in hands for number in hand)
    assert dealt == [*range(len(sizes))]
    assert 0 in rounds[0][0]
    for hands in rounds:
        own = [sum(sizes[number] for number in hand) for hand in hands]
        largest = max((sizes[number] for hand in hands for number in hand), default=0)
        # A run's ends may lie half a batch off; the first batch is always rank 0's.
        assert max(own) <= sum(own) / ranks + 2 * largest


def test_one_tensor_that_is_most_of_it_is_shared_out() -> None:
    def rank_nbytes(world: st.World) -> int:
        done: list[int] = []
        options = st.SaveOptions(progress=done.append)
        convert(
            source,
            folder,
            backend="safetensors",
            max_bytes_in_flight=400,
            verify=False,
            save_options=options,
            world=world,
        )
        return sum(done)

    source, folder = saved(TENSORS[:1]), MemoryStorage()
    shares = simulate(4, rank_nbytes)
    # With the headers of files: a file for each batch.
    assert sum(shares) >= LARGE.nbytes
    assert max(shares) <= sum(shares) / 4 + 800


def test_what_fails_on_one_rank_fails_on_all_and_is_gone_on_with() -> None:
    source, folder = saved(TREE), MemoryStorage()

    def full(call: Call) -> None:
        if call.method == "write" and "/00009-of-" in call.name:
            raise StorageError("no room")

    def attempt(world: st.World) -> str:
        with pytest.raises(StorageError) as caught:
            convert(
                source,
                watched(folder, before=full),
                backend="safetensors",
                max_bytes_in_flight=400,
                world=world,
            )
        assert "the same call resumes from it" in caught.value.__notes__[-1]
        return str(caught.value)

    texts = simulate(3, attempt)
    assert len(set(texts)) == 1 and "no room" in texts[0], texts
    assert not st.is_checkpoint(folder)
    (report,) = run(1, source, folder)
    assert 0 < report.resumed < report.batches
    assert not compare(source, folder)


COMMON: dict[str, Callable[[int], Any]] = {
    "values": lambda rank: lambda common: {"step": 8 + rank},
    "on one rank alone": lambda rank: (lambda common: {"step": 8}) if rank == 2 else None,
    "tensors": lambda rank: lambda common: {"seed": torch.tensor([1, 2 + rank])},
}


@pytest.mark.parametrize("name", COMMON)
def test_ranks_that_change_the_common_state_in_other_ways_are_refused(name: str) -> None:
    source, folder, change = saved(TREE), MemoryStorage(), COMMON[name]

    def attempt(world: st.World) -> None:
        options = {"backend": "safetensors", "transform_common": change(world.rank)}
        with pytest.raises(st.errors.WorldError, match=r"rank [12] would write another common state than rank 0"):
            convert(source, folder, **options, world=world)

    simulate(3, attempt)
    assert not st.is_checkpoint(folder)
    run(2, source, folder, transform_common=change(2))
    assert st.load_common_state_dict(folder) != st.load_common_state_dict(source)


# Killed, and gone on with by another number of ranks.

CHANGES = {"write", "write_parts", "replace", "move", "remove"}


def killed(ranks: int, folder: MemoryStorage, change: int) -> tuple[bool, set[str]]:
    """Return whether a conversion was killed at its n-th change of the folder, and the batches that it had recorded."""
    changes, done = 0, set[str]()

    def before(call: Call) -> None:
        nonlocal changes
        changes += call.method in CHANGES
        if changes > change:  # from then on no rank gets anything done
            raise Killed

    def after(call: Call) -> None:
        if call.method == "replace" and call.name.endswith(".done"):
            done.add(call.name)

    try:
        run(ranks, SOURCE, watched(folder, before=before, after=after))
    except Killed:
        return True, done
    return False, done


def check_resumed(ranks: int, others: int, change: int) -> bool:
    """Raise unless what some ranks began is gone on with by others; return whether they were killed."""
    folder = MemoryStorage()
    was_killed, done = killed(ranks, folder, change)
    if not was_killed:
        return False
    if st.is_checkpoint(folder):
        assert not compare(SOURCE, folder)
        return True
    reports = run(others, SOURCE, folder)
    assert {report.resumed for report in reports} == {len(done)}, "batches were written again"
    assert not compare(SOURCE, folder)
    assert [name for name in names(folder) if ".convert" in name] == []
    return True


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "others", "first"), [(1, 2, 0), (2, 1, 3), (2, 3, 6), (4, 2, 9)])
def test_what_some_ranks_began_is_gone_on_with_by_others(ranks: int, others: int, first: int) -> None:
    """Killed at every twelfth change: each pair of numbers at others than the rest."""
    at = list(takewhile(lambda change: check_resumed(ranks, others, change), range(first, 200, 12)))
    assert len(at) > 5


def test_the_law_of_resuming_catches_a_journal_of_each_number_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_write, "results_of", lambda journal, batches: {})
    with pytest.raises(AssertionError, match="batches were written again"):
        check_resumed(2, 3, 21)


def test_what_only_a_pickle_holds_is_not_compared_between_processes() -> None:
    assert common_hash({"step": 3}) == common_hash({"step": 3}) != common_hash({"step": 4})
    assert common_hash({"names": ConversionReport.__str__}) == ""
