"""Tables of a caller's own, and names of a backend's data files: what isn't one is refused where it is given."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import shardtree as st
from shardtree.errors import StrategyError
from shardtree.shell.table import StrategyTable, is_whole, traits_of
from shardtree.shell.table._save_folders import is_save_file, new_save_id
from shardtree.storage import MemoryStorage
from shardtree.strategies import (
    PendingSave,
    StrategyAction,
    rank_file,
    rank_files,
    rows_of_saves,
    save_with_index,
    write_file,
)
from shardtree.world import one_process

SAVE = StrategyAction.SAVE_SHARDED
BAD_TABLES: dict[str, Any] = {
    "two parts": {("x", 1): print},
    "one part": {(SAVE,): print},
    "four parts": {(SAVE, "x", 1, 2): print},
    "a text": {"save_sharded": print},
    "an action": {SAVE: print},
    "an action's name": {("save_sharded", "x", 1): print},
    "parts in another order": {(SAVE, 1, "x"): print},
    "a bool": {(SAVE, "x", True): print},
    "no function": {(SAVE, "x", 1): 3},
    "a module's name": {(SAVE, "x", 1): "x"},
    "None as a row": {None: print},
    "no mapping": 3,
    "a list": [1],
}


@pytest.mark.parametrize("name", BAD_TABLES)
def test_what_is_no_table_is_refused_wherever_it_is_given(name: str) -> None:
    bad = BAD_TABLES[name]
    calls: list[Callable[[], Any]] = [
        lambda: st.default_strategies | bad,
        lambda: bad | st.default_strategies,
        lambda: StrategyTable(bad),
        lambda: st.save({"step": 1}, MemoryStorage(), strategies=bad),
        lambda: st.open_checkpoint(MemoryStorage(), strategies=bad),
        lambda: st.is_checkpoint(MemoryStorage(), strategies=bad),
    ]
    for call in calls:
        with pytest.raises(StrategyError, match="dispatch table") as caught:
            call()
        assert "(action, backend, version): function" in str(caught.value)


def pending() -> PendingSave:
    return PendingSave(MemoryStorage(), new_save_id(), one_process())


@pytest.mark.parametrize(("suffix", "number"), [("tar", 0), ("npy", 3), ("7z", 12), ("0", 1)])
def test_names_are_those_that_the_clean_up_knows(suffix: str, number: int) -> None:
    assert is_save_file(rank_file(pending(), suffix, number))


BAD_NAMES: list[tuple[Any, Any]] = [
    *(("0.npy", 0), ("", 0), ("Tar", 0), ("tar.gz", 0), ("t/r", 0), ("../x", 0), ("t r", 0), ("t\n", 0), ("\u0663", 0)),
    *(("tar", -1), ("tar", 1.5), ("tar", "x"), ("tar", True), (None, 0), (3.5, 0)),
]


@pytest.mark.parametrize(("suffix", "number"), BAD_NAMES)
def test_other_names_are_refused(suffix: Any, number: Any) -> None:
    with pytest.raises(StrategyError, match="invalid name of a file"):
        rank_file(pending(), suffix, number)


@pytest.mark.parametrize("name", ["00000-of-00001.tar", "other/00000-of-00001.tar", "{}/x.tar", "{}/owner.json", "{}/"])
def test_files_are_written_and_listed_by_such_names_alone(name: str) -> None:
    save = pending()
    with pytest.raises(StrategyError, match="invalid name of a file"):
        write_file(save, name.format(save.save_id), [b"abc"])
    assert not save.storage.names("")

    def save_sharded(pending: PendingSave, shards: Any) -> Any:
        def write() -> Any:
            file = write_file(pending, rank_file(pending, "tar"), [b"abc"])
            return rank_files(pending, [(replace(file, name=name.format(pending.save_id)), [])])

        return save_with_index(pending, write)

    rows = {**rows_of_saves("tar", 1), (SAVE, "tar", 1): save_sharded}
    storage, tree = MemoryStorage(), {"w": st.ShardedTensor.from_rank_offsets("w", torch.zeros(0))}
    with pytest.raises(StrategyError, match="invalid name of a file"):
        st.save(tree, storage, ("tar", 1), strategies=st.default_strategies | rows)
    assert not st.is_checkpoint(storage)


def test_traits_of_every_format_are_values() -> None:
    rows = {(name, version) for _, name, version in st.default_strategies}
    for row in rows:
        traits = traits_of(*row)
        assert traits == traits_of(*row) and pickle.loads(pickle.dumps(traits)).decided_by == traits.decided_by


def test_a_folder_is_listed_once_however_many_formats_there_are() -> None:
    storage, listings = MemoryStorage(), list[str]()
    storage.replace("notes.txt", b"x", durable=False)

    class Counted(MemoryStorage):
        def names(self, folder: str = "") -> tuple[str, ...]:
            listings.append(folder)
            return storage.names(folder)

    assert not st.is_checkpoint(Counted())
    assert len(listings) <= 1


def test_a_pickle_that_replaces_another_is_whole() -> None:
    storage = MemoryStorage()
    storage.replace("metadata.pkl", pickle.dumps({}), durable=False)
    assert is_whole(None, storage, "metadata.pkl")
