"""A process that ends with saves on their way commits them, or fails and says which are lost."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

import shardtree as st
from tests.quick_python.command import quick_python

SCRIPT = Path(__file__).parent / "scripts" / "async_exit.py"
BOTH = {"new", "newer"}

Ends = list[tuple[int, str]]


def run(folder: Path, what: str, environments: Sequence[dict[str, str]] = ({},)) -> Ends:
    """Return the status of each rank's process, and what it says on stderr."""
    command = [*quick_python(), "-W", "error", str(SCRIPT), str(folder), what]
    processes = [
        subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ | each) for each in environments
    ]
    said = [process.communicate(timeout=300)[1] for process in processes]
    return [(process.returncode, text) for process, text in zip(processes, said, strict=True)]


def whole(folder: Path) -> set[str]:
    """Return what can be loaded, having read all of it."""
    found = {path.name for path in folder.iterdir() if st.is_checkpoint(path)}
    for name in found:
        tensors = st.load_plain_tensors(folder / name, options=st.LoadOptions(verify="all"))
        assert {*tensors["w"].unique().tolist()} == {st.load_common_state_dict(folder / name)["step"]}
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "status", "said", "saved"),
    [
        ("nothing else", 0, "", BOTH),
        ("exit 3", 3, "", BOTH),
        ("raise", 1, "RuntimeError: the training diverged", BOTH),
        ("terminate", -signal.SIGTERM, "", set()),
        ("leave", 0, "", set()),
        ("fork", 0, "", BOTH),
        ("workers", 0, "", {*BOTH, "of the child"}),
        ("large", 0, "", {*BOTH, "large"}),
        ("fail", 1, "async save 0 to '{folder}/failed'", BOTH),
        ("hang", 1, "writes and commits took more than 1 seconds\n  async save 0 to '{folder}/hung'", BOTH),
    ],
)
def test_a_process_ends(what: str, status: int, said: str, saved: set[str], tmp_path: Path) -> None:
    [(ended, error)] = run(tmp_path, what)
    assert ended == status, error
    assert said.format(folder=tmp_path) in error
    assert status or not error, "what ends well is silent"
    assert whole(tmp_path) == saved


def ends_of_two_ranks(folder: Path, what: str) -> Ends:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo"}
    return run(folder, what, [{"RANK": str(rank), **place} for rank in range(2)])


def old_checkpoint(folder: Path) -> None:
    tree = {"w": st.ShardedTensor.from_rank_offsets("w", torch.ones(2000)), "step": 1.0}
    st.save(tree, folder / "new")


def value_in(folder: Path) -> float:
    assert whole(folder) == {"new"}
    return float(st.load_plain_tensors(folder / "new")["w"][0])


@pytest.mark.slow
@pytest.mark.torchrun
def test_ranks_that_end_together_commit(tmp_path: Path) -> None:
    old_checkpoint(tmp_path)
    assert ends_of_two_ranks(tmp_path, "nothing else") == [(0, ""), (0, "")]
    assert value_in(tmp_path) == 2


@pytest.mark.torchrun
@pytest.mark.parametrize(
    ("what", "statuses", "said"),
    [
        ("one fails", [1, 1], "no space left on device"),
        ("killed", [1, -signal.SIGKILL], "cannot reach its peers"),
        ("destroyed", [1, 1], "was destroyed"),
    ],
)
def test_what_not_all_ranks_could_commit_ends_them_with_an_error(
    what: str, statuses: list[int], said: str, tmp_path: Path
) -> None:
    old_checkpoint(tmp_path)
    ends = ends_of_two_ranks(tmp_path, what)
    assert [status for status, _ in ends] == statuses, ends
    for status, error in ends:
        if status == 1:
            assert said in error and f"async save 0 to '{tmp_path}/new'" in error
    assert value_in(tmp_path) == 1, "the old checkpoint stays"
