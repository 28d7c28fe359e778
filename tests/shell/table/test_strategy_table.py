"""The dispatch table: rows are taken once, a table is a value, packages bring rows, and each row fits its protocol."""

from __future__ import annotations

import enum
import functools
import subprocess
import textwrap
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import shardtree as st
from shardtree.errors import StrategyError
from shardtree.shell.table import base, formats_with
from shardtree.storage import MemoryStorage
from shardtree.strategies import (
    AsyncRequest,
    Checkpoint,
    FormatTraits,
    PendingSave,
    StrategyAction,
    default_strategies,
    get_default_strategy,
    register_default_strategy,
)
from shardtree.testing import check_rows
from tests.quick_python.command import quick_python

BACKENDS = sorted({(backend, version) for _, backend, version in default_strategies})
NATIVE = ("safetensors", 1)
SAVING = formats_with(StrategyAction.SAVE_SHARDED)


@pytest.fixture
def free_row():
    row = (StrategyAction.LOAD_COMMON, "a test's own", 7)
    yield row
    base._rows.pop(row, None)


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
def test_every_row_fits_its_protocol(backend):
    check_rows(default_strategies, *backend)


def with_one(action, fn):
    return {(action, "one", 1): fn}


def test_a_row_may_take_more_and_return_less():
    def anything(*args: object) -> st.strategies.AsyncRequest[int]: ...

    def optional(checkpoint: Any, prefix: str | None = None, *, slowly: bool = False) -> None: ...

    check_rows(with_one(StrategyAction.SAVE_SHARDED, anything), "one", 1)
    check_rows(with_one(StrategyAction.REMOVE_SHARDED, optional), "one", 1)
    check_rows(with_one(StrategyAction.REMOVE_SHARDED, functools.partial(optional, slowly=True)), "one", 1)


def test_the_check_of_rows_sees_a_wrong_signature():
    def swapped(key_prefix: str, checkpoint: Checkpoint) -> None: ...

    def tensors_only(pending: PendingSave, shards: Sequence[st.ShardedTensor]) -> AsyncRequest[Any]: ...

    def nothing(checkpoint: Checkpoint) -> None: ...

    faults = {
        "called with": (StrategyAction.LOAD_SHARDED, lambda checkpoint: None),
        "key_prefix: str must take checkpoint": (StrategyAction.REMOVE_SHARDED, swapped),
        "must take shards": (StrategyAction.SAVE_SHARDED, tensors_only),
        "returns None, expected": (StrategyAction.VERIFY, nothing),
    }
    for message, (action, fn) in faults.items():
        with pytest.raises(AssertionError, match=rf"rows of \('one', 1\)[\s\S]*{action.value}: .*{message}"):
            check_rows(with_one(action, fn), "one", 1)
    with pytest.raises(AssertionError, match="no rows for"):
        check_rows(default_strategies, "safetensors", 99)


def test_the_old_name_of_publish_still_means_it():
    assert StrategyAction("commit") is StrategyAction["COMMIT"] is StrategyAction.COMMIT is StrategyAction.PUBLISH
    assert "publish" in str(default_strategies | with_one(StrategyAction.COMMIT, print))
    assert [action for action in StrategyAction if action.name == "COMMIT"] == []
    with pytest.raises(ValueError, match="committed"):
        StrategyAction("committed")


def test_a_row_is_registered_once_unless_overridden(free_row):
    def one(checkpoint):
        return {}

    def other(checkpoint):
        return {}

    assert register_default_strategy(*free_row)(one) is one
    register_default_strategy(*free_row, one)
    with pytest.raises(StrategyError, match=r"already has a function[\s\S]*one[\s\S]*override=True"):
        register_default_strategy(*free_row, other)
    assert get_default_strategy(*free_row) is one
    register_default_strategy(*free_row, other, override=True)
    assert get_default_strategy(*free_row) is default_strategies[free_row] is other


def test_the_default_table_is_read_only():
    with pytest.raises(TypeError):
        default_strategies[StrategyAction.LOAD_COMMON, "x", 1] = len


def test_tables_are_joined_from_either_side():
    rows = {(StrategyAction.LOAD_COMMON, *NATIVE): len, (StrategyAction.LOAD_COMMON, "x", 1): len}
    ours, theirs = default_strategies | rows, rows | default_strategies
    assert ours[StrategyAction.LOAD_COMMON, *NATIVE] is len and ours[StrategyAction.LOAD_COMMON, "x", 1] is len
    assert theirs[StrategyAction.LOAD_COMMON, *NATIVE] is not len and len(ours) == len(theirs)
    assert "x 1" in str(ours) and "x 1" not in str(default_strategies)


def test_rows_may_have_an_action_of_ones_own():
    action = enum.Enum("Mine", {"COUNT": "count_tensors"}).COUNT
    table = default_strategies | {(action, *NATIVE): len}
    assert get_default_strategy(action, *NATIVE, strategies=table) is len
    assert formats_with(action, strategies=table) == (NATIVE,)
    assert [line.split()[0] for line in str(table).splitlines()][-2:] == ["describe", "count_tensors"]
    with pytest.raises(StrategyError, match=r"no strategy for count_tensors with backend 'torch', version 1"):
        get_default_strategy(action, "torch", 1, strategies=table)


@pytest.mark.parametrize("action", ["load_common", enum.Enum("Mine", {"COUNT": 1}).COUNT, None])
def test_what_is_no_action_is_refused(action):
    with pytest.raises(StrategyError, match="invalid entries"):
        default_strategies | {(action, *NATIVE): len}
    with pytest.raises(StrategyError, match="invalid action, backend or version"):
        register_default_strategy(action, *NATIVE, len)


def test_a_format_without_a_description_has_the_plain_traits():
    table = {row: fn for row, fn in default_strategies.items() if row[0] is not StrategyAction.DESCRIBE}
    assert base.traits_of(*NATIVE, table) == FormatTraits() != base.traits_of(*NATIVE)
    folder, tree = MemoryStorage(), {"w": st.ShardedTensor.from_rank_offsets("w", torch.arange(3))}
    for _ in range(2):  # the second is written beside the first and exchanged, as of a format that nothing is known of
        st.save(tree, folder, strategies=table, overwrite=True)
    assert st.load(tree, folder, strategies=table)["w"].tolist() == [0, 1, 2]


PACKAGE = """
from shardtree.strategies import StrategyAction, register_default_strategy

@register_default_strategy(StrategyAction.LOAD_COMMON, "cards", 1)
def load_common(checkpoint):
    return {"from": "cards"}

@register_default_strategy(StrategyAction.RECOGNIZE, "cards", 1)
def recognize(storage):
    names = {"sharded_backend": "cards", "common_backend": "cards"}
    return names if storage.length("deck.txt") is not None else None
"""

USE = """
import sys
from shardtree.strategies import StrategyAction, default_strategies, get_default_strategy
get_default_strategy(StrategyAction.LOAD_COMMON, "safetensors", 1)
assert "card_strategies" not in sys.modules, "read before a look-up missed"
own = dict(default_strategies)
print(get_default_strategy(StrategyAction.LOAD_COMMON, "cards", 1, strategies=own)(None))
print(get_default_strategy(StrategyAction.LOAD_COMMON, "cards", 1)(None))
try:
    get_default_strategy(StrategyAction.LOAD_COMMON, "punch cards", 1)
except LookupError as error:
    print(error)
"""


def run_with_package(tmp_path, package, use):
    (tmp_path / "card_strategies.py").write_text(package)
    info = tmp_path / "card_strategies-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: card-strategies\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[shardtree.strategies]\ncards = card_strategies\n")
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{textwrap.dedent(use)}"
    return subprocess.run([*quick_python(), "-c", program], capture_output=True, text=True, timeout=900)


@pytest.mark.slow
def test_the_first_look_up_that_misses_reads_what_packages_bring(tmp_path):
    done = run_with_package(tmp_path, PACKAGE, USE)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("{'from': 'cards'}") == 2
    assert "('cards', 1), " in done.stdout and "('safetensors', 1)" in done.stdout


@pytest.mark.slow
def test_a_package_is_imported_for_a_folder_that_is_not_ours_and_for_nothing_of_ours(tmp_path):
    """Its folder is recognised before anything else of it is asked for, so that a save doesn't take it for free."""
    use = """
    import sys, torch, shardtree as st
    from shardtree.errors import AlreadyACheckpoint
    from shardtree.storage import MemoryStorage
    tree = {"w": st.ShardedTensor.from_rank_offsets("w", torch.ones(2)), "step": 1}
    native, deck = MemoryStorage(), MemoryStorage()
    for _ in range(2):
        st.save(tree, native, overwrite=True)
        st.load(tree, native)
    assert not st.is_checkpoint(MemoryStorage())
    assert "card_strategies" not in sys.modules, "imported for our own formats"
    deck.replace("deck.txt", b"seven of hearts", durable=False)
    assert st.is_checkpoint(deck)
    try:
        st.save(tree, deck)
    except AlreadyACheckpoint:
        print("refused")
    """
    done = run_with_package(tmp_path, PACKAGE, use)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "refused"


@pytest.mark.slow
def test_a_broken_package_is_named_where_it_is_wanted_and_a_warning_where_another_format_is(tmp_path):
    use = """
    import warnings, torch, shardtree as st
    from shardtree.errors import StrategyError
    from shardtree.strategies import StrategyAction, get_default_strategy
    from shardtree.shell.table import find_strategy, formats_with
    storage = st.storage.MemoryStorage()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        assert ("zarr", 3) in formats_with(StrategyAction.SAVE_SHARDED)
        assert find_strategy(StrategyAction.LOAD_COMMON, "cards", 1) is None
        st.save({"w": st.ShardedTensor.from_rank_offsets("w", torch.ones(2))}, storage, "zarr")
    (warning,) = found
    print(warning.message)
    try:
        get_default_strategy(StrategyAction.LOAD_COMMON, "cards", 1)
    except StrategyError as error:
        print("card_strategies" in str(error), error)
    """
    done = run_with_package(tmp_path, "raise ImportError('needs a card reader')", use)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("needs a card reader") == 2 and "Repair these packages" in done.stdout
    assert "True" in done.stdout


# -- a backend's name alone


@pytest.mark.parametrize("backend", sorted({name for name, _ in SAVING}))
def test_a_bare_name_is_the_latest_version_that_can_save(backend):
    """The same bytes as with the pair, and what was saved by one loads by the other."""
    version = max(number for name, number in SAVING if name == backend)
    tree = {"w": st.ShardedTensor.from_rank_offsets("w", torch.arange(4.0))}
    for named in (backend, (backend, version)):
        storage = MemoryStorage()
        st.save(tree, storage, named)
        assert st.open_checkpoint(storage).checkpoint.fields["sharded_backend_version"] == version
        for asked in (backend, (backend, version)):
            assert torch.equal(st.load(tree, storage, asked)["w"].data, torch.arange(4.0))


def test_a_bare_name_for_the_common_state_and_a_table_of_ones_own():
    rows = default_strategies.items()
    table = default_strategies | {(row[0], "own", 7): fn for row, fn in rows if row[1:] == NATIVE}
    storage = MemoryStorage()
    st.save({"step": 3}, storage, "own", "safetensors", strategies=table)
    fields = st.open_checkpoint(storage, strategies=table).checkpoint.fields
    assert (fields["sharded_backend"], fields["sharded_backend_version"]) == ("own", 7)
    assert (fields["common_backend"], fields["common_backend_version"]) == NATIVE
    with pytest.raises(StrategyError, match="backend 'own', version 7"):
        st.load({"step": 0}, storage)


# -- functions in the place of rows


def native(action):
    return default_strategies[action, *NATIVE]


@pytest.mark.parametrize("choice", [NATIVE, native(StrategyAction.SAVE_SHARDED)])
def test_a_strategy_is_a_pair_or_a_function(choice):
    folder = MemoryStorage()
    tree = {"w": st.ShardedTensor.from_rank_offsets("w", torch.arange(4.0)), "step": 5}
    st.save(tree, folder, choice, native(StrategyAction.SAVE_COMMON))
    load_sharded, load_common = native(StrategyAction.LOAD_SHARDED), native(StrategyAction.LOAD_COMMON)
    for chosen in ((NATIVE, NATIVE), (load_sharded, load_common), (None, load_common)):
        loaded = st.load(st.without_data(tree), folder, *chosen)
        assert torch.equal(loaded["w"], torch.arange(4.0)) and loaded["step"] == 5
    assert st.load({}, folder, None, lambda checkpoint: {"from": "a function"}) == {"from": "a function"}
