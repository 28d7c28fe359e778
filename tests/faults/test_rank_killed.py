"""A rank killed in the middle of a save: the others end with an error in time, and what is there is whole."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import shardtree
from tests.faults.warm_saver import NEW, NEXT, OLD, Job, Saver, listing, prepared, value_in
from tests.quick_python.command import torchrun

SCRIPT = Path(__file__).parent / "scripts" / "dying_rank.py"
TIMEOUT = 30.0  # seconds that ranks wait for each other
SIGKILL = 9

# Rank and moment, and whether the new checkpoint counts by then.
DEATHS = {
    "1:writing": False,
    "0:writing": False,
    "2:written": False,
    "0:written": False,
    "0:committing": False,
    "0:committed": True,
}


@pytest.mark.slow
@pytest.mark.parametrize("over_an_old_one", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("death", DEATHS)
def test_the_others_end_with_an_error_in_time(death: str, over_an_old_one: bool, saver: Saver, tmp_path: Path) -> None:
    # Forked ranks, which nobody ends when one dies: what they raise is their own.
    job = Job(ranks=3, overwrite=over_an_old_one, timeout=TIMEOUT, death=death)
    there = replace(job, folder=str(prepared(saver, replace(job, death=""), tmp_path / "step")))
    ends = saver(there)
    who = int(death[0])
    assert [end["signal"] for end in ends] == [SIGKILL if rank == who else 0 for rank in range(3)], ends
    for end in ends[:who] + ends[who + 1 :]:
        assert end["error"] == "WorldError" and "cannot reach its peers" in end["text"], ends
        assert not end["silent"], ends
    before = OLD if over_an_old_one else None
    assert value_in(there) == (NEW if DEATHS[death] else before)
    again = saver(replace(there, value=NEXT, overwrite=True, death=""))
    assert not any(end["error"] for end in again), again
    assert value_in(there) == NEXT
    assert len(listing(there.folder)) == 7, "the dead save's files are still there"


def check_torchrun(folder: Path, death: str, before: float | None) -> None:
    """Raise unless a job of which a rank dies ends in time and leaves what was there, and the next job saves.

    In time is long before its ranks would give up: torchrun ends the others when one dies.
    """
    done = torchrun(2, SCRIPT, str(folder), str(NEW), death)
    assert done.returncode != 0 and "SIGKILL" in done.stderr, done.stderr
    assert tensor_in(folder) == before
    if before is None:
        with pytest.raises(shardtree.errors.NotACheckpoint):
            shardtree.load({}, folder)
    done = torchrun(2, SCRIPT, str(folder), str(NEXT))
    assert done.returncode == 0, done.stderr
    assert tensor_in(folder) == NEXT
    assert len(list(folder.iterdir())) == 2, "the dead save's files are still there"


def tensor_in(folder: Path) -> float | None:
    """Return the value of the one tensor of the checkpoint that is there, all of it checked; None if there is none."""
    if not shardtree.is_checkpoint(folder):
        return None
    tensors = shardtree.load_plain_tensors(folder, options=shardtree.LoadOptions(verify="all"))
    value = float(tensors["w"][0, 0])
    assert set(tensors) == {"w"} and torch.equal(tensors["w"], torch.full((4, 1000), value))
    assert shardtree.load_common_state_dict(folder) == {"step": value}
    assert shardtree.verify(folder) == ()
    return value


@pytest.mark.slow
@pytest.mark.torchrun
def test_a_rank_killed_in_a_torchrun_save_leaves_nothing_that_loads(tmp_path: Path) -> None:
    check_torchrun(tmp_path / "step", "0:writing", None)


@pytest.mark.exhaustive
@pytest.mark.torchrun
@pytest.mark.parametrize("death", ["1:writing", "1:written", "0:writing", "0:committing"])
def test_a_rank_killed_in_a_torchrun_save_leaves_the_old_checkpoint(death: str, tmp_path: Path) -> None:
    done = torchrun(2, SCRIPT, str(tmp_path / "step"), str(OLD))
    assert done.returncode == 0, done.stderr
    check_torchrun(tmp_path / "step", death, OLD)
