"""How much longer than torch shardtree takes to import: ``python -m benchmarks.imports``.

New processes by turns, one that imports torch alone and one that imports torch and asks shardtree for
a leaf, without which it loads nothing. Bytecode
is there and files are in the page cache. Of a few tries in a row the fastest counts, and of the rounds the median.
Then the command line: what its processes take of the processor until help, or what was wrong, is printed, and what
`inspect` of a small checkpoint takes beside torch's import.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import torch

import shardtree as st

from ._measuring import Bar, Settings, print_bars, run

MOST = 150.0
MOST_OF_A_COMMAND = 500.0
ALONE, TOGETHER = "import torch", "import shardtree; shardtree.ShardedTensor"

# Each statement is timed by itself. What a process has loaded before it begins would cost nothing, so that is refused.
_CHILD = """
import json, sys, time
before = {"torch", "numpy", "shardtree"} & {*sys.modules}
if before: raise SystemExit(f"already loaded: {before}")
times = [time.perf_counter()]
for statement in sys.argv[1:]:
    exec(statement)
    times.append(time.perf_counter())
print(json.dumps([1000 * (after - before) for before, after in zip(times, times[1:])]))
"""

Milliseconds = list[float]
"""Of each statement."""


def bars(settings: Settings) -> list[Bar]:
    """Return the import's bar, and where its time goes."""
    rounds, tries = (1, 1) if settings.quick else (5, 4)
    if not settings.quick:
        _round(1)  # writes bytecode
    measured = [_round(tries) for _ in range(rounds)]
    found = [*_rows(measured), *_commands(settings, rounds)]
    print_bars(f"Imports, new processes, medians of {rounds} rounds of {tries} tries", found, settings.console)
    return found


def _round(tries: int) -> tuple[Milliseconds, Milliseconds]:
    """Return the fastest of some tries: of torch alone, and of torch, shardtree and a name that waited."""
    pairs = [(_timed("import torch"), _timed("import torch", TOGETHER, "shardtree.save")) for _ in range(tries)]
    alone, together = zip(*pairs, strict=True)
    return _fastest(alone), _fastest(together)


def _fastest(tries: Sequence[Milliseconds]) -> Milliseconds:
    return [min(one) for one in zip(*tries, strict=True)]


def _timed(*statements: str) -> Milliseconds:
    """Return the milliseconds of each statement in a new process, which finds shardtree where this one did."""
    command = [sys.executable, "-c", _CHILD, *statements]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    root = Path(__file__).parents[1]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=True)
    taken: Milliseconds = json.loads(done.stdout)
    return taken


def _rows(measured: Sequence[tuple[Milliseconds, Milliseconds]]) -> list[Bar]:
    torch = median(alone[0] for alone, _ in measured)
    ours = median(sum(together[:2]) for _, together in measured)
    more = median(sum(together[:2]) - alone[0] for alone, together in measured)
    own = median(together[1] for _, together in measured)
    rest = median(together[2] for _, together in measured)
    return [
        Bar(TOGETHER, ALONE, ours, torch, more, MOST, "ms", "figure: ms more"),
        Bar("that, torch being there", "", own, None, own, None, "ms", "the same, in one process"),
        Bar("first use of a name that waited", "", rest, None, rest, None, "ms", "once a process: shardtree.save"),
    ]


def _commands(settings: Settings, rounds: int) -> list[Bar]:
    """Return the processor time of commands: help and wrong usage by themselves, `inspect` beside torch's import."""
    command = ("-m", "shardtree")
    with tempfile.TemporaryDirectory(dir=settings.folder, prefix="shardtree-imports-") as folder:
        st.save({"w": st.ShardedTensor.from_rank_offsets("w", torch.zeros(4, 4)), "step": 7}, folder)
        jobs = {
            "--help": (*command, "--help"),
            "wrong usage": (*command, "inspect"),
            "inspect of a small checkpoint": (*command, "inspect", folder),
            ALONE: ("-c", ALONE),
        }
        turns = [{name: _busy(job) for name, job in jobs.items()} for _ in range(rounds)]
    taken = {name: median(turn[name] for turn in turns) for name in jobs}
    beside = {name: "" if "inspect" not in name else ALONE for name in jobs if name != ALONE}
    return [
        Bar(
            f"the command line: {name}",
            other,
            taken[name],
            taken[ALONE] if other else None,
            taken[name] - (taken[ALONE] if other else 0.0),
            MOST_OF_A_COMMAND,
            "ms",
            "of the processor; figure: ms more" if other else "of the processor",
        )
        for name, other in beside.items()
    ]


def _busy(arguments: Sequence[str]) -> float:
    """Return the milliseconds that a new interpreter takes of the processor, in all of its threads."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    root = Path(__file__).parents[1]
    subprocess.run([sys.executable, *arguments], cwd=root, capture_output=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return 1000 * (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark by its command."""
    return run(bars, arguments, "benchmarks.imports", __doc__)


if __name__ == "__main__":
    sys.exit(main())
