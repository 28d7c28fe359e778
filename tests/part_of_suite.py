"""Parts of the suite: what the quick run says of itself, and the rest of the tests once a part has passed elsewhere.

--quick            say how many tests there are, how long they take, and how to run everything (`python -m tests`)
--passed-to FILE   write the names of the tests that passed
--leave-out FILE   leave out the tests that are named there
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

QUICK = ["-m", "not slow", "--quick"]
USUAL = "about 3 to 4 minutes on two idle cores"
_PASSED = pytest.StashKey[set[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the three options."""
    group = parser.getgroup("shardtree")
    group.addoption("--quick", action="store_true", help="say what the quick run is before it starts")
    group.addoption("--passed-to", type=Path, help="file for the names of the tests that passed")
    group.addoption("--leave-out", type=Path, help="file with the names of tests to leave out")


def pytest_configure(config: pytest.Config) -> None:
    """Begin with no test passed."""
    config.stash[_PASSED] = set()
    config.pluginmanager.register(_Names(config), "names of the tests that passed")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what has passed elsewhere."""
    path = config.getoption("leave_out")
    named = set(path.read_text().splitlines()) if path else set()
    if elsewhere := [item for item in items if item.nodeid in named]:
        config.hook.pytest_deselected(items=elsewhere)
        items[:] = [item for item in items if item.nodeid not in named]


class _Names:
    """The names of the tests that pass, and the line before the first of them."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.told = False

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Say it where one process runs the tests."""
        if session.items:
            self._tell(len(session.items))

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: object, ids: Iterable[str]) -> None:
        """Say it where workers run them, once the first has collected."""
        self._tell(len(list(ids)))

    def _tell(self, count: int) -> None:
        reporter = self.config.pluginmanager.get_plugin("terminalreporter")
        if not self.config.getoption("quick") or self.told or reporter is None or _is_worker(self.config):
            return
        self.told = True
        reporter.ensure_newline()
        reporter.write_line(
            f"{count:,} quick tests, which take {USUAL}. Left out: slow laws, saves that are killed, whatever else "
            "takes over a second, doctests, and peers that are not installed. CONTRIBUTING.md shows how to run one "
            "folder's tests; .ci/run runs all."
        )

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a test that passed, and forget it if it fails as it is taken down."""
        passed = self.config.stash[_PASSED]
        if report.when == "call" and report.passed:
            passed.add(report.nodeid)
        elif not report.passed:
            passed.discard(report.nodeid)

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Write the names; where all that was asked for has passed elsewhere, nothing is wrong."""
        if self.config.getoption("leave_out") and exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
            session.exitstatus = pytest.ExitCode.OK
        path = self.config.getoption("passed_to")
        if path and not _is_worker(self.config):
            path.write_text("".join(f"{name}\n" for name in sorted(self.config.stash[_PASSED])))


def _is_worker(config: pytest.Config) -> bool:
    return hasattr(config, "workerinput")
