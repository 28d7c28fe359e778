"""`python -m shardtree`, as a process: what it prints, and its exit status."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.quick_python.command import quick_python

ROOT = Path(__file__).parents[2]


def run(*arguments: str, code: str = "") -> subprocess.CompletedProcess[str]:
    """Run the command line, or code, where nothing is a terminal and warnings are errors."""
    command = [*quick_python(), "-W", "error", *(("-c", code) if code else ("-m", "shardtree")), *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)


@pytest.mark.slow
@pytest.mark.parametrize("library", ["typer", "rich"])
def test_a_missing_library_is_named_with_what_installs_it(library: str) -> None:
    code = f"import sys; sys.modules[{library!r}] = None; from shardtree.cli import main; main()"
    done = run("demo", code=code)
    assert done.returncode == 1
    what = f"shardtree: the command line needs {library}. Install what it needs: pip install 'shardtree[cli]'\n"
    assert done.stderr == what
