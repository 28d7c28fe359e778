"""What every test and doctest runs under: checked types, one thread a process, a Hypothesis profile, an empty folder.

It stands in the root because the doctests in shardtree/ need it too.

    SHARDTREE_PROFILE   ci (default): 20 examples, always the same; dev: 100, new ones each run; full: 300 (.ci/full);
                        thorough: 2000;
                        mutation: 10, always the same, and the first failure ends it (tests/mutation).
    SHARDTREE_FAULT_SEED  which points of the fault matrices are tried (0 by default; .ci/run draws one and prints it).
    SHARDTREE_BEARTYPE  1: every call in shardtree checks its types, before shardtree's own checks; 0 (default): none.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import warnings
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings

# Without bytecode, each process that a test starts would compile modules again, and each run rewrite asserts.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# PEP 695's `type` statement needs Python 3.12; a few functions' hints are beyond beartype, which leaves them alone.
_BEYOND_BEARTYPE = ("BeartypeDecorHintPep613DeprecationWarning", "BeartypeClawDecorWarning")
_BEARTYPE = os.environ.get("SHARDTREE_BEARTYPE", "0") == "1"
if _BEARTYPE:
    # Before anything imports shardtree.
    import beartype.claw
    import beartype.roar

    for name in _BEYOND_BEARTYPE:
        warnings.filterwarnings("ignore", category=getattr(beartype.roar, name))
    beartype.claw.beartype_package(
        "shardtree",
        conf=beartype.BeartypeConf(
            claw_is_pep526=False,  # local annotations may name what only a type checker imports
            # A NamedTuple's postponed hints are beyond it.
            claw_skip_package_names=("shardtree.core.lazy", "shardtree.traces"),
            is_pep484_tower=True,
            is_random=False,  # the same items each time: Hypothesis minds
        ),
    )

from tests.lacking import lacking, modules_to_ignore  # noqa: E402  after beartype's hook

pytest_plugins = ["tests.missing_peers", "tests.part_of_suite"]
collect_ignore_glob = ["tests/*/scripts/*"]  # started by tests, in processes of their own
collect_ignore = modules_to_ignore()

sys.dont_write_bytecode = False
torch.set_num_threads(1)

_EVERYWHERE = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow], "print_blob": True}
settings.register_profile("ci", max_examples=20, derandomize=True, database=None, **_EVERYWHERE)
settings.register_profile("dev", max_examples=100, **_EVERYWHERE)
settings.register_profile("full", max_examples=300, derandomize=True, database=None, **_EVERYWHERE)
settings.register_profile("thorough", max_examples=2000, **_EVERYWHERE)
settings.register_profile(
    "mutation",
    max_examples=10,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    report_multiple_bugs=False,
    **_EVERYWHERE,
)
settings.load_profile(os.environ.get("SHARDTREE_PROFILE", "ci"))

import shardtree._later  # noqa: E402, F401  a doctest of one file is to find the same modules as all of them


def pytest_configure(config: pytest.Config) -> None:
    """Ignore beartype's warnings in tests, whose filters pytest sets anew; without beartype they have no name."""
    for name in _BEYOND_BEARTYPE if _BEARTYPE else ():
        config.addinivalue_line("filterwarnings", f"ignore::beartype.roar.{name}")


def pytest_report_header() -> str:
    """Return what is needed to repeat a run."""
    return f"fault matrices: sampled by SHARDTREE_FAULT_SEED={os.environ.get('SHARDTREE_FAULT_SEED', '0')}"


def pytest_itemcollected(item: pytest.Item) -> None:
    """Make what is exhaustive slow as well, so that ``-m "not slow"`` leaves both out; skip what needs a GPU."""
    if item.get_closest_marker("exhaustive"):
        item.add_marker("slow")
    if item.get_closest_marker("cuda") and not torch.cuda.is_available():
        item.add_marker(pytest.mark.skip(reason="no GPU"))
    if (missing := lacking(item.nodeid)) is not None:
        item.add_marker(pytest.mark.skip(reason=f"needs {missing}"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Leave a test's keywords out of what a worker says of a step that passed: two thirds of it, read by nobody."""
    report = yield
    if report.passed:
        report.keywords = {}
    return report


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Leave modules and tests out of collections of garbage: each would take half a second, and many tests make one."""
    gc.disable()
    try:
        with pytest.MonkeyPatch.context() as patch:
            # Megatron-Core has functions compiled, which no test calls: torch's compiler takes three seconds to import.
            patch.setenv("TORCHDYNAMO_DISABLE", "1")
            return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()
        # What tests leave behind is looked through in full a fourth as often: that took a twentieth of all their time.
        gc.set_threshold(700, 10, 100)
        # Around each step of each test pytest looks through every logger that passes nothing on, as 45 of torch's do,
        # to be told of what they log. Where they pass it on, the root hears of it.
        for logger in logging.root.manager.loggerDict.values():
            if isinstance(logger, logging.Logger):
                logger.propagate = True


@pytest.fixture(autouse=True)
def _doctests_run_in_an_empty_folder(request: pytest.FixtureRequest) -> Iterator[None]:
    if not isinstance(request.node, pytest.DoctestItem):
        yield
        return
    before = Path.cwd()
    os.chdir(request.getfixturevalue("tmp_path"))
    yield
    os.chdir(before)
