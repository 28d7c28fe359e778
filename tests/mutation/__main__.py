"""Tries the tests of layouts, plans and trees on mutants of them: ``python -m tests.mutation run``, then ``show``.

A mutant is the code with one small change (`<` becomes `<=`, a value None); one that survives shows behaviour without
a test, or a change that makes no difference. It takes hours, needs `pip install -c constraints.txt -e
'.[dev,mutation]'`, and goes on where it was ended. Mutants come in a seeded order, so that any first part of it is a
random sample, and those of prose are left out. ``--seconds 1.5`` gives each only the quickest tests that reach it;
``again`` asks survivors with more. Records lie in `mutants/`: ``mutmut results`` names survivors, ``mutmut show
NAME`` has what one changes. On 2026-11-22, 7,465 of 11,586 were tried: 94.7 % killed (layouts 95.6, plans 93.2, trees
97.1).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from functools import partial
from math import ceil, inf
from pathlib import Path
from typing import Any

from tests.mutation.mutants import apart, chosen, most_telling, prepare, records
from tests.mutation.warm import WarmTests

WAIT = 40.0  # seconds of wall time that mutmut adds to a mutant's tests, three times: what ends one that waits for ever
COLUMNS = ("killed", "timeout", "survived", "no tests", "skipped", "not checked")


def main() -> int:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument("what", choices=["run", "again", "show"], help="again: what survived, too")
    parser.add_argument("only", nargs="*", help="patterns of mutants, as 'shardtree.core.trees.*'")
    parser.add_argument("--seconds", type=float, default=inf, help="of tests for a mutant")
    parser.add_argument("--processes", type=int, default=2)
    given = parser.parse_intermixed_args()
    os.environ["SHARDTREE_PROFILE"] = "mutation"
    patterns = given.only or ["*"]
    if given.what == "show":
        return show()
    if not apart(prepare):
        return 1
    run(patterns, given.seconds, given.processes, again=given.what == "again")
    return show()


def run(patterns: list[str], seconds: float, processes: int, *, again: bool) -> None:
    """Try mutants, and record each verdict at once: a run that is ended begins where it was."""
    from mutmut import __main__ as mutmut
    from mutmut.configuration import config
    from mutmut.state import state
    from mutmut.workers.isolation import ForkRunner

    mutmut.setup_source_paths()
    mutmut.load_stats()
    mutmut.set_mutant_under_test("")
    tests = WarmTests("mutants", [*config().pytest_add_cli_args, *config().pytest_add_cli_args_test_selection])
    check_clean(tests)
    runner = ForkRunner(processes, tests)
    record_of = {name: record for record in records().values() for name in record.exit_code_by_key}
    wanted = chosen({name: record.exit_code_by_key[name] for name, record in record_of.items()}, patterns, again=again)
    runner.startup()
    done: Counter[int] = Counter()
    for name in wanted:
        while not runner.has_capacity():
            note(runner.wait_for_result(), record_of, done, len(wanted))
        own = most_telling(name, seconds)
        takes = sum(state().duration_by_test[test] for test in own)
        runner.submit(name, own, ceil(3 * takes) + 5, WAIT + takes)
    while runner.pending_count():
        note(runner.wait_for_result(), record_of, done, len(wanted))


def check_clean(tests: WarmTests) -> None:
    """Raise unless all tests pass without a mutant, run as they will be with one; once for each set of tests."""
    passed, names = Path("mutants/passed.txt"), "\n".join(sorted(tests.items))
    if passed.exists() and passed.read_text() == names:
        return
    if not apart(partial(tests.run_tests, mutant_name=None, tests=sorted(tests.items))):
        raise SystemExit("a test fails without any mutant")
    passed.write_text(names)


def note(result: Any, record_of: dict[str, Any], done: Counter[int], count: int) -> None:
    """Record a verdict."""
    record = record_of[result.mutant_name]
    record.exit_code_by_key[result.mutant_name] = result.exit_code
    record.durations_by_key[result.mutant_name] = result.duration
    record.save()
    done[result.exit_code] += 1
    if done.total() % 100 == 0:
        say(f"{done.total()} of {count}: {dict(done)}")


def show() -> int:
    """Print a row for each room."""
    from mutmut.stats import status_by_exit_code

    say(f"| room | {' | '.join(COLUMNS)} | share |")
    verdicts: dict[str, Counter[str]] = {}
    for path, record in records().items():
        room = verdicts.setdefault(Path(path).parts[1], Counter())
        room.update(status_by_exit_code[code] for code in record.exit_code_by_key.values())
    for room, found in sorted(verdicts.items()):
        tried = found.total() - found["skipped"] - found["not checked"]
        dead = tried - found["survived"] - found["no tests"]
        others = {kind: count for kind, count in found.items() if kind not in COLUMNS}
        counts = " | ".join(str(found[column]) for column in COLUMNS)
        say(f"| {room} | {counts} | {dead / max(tried, 1):.1%} | {others or ''}")
    return 0


def say(text: str) -> None:
    """Print a line at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
