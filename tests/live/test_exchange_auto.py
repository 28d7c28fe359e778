"""exchange="auto": whether ranks read for each other, by where they are and what it saves, and the reason."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

import shardtree as st
from shardtree.shell.checkpoint.loading import _choice
from shardtree.shell.checkpoint.loading._choice import ReadPlace, exchange_choice
from shardtree.shell.storage import _network, crosses_network
from shardtree.storage import Capabilities, LocalStorage, MemoryStorage, ReadReport
from shardtree.testing import watched

ROWS = torch.arange(1 << 19).view(1 << 9, -1)
MIB = 2**20


@given(some.lists(some.tuples(some.sampled_from("ab"), some.booleans()), min_size=1), some.none() | some.integers(0))
def test_ranks_read_for_each_other_where_all_three_hold(places: list[tuple[str, bool]], saved: int | None) -> None:
    found = exchange_choice("auto", [ReadPlace(*place) for place in places], saved)
    several, remote = len({host for host, _ in places}) > 1, any(far for _, far in places)
    much = saved is None or saved >= 128 * MIB * len(places)
    assert found.together is (several and remote and much)
    assert bool(found.why) is (len(places) > 1)


class Elsewhere(MemoryStorage):
    """A folder of which nobody says how far away it is."""

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, latency=None)


def saved(folder: MemoryStorage | None = None) -> Any:
    """Return a storage with a checkpoint, which isn't known to be local or in memory unless another one is given."""
    folder = Elsewhere() if folder is None else folder
    st.save({"w": st.ShardedTensor.from_rank_offsets("w", ROWS)}, folder)
    return watched(folder)


def replica(rank: int, dtype: torch.dtype = torch.int64) -> dict[str, Any]:
    return {"w": st.ShardedTensor.from_rank_offsets("w", torch.zeros(ROWS.shape, dtype=dtype), replica_id=rank)}


def loaded(storage: Any, dtype: torch.dtype = torch.int64, **options: Any) -> list[ReadReport]:
    """Return each rank's report of a load of replicas, whose values are compared."""

    def on_rank(world: st.World) -> ReadReport:
        reports: list[ReadReport] = []
        how = st.LoadOptions(report=reports.append, **options)
        tree = st.load(replica(world.rank, dtype), storage, world=world, cast=True, options=how)
        assert torch.equal(tree["w"], ROWS.to(dtype))
        st.checkpoint.load_plain_tensors(storage, world=world, options=how)
        assert reports[0].exchange == reports[1].exchange and reports[0].exchange in str(reports[0])
        return reports[0]

    return st.simulate(2, on_rank)


@pytest.fixture
def several_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each rank, which is a thread, be on a machine of its own."""
    monkeypatch.setattr(_choice.socket, "gethostname", lambda: str(threading.get_ident()))


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64])
def test_each_byte_is_read_once_by_several_machines(
    several_machines: None, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    for least, times, why in ((0, 1, "Ranks read for each other"), (128 * MIB, 2, "less than 128 MiB a rank")):
        monkeypatch.setattr(_choice, "_WORTH_BYTES", least)
        reports = loaded(saved(), dtype)
        assert sum(report.bytes_read for report in reports) == times * ROWS.nbytes
        assert all(why in report.exchange for report in reports)


def test_explain_says_the_same(several_machines: None, monkeypatch: pytest.MonkeyPatch) -> None:
    storage, targets = saved(), [replica(rank) for rank in range(2)]
    for least in (0, 128 * MIB):
        monkeypatch.setattr(_choice, "_WORTH_BYTES", least)
        (report, _), told = loaded(storage), st.explain_ranks(targets, storage)
        assert told.exchange.startswith(report.exchange) and told.exchange in str(told)
        assert ("On one machine" in told.exchange) is (least == 0)
        assert [one.cost.bytes_wanted for one in told.reads if one.cost] == [
            ROWS.nbytes // (2 if least == 0 else 1)
        ] * 2


def test_one_machine_and_local_storage_read_alone() -> None:
    assert [report.exchange for report in loaded(saved())] == [
        "Each rank reads by itself, since all are on one machine."
    ] * 2
    assert loaded(saved(MemoryStorage()))[0].exchange == "Each rank reads by itself, since storage is local."


MOUNTS = """\
21 1 {number} / / rw - ext4 /dev/vda rw
22 1 {number} / /home rw,noatime shared:1 master:7 - {kind} server:/home rw
"""


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("nfs4", True), ("lustre", True), ("fuse.s3fs", True), ("fuseblk", False), ("xfs", False), ("overlay", False)],
)
def test_a_mount_tells_whether_a_folder_is_on_a_network(
    kind: str, expected: bool, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = (tmp_path / "..").stat().st_dev
    number = f"{_network.os.major(device)}:{_network.os.minor(device)}"
    table = tmp_path / "mountinfo"
    table.write_text(MOUNTS.replace("{number}", "0:1", 1).format(number=number, kind=kind))
    monkeypatch.setattr(_network, "_MOUNTS", str(table))
    assert crosses_network(LocalStorage(str(tmp_path))) is expected


def test_where_nothing_is_known_of_mounts_a_folder_is_local(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_network, "_MOUNTS", str(tmp_path / "none"))
    assert not crosses_network(LocalStorage(str(tmp_path)))
    assert not crosses_network(LocalStorage(str(tmp_path / "absent")))
