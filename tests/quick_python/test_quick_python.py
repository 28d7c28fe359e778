"""A quick Python begins and ends as Python does, and knows no more than torch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.quick_python.command import quick_python

PLAIN = (sys.executable,)
CODE = """
import os, sys
print(sys.argv, os.getcwd(), os.environ["CARD"], sys.path[0], sys.stdin.read(), sys.warnoptions, __name__)
print(sys.stdout.encoding, sys.stderr.errors, file=sys.stderr)
"""
ENDS = ["pass", "raise SystemExit(3)", "1 / 0", "import os; os.abort()", "import warnings; warnings.warn('now')"]


def run(python: tuple[str, ...], *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*python, *arguments], capture_output=True, text=True, check=False, **options)


def test_it_is_given_what_python_is(tmp_path: Path) -> None:
    environment = os.environ | {"CARD": "7", "PYTHONIOENCODING": "ascii", "PYTHONWARNINGS": "ignore"}
    arguments, options = ("-W", "error", "-c", CODE, "one", "two"), {"input": "said", "cwd": tmp_path}
    quick, plain = (run(python, *arguments, env=environment, **options) for python in (quick_python(), PLAIN))
    assert (quick.stdout, quick.stderr) == (plain.stdout, plain.stderr)
    assert quick.stdout.startswith(f"['-c', 'one', 'two'] {tmp_path} 7  said")


@pytest.mark.parametrize("code", ENDS)
def test_it_ends_as_python_does(code: str) -> None:
    quick, plain = (run(python, "-W", "error", "-c", code) for python in (quick_python(), PLAIN))
    assert quick.returncode == plain.returncode
    assert quick.stderr.splitlines()[-1:] == plain.stderr.splitlines()[-1:]


@pytest.mark.slow
def test_it_has_imported_what_torch_brings_and_no_more() -> None:
    code = "import sys, torch; print(*sys.modules)"
    quick, plain = ({*run(python, "-c", code).stdout.split()} for python in (quick_python(), PLAIN))
    assert {name.partition(".")[0] for name in quick - plain} <= {*sys.stdlib_module_names}


def test_killed_it_takes_its_fork_with_it() -> None:
    code = "import time; print('begun', flush=True); time.sleep(600)"
    with subprocess.Popen([*quick_python(), "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"begun\n"
        process.kill()
        assert process.stdout.read() == b""  # which ends once nobody has it to write to


@pytest.mark.parametrize(
    ("handler", "status"), [("lambda *_: sys.exit(7)", 7), ("signal.SIG_DFL", -signal.SIGTERM), ("signal.SIG_IGN", 0)]
)
def test_it_is_told_to_end_as_python_is(handler: str, status: int) -> None:
    code = f"import signal, sys; signal.signal(signal.SIGTERM, {handler}); print('begun', flush=True); sys.stdin.read()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([*quick_python(), "-c", code], **pipes) as process:  # type: ignore[call-overload]
        assert process.stdout is not None and process.stdout.readline() == b"begun\n"
        process.terminate()
        if handler == "signal.SIG_IGN":
            process.stdin.close()
        assert process.wait(60) == status
