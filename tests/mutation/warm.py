"""Tests that are collected once and run in forked processes: what makes a mutant cost tenths of a second."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

import pytest


class WarmTests:
    """The tests of a mutation run, in the form in which mutmut's ForkRunner asks for them."""

    def __init__(self, folder: str, arguments: Sequence[str]) -> None:
        """Collect the tests in a folder that holds the mutated package."""
        self.folder = folder
        before = os.getcwd()
        os.chdir(folder)
        self.items = collected(["--rootdir=.", "--tb=no", "-q", "-s", *arguments])
        os.chdir(before)

    def run_tests(self, *, mutant_name: str | None, tests: Iterable[str]) -> int:
        """Return 1 as soon as one of the tests fails, 0 if none does; in a process that was forked for it."""
        os.chdir(self.folder)
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, 1)
        os.dup2(nothing, 2)
        return int(any(fails(self.items[test]) for test in tests if test in self.items))


def collected(arguments: list[str]) -> dict[str, pytest.Item]:
    """Return the tests that pytest collects, by their ids: what `pytest.main` does before it runs any."""
    from _pytest.config import _prepareconfig

    settings = _prepareconfig(arguments)
    settings._do_configure()
    session = pytest.Session.from_config(settings)
    settings.hook.pytest_sessionstart(session=session)
    settings.hook.pytest_collection(session=session)
    return {item.nodeid: item for item in session.items}


def fails(item: pytest.Item) -> bool:
    """Return whether a test fails, its fixtures made and put away for it alone."""
    before = item.session.testsfailed
    item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
    return item.session.testsfailed > before
