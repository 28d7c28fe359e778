"""Strict modes: what test_strict and TestNonStrictLoad say of missing and unexpected keys, nested and not."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

import shardtree as st
from shardtree.errors import KeyMismatch
from tests.megatron_cases.worlds import in_every_format, loaded, on_ranks, saved, whole

RANKS = 3
MODES = {mode.value: mode for mode in st.StrictHandling}
LENIENT = [name for name in MODES if not name.startswith(("raise", "assume"))]
exchanges = pytest.mark.parametrize("exchange", ["never", "always"])
checks = pytest.mark.parametrize("validate", [True, False], ids=["checked", "unchecked"])
MISSING = {"TenA", "ObjB", "Nested.TenE", "Nested.ObjF"}
NEW = {"TenD", "ObjD", "NewNested.TenF", "NewNested.ObjF", "Nested.TenG", "Nested.ObjG", "Empty.TenH", "Empty.ObjH"}


def tensor(key: str, replica_id: int) -> st.ShardedTensor:
    return whole(key, torch.arange(3), replica_id=replica_id)


def item(key: str, replica_id: int) -> st.ShardedObject:
    return st.ShardedObject(key, list(range(10)), (1,), (0,), replica_id)


def base(rank: int) -> dict[str, Any]:
    last = RANKS - rank - 1
    return {
        "TenA": tensor("TenA", rank),
        "TenB": whole("TenB", torch.arange(3), (0, rank, RANKS)),
        "TenC": tensor("TenC", last),
        "ObjA": item("ObjA", rank),
        "ObjB": st.ShardedObject("ObjB", {rank + 7}, (1, RANKS), (0, rank)),
        "Nested": {
            "TenE": tensor("Nested.TenE", last),
            "ObjE": item("Nested.ObjE", rank),
            "TenF": tensor("Nested.TenF", rank),
            "ObjF": item("Nested.ObjF", rank),
        },
        "Empty": {},
    }


def target(rank: int, *, missing: bool = False, unexpected: bool = False) -> dict[str, Any]:
    tree = base(rank)
    if missing:
        del tree["TenA"], tree["ObjB"], tree["Nested"]["TenE"], tree["Nested"]["ObjF"], tree["Empty"]
    if unexpected:
        for key in sorted(NEW):
            *path, name = key.split(".")
            place = tree.setdefault(path[0], {}) if path else tree
            place[name] = (tensor if name.startswith("Ten") else item)(f"New.{key}", rank)
    return tree


FOLDER = saved(on_ranks(base, RANKS))


def load(strict: str, validate: bool = True, folder: Any = FOLDER, exchange: str = "auto", **changes: bool) -> list:
    targets = on_ranks(lambda rank: target(rank, **changes), RANKS)
    return loaded(targets, folder, strict=strict, validate_access_integrity=validate, exchange=exchange)


def named(text: str, keys: set[str], prefix: str = "") -> set[str]:
    return {key for key in keys if f"'{prefix}{key}'" in text}


def keys_of(error: KeyMismatch) -> tuple[set[str], set[str]]:
    return set(error.missing), set(error.unexpected)


def parts(results: list, strict: str) -> list[tuple[Any, set[str], set[str]]]:
    return [result if strict.startswith("return") else (result, set(), set()) for result in results]


@exchanges
@checks
@pytest.mark.parametrize("strict", MODES)
def test_where_keys_agree_every_mode_loads_all_and_says_nothing(
    strict: str, validate: bool, exchange: str, caplog: pytest.LogCaptureFixture
) -> None:
    for tree, missing, unexpected in parts(load(strict, validate, exchange=exchange), strict):
        assert tree.keys() == base(0).keys() and tree["Nested"].keys() == base(0)["Nested"].keys()
        assert tree["Empty"] == {} and missing == unexpected == set()
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@in_every_format
def test_where_keys_agree_the_values_are_those_that_were_saved(backend: Any) -> None:
    folder = saved(on_ranks(base, RANKS), backend)
    for rank, tree in enumerate(load("raise_all", folder=folder)):
        assert tree["ObjB"] == {rank + 7} and tree["Nested"]["ObjF"] == list(range(10))
        assert tree["TenB"].tolist() == tree["Nested"]["TenE"].tolist() == [0, 1, 2]


@exchanges
@checks
@pytest.mark.parametrize("strict", [*LENIENT, "assume_ok_unexpected", "raise_unexpected"])
def test_missing_keys_never_fail_modes_that_do_not_raise_for_them(
    strict: str, validate: bool, exchange: str, caplog: pytest.LogCaptureFixture
) -> None:
    results = load(strict, validate, exchange=exchange, missing=True)
    for tree, missing, unexpected in parts(results, strict):
        assert "TenB" in tree and "TenA" not in tree
        assert missing == (MISSING if strict == "return_all" else set()) and unexpected == set()
    assert named(caplog.text, MISSING) == (MISSING if strict == "log_all" else set())


@checks
@pytest.mark.parametrize("missing", [False, True])
@pytest.mark.parametrize("strict", LENIENT)
def test_unexpected_keys_are_left_out_and_said_where_the_mode_says_so_where_theirs_fails_below(
    strict: str, missing: bool, validate: bool, caplog: pytest.LogCaptureFixture
) -> None:
    for tree, _, unexpected in parts(load(strict, validate, missing=missing, unexpected=True), strict):
        assert "TenD" not in tree and "TenG" not in tree["Nested"]
        assert tree["NewNested"] == {} and tree["Empty"] == {}
        assert unexpected == ({f"New.{key}" for key in NEW} if strict.startswith("return") else set())
    assert named(caplog.text, NEW, "New.") == (NEW if strict.startswith("log") else set())


@pytest.mark.parametrize("missing", [False, True])
def test_without_a_look_beforehand_unexpected_keys_are_an_error_all_the_same(missing: bool) -> None:
    with pytest.raises(KeyMismatch, match=r"New\."):
        load("assume_ok_unexpected", missing=missing, unexpected=True)


@exchanges
@checks
@pytest.mark.parametrize("missing", [False, True])
def test_raise_unexpected_has_every_unexpected_key_and_no_missing_one(
    missing: bool, validate: bool, exchange: str
) -> None:
    with pytest.raises(KeyMismatch) as caught:
        load("raise_unexpected", validate, exchange=exchange, missing=missing, unexpected=True)
    assert keys_of(caught.value) == (set(), {f"New.{key}" for key in NEW})


@checks
@pytest.mark.parametrize(("missing", "unexpected"), [(True, False), (False, True), (True, True)])
def test_raise_all_has_every_key_of_each_kind(missing: bool, unexpected: bool, validate: bool) -> None:
    with pytest.raises(KeyMismatch) as caught:
        load("raise_all", validate, missing=missing, unexpected=unexpected)
    found = keys_of(caught.value)
    assert found == (MISSING if missing else set(), {f"New.{key}" for key in NEW} if unexpected else set())
    assert all(any(key in str(caught.value) for key in kind) for kind in found if kind)


@in_every_format
def test_sharded_metadata_have_all_tensors_by_key_and_objects_by_cell_and_load(backend: Any) -> None:
    folder = saved(on_ranks(base, RANKS), backend)
    found = st.load_sharded_metadata(folder)
    cells = {f"ObjB/shard_0.{rank}_1.{RANKS}" for rank in range(RANKS)}
    objects = {f"{key}/shard_0_1" for key in ("ObjA", "Nested.ObjE", "Nested.ObjF")}
    assert found.keys() == {"TenA", "TenB", "TenC", "Nested.TenE", "Nested.TenF", *objects, *cells}
    (result,) = loaded([found], folder)
    assert result["TenB"].tolist() == [0, 1, 2] * RANKS and result["ObjA/shard_0_1"] == list(range(10))
    assert [result[cell] for cell in sorted(cells)] == [{rank + 7} for rank in range(RANKS)]
