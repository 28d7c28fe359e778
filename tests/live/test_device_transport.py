"""Redistribution between devices: by the group's own backend where all ranks' tensors are on one kind of device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardtree as st
from shardtree.live import run_processes
from shardtree.live._describe import agreed_device, describe
from shardtree.live._memory import device_of_tensors, take_ends
from shardtree.shell.world._distributed import group_exchange
from shardtree.testing import outline
from tests.shell.world.passing_on import PassingOn

WHOLE = {"w": torch.arange(48.0).view(8, 6), "small": torch.arange(6, dtype=torch.int8)}
ROWS = {"w": st.P("dp"), "small": st.P()}
COLUMNS = {"w": st.P(None, "dp"), "small": st.P("dp")}


def moved_by_the_group(world: st.World) -> list[str]:
    """Return the outline of what the backend's own messages moved, and what it should be."""
    mesh = st.Mesh(dp=world.size)
    rows, columns = (st.shard_at(WHOLE, mesh, specs, world.rank) for specs in (ROWS, COLUMNS))
    transport = group_exchange(dist.group.WORLD, "cpu")
    found = st.redistribute(rows, columns, world=world, transport=transport, max_bytes_in_flight=40)
    return [outline(found), outline(columns)]


@pytest.mark.torchrun
@pytest.mark.slow
def test_the_groups_own_messages_move_the_same_bytes() -> None:
    for found, expected in run_processes(3, moved_by_the_group):
        assert found == expected


def described(device: str | None, world: Any) -> Any:
    place = None if device is None else torch.device(device)
    options: Any = None
    return describe(take_ends({}, None), None, options, place, world)


class Reaching:
    """A world that sends from some kinds of device."""

    rank = 0

    def __init__(self, *kinds: str) -> None:
        self.kinds = kinds

    def device_exchange(self, kind: str) -> Any:
        return print if kind in self.kinds else None


@pytest.mark.parametrize(
    ("devices", "kinds", "expected"),
    [
        (["cuda:0", "cuda:1", None], ["cpu", "cuda"], "cuda"),
        (["cuda:0", "cuda:1"], ["cpu"], "cpu"),
        (["cuda:0", "cpu"], ["cpu", "cuda"], "cpu"),
        (["cuda:0", "xpu:0"], ["cpu", "cuda", "xpu"], "cpu"),
        ([None, None], ["cpu", "cuda"], "cpu"),
    ],
)
def test_buffers_are_on_devices_where_all_ranks_can(devices: list[str | None], kinds: list[str], expected: str) -> None:
    assert agreed_device([described(device, Reaching(*kinds)) for device in devices]) == expected


def test_a_rank_with_tensors_on_two_devices_takes_the_cpu() -> None:
    shard = st.ShardedTensor.from_rank_offsets("w", torch.empty(2, device="meta"))
    held = st.ShardedTensor.from_rank_offsets("v", torch.zeros(2))
    assert device_of_tensors(take_ends([held], [held])) == torch.device("cpu")
    assert device_of_tensors(take_ends(None, [shard])) == torch.device("cpu")  # it gets new memory there
    assert device_of_tensors(take_ends(None, None)) is None


@pytest.mark.parametrize("options", [{}, {"device": "cpu"}, {"device": torch.device("cpu")}])
def test_the_worlds_transport_for_the_agreed_kind_is_used(options: dict[str, Any]) -> None:
    used: list[str] = []

    def run(world: st.World) -> Any:
        def exchange(outgoing: Mapping[int, torch.Tensor], incoming: Mapping[int, torch.Tensor]) -> None:
            used.extend(buffer.device.type for buffer in (*outgoing.values(), *incoming.values()))
            world.exchange(outgoing, incoming)

        class Recording(PassingOn):
            def device_exchange(self, kind: str) -> Any:
                return exchange if kind == "cpu" else None

        rows, columns = (st.shard_at(WHOLE, st.Mesh(dp=2), specs, world.rank) for specs in (ROWS, COLUMNS))
        columns = {key: replace(shard, data=torch.zeros_like(shard.data)) for key, shard in columns.items()}
        expected = st.shard_at(WHOLE, st.Mesh(dp=2), COLUMNS, world.rank)
        return outline(st.redistribute(rows, columns, world=Recording(world), **options)) == outline(expected)

    assert st.simulate(2, run) == [True, True] and set(used) == {"cpu"}
