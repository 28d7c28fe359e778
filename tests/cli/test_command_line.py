"""`python -m shardtree`, as a process: what it prints, and its exit status."""

from __future__ import annotations

import subprocess

import pytest

from tests.quick_python.command import quick_python


@pytest.mark.slow
@pytest.mark.parametrize("library", ["typer", "rich"])
def test_a_missing_library_is_named_with_what_installs_it(library: str) -> None:
    code = f"import sys; sys.modules[{library!r}] = None; from shardtree.cli import main; main()"
    command = [*quick_python(), "-W", "error", "-c", code, "demo"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 1
    what = f"shardtree: the command line needs {library}. Install what it needs: pip install 'shardtree[cli]'\n"
    assert done.stderr == what
