"""A load imports what it does: ranks that read for each other, traces and explanations are others' affairs."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.quick_python.command import quick_python

BEGIN = """
import sys, torch, shardtree as st
tree = {"w": st.ShardedTensor.from_rank_offsets("w", torch.ones(2)), "step": 1}
st.save(tree, sys.argv[1])
"""
ALONE = "st.load(tree, sys.argv[1])"
TOGETHER = """
options = st.LoadOptions(exchange="always")
st.simulate(2, lambda world: st.load(tree, sys.argv[1], validate_access_integrity=False, world=world, options=options))
"""
WITHOUT = (
    *("conversion", "formats", "inspection", "lenses", "live", "optim", "quantised", "series", "stores", "traces"),
    "transforms",
)


def imported(code: str, folder: Path) -> set[str]:
    """Return the modules of `WITHOUT` that code imports in a new process."""
    command = [*quick_python(), "-c", BEGIN + code + "\nprint(*sys.modules)", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    names = {name.removeprefix("shardtree.") for name in done.stdout.split() if name.startswith("shardtree.")}
    return {name for name in names if any(f"{name}.".startswith(f"{one}.") for one in WITHOUT)}


def test_a_load_by_one_rank_imports_nothing_of_exchanges_lenses_or_traces(tmp_path: Path) -> None:
    assert imported(ALONE, tmp_path) == set()


def test_ranks_that_read_for_each_other_import_the_exchange(tmp_path: Path) -> None:
    assert {"live._reading", "live._move", "live.resharding._exchange"} <= imported(TOGETHER, tmp_path)
