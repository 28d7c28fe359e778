"""How a run of the tests is told apart and told of: peers that are missing, the quick part, and the rest after it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PLUGIN = """
from tests import missing_peers
missing_peers.PEERS["a_peer_that_is_not_here"] = "the-peer"
"""
TESTS = {
    "test_whole.py": "import a_peer_that_is_not_here\ndef test_a(): pass\ndef test_b(): pass\n",
    "test_skipping.py": "import pytest\npytest.importorskip('a_peer_that_is_not_here.inside')\nNUMBER = 1\n",
    "test_from_it.py": "from test_skipping import NUMBER\ndef test_c(): pass\n",
    "test_inside.py": "def test_d():\n    import a_peer_that_is_not_here\ndef test_e(): pass\n",
    "test_raised_from.py": (
        "def test_f():\n    try:\n        import a_peer_that_is_not_here\n"
        "    except ImportError as error:\n        raise ImportError('no peer: ' + str(error)) from error\n"
    ),
}


def run(folder: Path, *options: str, **environment: str) -> str:
    """Return what pytest prints for the tests of a folder, with our plugins and no conftest of ours."""
    done = started(folder, *options, **environment)
    return done.stdout + done.stderr


def status(folder: Path, *options: str) -> int:
    """Return the exit status of pytest for the tests of a folder."""
    return started(folder, *options).returncode


def started(folder: Path, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Return what pytest did with the tests of a folder."""
    plugins = ["-p", "tests.missing_peers", "-p", "the_plugin", "-p", "tests.part_of_suite"]
    command = [sys.executable, "-m", "pytest", "-q", *plugins, "-p", "no:cacheprovider", "-ra", *options, str(folder)]
    path = os.pathsep.join(map(str, (ROOT, folder)))
    environment = {**os.environ, "SHARDTREE_PEERS": "", "PYTHONPATH": path} | environment
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder of tests of which some need a peer."""
    for name, code in TESTS.items() | {("the_plugin.py", PLUGIN), ("pytest.ini", "[pytest]\n")}:
        (tmp_path / name).write_text(code)
    return tmp_path


def test_a_missing_peer_is_one_line(folder: Path) -> None:
    told = run(folder, "--doctest-modules")
    assert "1 passed, 5 without a peer" in told, told
    assert "5 tests or modules were skipped, since their peers are not installed: the-peer (5)." in told
    assert "SKIPPED" not in told


@pytest.mark.slow
def test_where_peers_are_required_it_is_an_error(folder: Path) -> None:
    told = run(folder, "--continue-on-collection-errors", SHARDTREE_PEERS="required")
    assert "1 passed" in told and "2 failed" in told and "without a peer" not in told, told
    assert "ERROR test_whole.py" in told and "ERROR test_skipping.py" in told
    assert "the-peer is not installed, and SHARDTREE_PEERS=required" in told


OTHERS = {
    "another module": "import no_peer_of_anybody\n",
    "another error": "try:\n    import a_peer_that_is_not_here\nexcept ImportError:\n    undefined_name\n",
    "another name": (
        "try:\n    import a_peer_that_is_not_here\nexcept ImportError:\n    from json import a_name_that_is_not_there\n"
    ),
    "a text": "TEXT = \"No module named 'a_peer_that_is_not_here'\"\nassert TEXT == 3, TEXT\n",
}


@pytest.mark.slow
def test_a_module_that_fails_for_another_reason_is_an_error(folder: Path) -> None:
    for number, code in enumerate(OTHERS.values()):
        (folder / f"test_wrong_{number}.py").write_text(code)
    told = run(folder, "--continue-on-collection-errors", "--doctest-modules")
    assert [number for number in range(len(OTHERS)) if f"ERROR test_wrong_{number}.py" not in told] == [], told


@pytest.mark.slow
def test_a_fixture_that_misses_its_peer_is_as_a_test_that_does(folder: Path) -> None:
    fixture = "import pytest\n@pytest.fixture\ndef x(): pytest.importorskip('a_peer_that_is_not_here')\n"
    for path in folder.glob("test_*.py"):
        path.unlink()
    (folder / "test_fixture.py").write_text(fixture + "def test_a(x): pass\n")
    assert "1 without a peer" in run(folder)
    assert "1 error" in run(folder, SHARDTREE_PEERS="required")


@pytest.mark.slow
@pytest.mark.parametrize("workers", [[], ["-n", "2"]])
def test_what_has_passed_is_left_out_of_the_rest(folder: Path, workers: list[str]) -> None:
    (folder / "test_fails.py").write_text("def test_fails(): assert 0\n")
    passed = folder / "passed.txt"
    told = run(folder, "--passed-to", str(passed), "--quick", *workers)
    assert "7 quick tests, which take about" in told and told.count("quick tests") == 1, told
    assert passed.read_text() == "test_inside.py::test_e\n"
    assert "1 deselected" in run(folder, "--leave-out", str(passed))
    assert status(folder, "--leave-out", str(passed), "-k", "test_e") == 0
    assert status(folder, "-k", "no_such_test") == pytest.ExitCode.NO_TESTS_COLLECTED
