"""Python as a command that starts in a fifth of the time: its processes are forked from one that has imported torch.

The fork has imported torch and nothing that torch doesn't bring, so that a test sees all that importing shardtree does.
It begins with the arguments, environment, folder and standard streams of the command, ends as an interpreter does, and
the command ends as the fork did. Of Python's options it takes -W, and of what the environment says to Python
PYTHONWARNINGS and PYTHONIOENCODING; PYTHONPATH is the tests' own.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent


@cache
def quick_python() -> tuple[str, ...]:
    """Return the words to put in the place of ``sys.executable``.

    Examples:
        >>> done = subprocess.run([*quick_python(), "-c", "print('here')"], capture_output=True, text=True)
        >>> done.returncode, done.stdout
        (0, 'here\\n')
    """
    folder = tempfile.TemporaryDirectory(prefix="quick-python-")
    address = f"{folder.name}/socket"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(HERE / "warm.py"), address]
    warm = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
    assert warm.stdin is not None and warm.stdout is not None
    warm.stdin, lifeline = None, warm.stdin  # it ends when this is closed, also by our own death

    def end() -> None:
        lifeline.close()
        warm.wait(30)
        folder.cleanup()

    atexit.register(end)
    with warm.stdout as said:
        assert said.readline() == b"warm\n"
    # Without site-packages: what starts for each command has to be small.
    return (sys.executable, "-I", "-S", str(HERE / "client.py"), address)


def torchrun(processes: int, script: Path | str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Return how a job of torchrun ended, the job and its ranks being started quickly; warnings are errors in both.

    The script may be ``-m``, with a module's name as the first argument.
    """
    job = started_torchrun(processes, script, *arguments)
    try:
        stdout, stderr = job.communicate(timeout=900)
    finally:
        job.kill()
    return subprocess.CompletedProcess(job.args, job.returncode, stdout, stderr)


def started_torchrun(processes: int, script: Path | str, *arguments: str) -> subprocess.Popen[str]:
    """Return such a job as it begins."""
    job = [*quick_python(), "-W", "error", "-m", "torch.distributed.run", "--standalone"]
    ranks = [f"--nproc-per-node={processes}", "--no-python", *quick_python(), str(script), *arguments]
    environment = os.environ | {"PYTHONWARNINGS": "error", "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([*job, *ranks], text=True, env=environment, **pipes)
