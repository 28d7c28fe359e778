"""The mutants of a run: made and recorded by mutmut, in the folder mutants/."""

from __future__ import annotations

import os
import random
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from fnmatch import fnmatch
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

from tests.mutation.prose import prose_mutants

SEED = 20261122
SURVIVED = (0, 33)  # mutmut's codes; 33: no test reaches the function
LEFT_OUT = 34


def records() -> dict[str, Any]:
    """Return mutmut's records of the files that have mutants, by path."""
    from mutmut import __main__ as mutmut

    return mutmut.collect_source_file_mutation_data(mutant_names=[])[1]


def prepare() -> None:
    """Make the mutants of what has changed, leave out those of prose, and measure which tests reach which functions."""
    from mutmut import __main__ as mutmut
    from mutmut.runners.harness import PytestRunner
    from mutmut.workers.isolation import ForkRunner

    os.makedirs("mutants", exist_ok=True)
    mutmut.set_mutant_under_test("mutant_generation")
    with mutmut.CatchOutput():
        mutmut.copy_src_dir()
        mutmut.copy_also_copy_files()
        mutmut.setup_source_paths()
        mutmut.create_mutants(2)
    for path, record in records().items():
        module = ".".join(Path(path).with_suffix("").parts).removesuffix(".__init__")
        for name in prose_mutants(Path("mutants") / path):
            record.exit_code_by_key[f"{module}.{name}"] = LEFT_OUT
        record.save()
    mutmut.collect_or_load_stats(ForkRunner(1, PytestRunner()), apply_config_invalidation=True)


def apart(function: Callable[[], object]) -> bool:
    """Call a function in a process of its own, which leaves nothing behind here; return whether it gave None or 0."""
    child = os.fork()
    if not child:
        try:
            os._exit(int(bool(function())))
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def in_order(names: Iterable[str]) -> list[str]:
    """Return mutants in the order in which they are tried: any first part of it is a random sample."""
    order = sorted(names)
    random.Random(SEED).shuffle(order)
    return order


def chosen(codes: dict[str, int | None], patterns: list[str], *, again: bool) -> list[str]:
    """Return the mutants without a verdict; `again`: first those that survived."""
    named = [name for name in in_order(codes) if any(fnmatch(name, pattern) for pattern in patterns)]
    survived = [name for name in named if codes[name] in SURVIVED]
    return (survived if again else []) + [name for name in named if codes[name] is None]


@cache
def functions_reached() -> Counter[str]:
    """Return how many functions each test reaches."""
    from mutmut.state import state

    return Counter(test for tests in state().tests_by_mangled_function_name.values() for test in tests)


def most_telling(mutant: str, seconds: float) -> list[str]:
    """Return the tests that reach a mutant's function until they take so long, those first that reach little else."""
    from mutmut.state import state

    times = state().duration_by_test
    reach = state().tests_by_mangled_function_name.get(mutant.partition("__mutmut_")[0], set())
    ordered = sorted(reach, key=lambda test: (functions_reached()[test] * (0.01 + times[test]), test))
    ends = accumulate(times[test] for test in ordered)
    return [test for test, end in zip(ordered, ends, strict=True) if end <= seconds or test == ordered[0]]
