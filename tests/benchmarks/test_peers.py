"""Orbax and torchsnapshot save and load in the benchmark as the others do, or say what to install."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks import _orbax, _torchsnapshot
from benchmarks._contenders import LOAD, LOAD_COLUMNS, LOAD_NEW, SAVE

REPOSITORY = Path(__file__).parents[2]

# In a process of its own: what these libraries import warns, and stays.
SCRIPT = """
import json, sys
from importlib import import_module
from pathlib import Path
from benchmarks._rounds import measure
if __name__ == "__main__":
    peer, ranks, folder = import_module("benchmarks." + sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    _, seconds = measure(ranks, folder, size=40_000, tensors=4, rounds=1, tries=1, threads=1, everybody=peer.contenders)
    print(json.dumps([[*place, *values] for place, values in seconds.items()]))
"""


def installed(peer: ModuleType, ranks: int) -> bool:
    return not peer.missing(ranks)


@pytest.mark.peers
@pytest.mark.parametrize(
    ("peer", "ranks"), [(_orbax, 1), (_torchsnapshot, 1), pytest.param(_torchsnapshot, 2, marks=pytest.mark.torchrun)]
)
def test_it_saves_and_loads_what_was_saved(peer: ModuleType, ranks: int, tmp_path: Path) -> None:
    if not installed(peer, ranks):
        pytest.skip(peer.missing(ranks))
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), peer.__name__.split(".")[1], str(ranks), str(tmp_path)]
    environment = {"PYTHONPATH": str(REPOSITORY), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    seconds = {(operation, name): value for operation, name, value in json.loads(done.stdout.splitlines()[-1])}
    operations = {SAVE, LOAD, LOAD_NEW} | ({LOAD_COLUMNS} if ranks > 1 else set())
    assert set(seconds) == {(operation, name) for operation in operations for name in peer.NAMES}
    assert all(value > 0 for value in seconds.values())


@pytest.mark.parametrize("peer", [_orbax, _torchsnapshot])
def test_where_it_is_not_installed_it_says_what_to_install(peer: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer, "find_spec", lambda name: None)
    assert peer.contenders(1) == ()
    assert peer.missing(1).startswith("not installed: pip install ")
    assert peer.missing(1).split()[-1] in (REPOSITORY / "pyproject.toml").read_text()


def test_orbax_takes_part_in_one_process() -> None:
    assert _orbax.contenders(2) == ()
    assert _orbax.missing(2)


@pytest.mark.parametrize("peer", [_orbax, _torchsnapshot])
def test_each_row_has_its_terms(peer: ModuleType) -> None:
    assert set(peer.TERMS) == set(peer.NAMES)
