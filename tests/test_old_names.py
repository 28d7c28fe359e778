"""Modules that moved are found under the names that they had, and are one module, however they are asked for."""

from __future__ import annotations

import pickle
import subprocess
import sys
from importlib import import_module
from types import ModuleType

import pytest

import shardtree as st
from shardtree import _old_names
from shardtree._moved import MOVED, new_address
from tests.quick_python.command import quick_python

OLD = sorted(f"shardtree.{old}" for old in MOVED if not old.endswith("."))


@pytest.mark.parametrize("old", OLD)
def test_an_old_name_is_the_module_that_is_there_now(old: str) -> None:
    module = import_module(old)
    assert module is import_module(new_address(old)) and module.__name__ == new_address(old)
    assert module.__spec__ is not None and module.__spec__.name == module.__name__


def test_what_is_below_a_package_that_moved_is_not_loaded_twice() -> None:
    import shardtree.formats.zarr._save as now
    import shardtree.strategies.zarr._save as before

    assert before is now
    assert pickle.loads(b"cshardtree.strategies.zarr._save\nRankFiles\n.") is now.RankFiles


def test_a_package_that_was_below_another_is_its_attribute() -> None:
    assert st.strategies.huggingface is import_module("shardtree.formats.huggingface")
    assert st.strategies.base.default_strategies is st.default_strategies
    with pytest.raises(AttributeError, match=r"no attribute 'nowhere'"):
        st.strategies.nowhere  # noqa: B018


def test_a_thread_that_waits_for_an_old_name_gets_what_is_in_it() -> None:
    module = ModuleType("shardtree.strategies.zarr")
    _old_names._OldNames().exec_module(module)
    assert module.recognize is import_module("shardtree.formats.zarr").recognize


@pytest.mark.parametrize(
    "name", ["shardtree.strategies.nowhere", "shardtree.strategies.zarr.nowhere", "shardtree.nowhere"]
)
def test_what_never_was_is_not_found(name: str) -> None:
    with pytest.raises(ModuleNotFoundError):
        import_module(name)


def test_names_of_others_stay() -> None:
    assert new_address("strategies.zarr") == "strategies.zarr"
    assert new_address("shardtrees.strategies.zarr") == "shardtrees.strategies.zarr"


@pytest.mark.slow
def test_an_old_name_may_be_the_first_that_is_imported() -> None:
    code = "import shardtree.codec.archives._zip as zip; print(zip.__name__)"
    done = subprocess.run([*quick_python(), "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["shardtree.formats.archives._zip"]


def test_old_names_are_looked_for_once_however_often_they_are_installed() -> None:
    before = list(sys.meta_path)
    _old_names.install()
    try:
        assert [type(each).__name__ for each in sys.meta_path].count("_OldNames") == 1
    finally:
        sys.meta_path[:] = before


def test_a_name_that_a_face_lacks_is_told_as_any_other() -> None:
    with pytest.raises(ImportError, match=r"^cannot import name 'nowhere' from 'shardtree\.trees'"):
        exec("from shardtree.trees import nowhere")
