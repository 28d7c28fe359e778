"""Run by torchrun: every collective, between real processes."""

from __future__ import annotations

import sys
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend "fake"

from shardtree.errors import RemoteError, UnsupportedValue, WorldError
from shardtree.shell.world import agree, gather, gather_on_rank_zero, on_rank_zero
from shardtree.shell.world._groups import coordination_group
from shardtree.world import World, current_world, distributed


def check_collectives(world: World) -> None:
    rank, size = world.rank, world.size
    assert world.all_gather((rank, "x")) == [(other, "x") for other in range(size)]
    check_unequal_sizes(world)
    for root in range(size):
        for length in (0, 10, 1_000, 100_000):
            received = world.broadcast(b"%d" % root * length if rank == root else None, root)
            assert received == b"%d" % root * length
    world.barrier()
    assert world.all_to_all([(rank, other) for other in range(size)]) == [(other, rank) for other in range(size)]
    pieces = world.all_to_all([np.full((rank * 1000 + other,), rank) for other in range(size)])
    assert all((piece == other).all() and len(piece) == other * 1000 + rank for other, piece in enumerate(pieces))
    check_messages(world)
    check_exchange(world)


def check_unequal_sizes(world: World) -> None:
    check_gather(world, 0)
    check_gather(world, 300_000)
    columns = world.all_gather(np.arange(world.rank**3 * 1000))
    for other, column in enumerate(columns):
        np.testing.assert_array_equal(column, np.arange(other**3 * 1000))
        assert column.flags.writeable
    # Around the size of a frame's head, of which many ranks have smaller ones.
    head = max(512, 64 * 1024 // world.size)
    for length in range(head - 40, head):
        assert world.all_gather(b"x" * (length + world.rank)) == [b"x" * (length + r) for r in range(world.size)]
        received = world.broadcast(b"x" * length if world.rank == 0 else None, 0)
        assert received == b"x" * length
        check_gather(world, length)


def check_gather(world: World, length: int) -> None:
    values = [b"x" * (length + other) for other in range(world.size)]
    for root in (0, world.size - 1):
        gathered = world.gather(values[world.rank], b"brief", root)
        if world.rank == root or length == 0:
            assert gathered == values
        elif length > 64 * 1024:  # more than any head
            assert [each for other, each in enumerate(gathered) if other not in (root, world.rank)] == [b"brief"] * (
                world.size - 2
            )


def check_messages(world: World) -> None:
    right, left = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    for value in ("first", b"second" * 100_000):
        if world.rank == 0:
            world.send(value, right)
            assert world.recv(left) == value
        else:
            world.send(world.recv(left), right)


def check_exchange(world: World) -> None:
    others = [rank for rank in range(world.size) if rank != world.rank]
    for length in (0, 1, 300_000):  # more than a socket takes, both ways at once: nobody waits for a reader
        outgoing = {to: torch.full((length * to + world.rank,), world.rank, dtype=torch.uint8) for to in others}
        rooms = {source: torch.zeros(length * world.rank + source, dtype=torch.uint8) for source in others}
        addresses = {source: room.data_ptr() for source, room in rooms.items()}
        world.exchange(outgoing, rooms)
        assert all(bool((room == source).all()) for source, room in rooms.items())
        assert addresses == {source: room.data_ptr() for source, room in rooms.items()}
    world.exchange({}, {})
    # Bytes and messages are told apart, whatever the order in which they are waited for.
    part = torch.tensor([1, 2, 3], dtype=torch.uint8)
    if world.rank == 0:
        world.send("a message", 1)
        world.exchange({1: part}, {})
    elif world.rank == 1:
        room = torch.zeros_like(part)
        assert world.recv(0) == "a message"
        world.exchange({}, {0: room})
        assert torch.equal(room, part)
    world.barrier()


def check_phases(world: World) -> None:
    assert agree(world, "fine", lambda: world.rank) == world.rank
    assert gather(world, "fine", lambda: world.rank) == list(range(world.size))
    assert on_rank_zero(world, "fine", lambda: world.rank) == 0
    gathered = gather_on_rank_zero(world, "fine", lambda: b"%d" % world.rank * 100_000)
    assert gathered == [b"%d" % rank * 100_000 for rank in range(world.size if world.rank == 0 else 0)]
    for phase in (agree, gather, gather_on_rank_zero):
        with pytest.raises(RemoteError) as caught:
            phase(world, "divide", lambda: 1 / (world.rank - 1))
        assert caught.value.failures == {1: "ZeroDivisionError: division by zero"}
        assert isinstance(caught.value.__cause__, ZeroDivisionError) == (world.rank == 1)
    with pytest.raises(UnsupportedValue):
        world.all_gather(lambda: None)
    world.barrier()


def check_subgroup(world: World) -> None:
    odd = [rank for rank in range(world.size) if rank % 2]
    group = dist.new_group(odd, backend="gloo")
    if world.rank in odd:
        inside = distributed(group)
        assert inside.size == len(odd)
        assert inside.rank == odd.index(world.rank)
        check_collectives(inside) if inside.size > 1 else inside.barrier()
        apart = distributed(group, purpose="async")
        assert apart.all_gather(world.rank) == odd
    else:
        with pytest.raises(WorldError, match="is not in the process group"):
            distributed(group)
    # Not the default group's barrier, which not every backend has.
    world.barrier()


def main(backend: str) -> None:
    assert current_world(None).size == 1
    # The fake backend would bring a fake store; and a store of its own for each backend keeps the addresses of the last
    # one's groups apart.
    shared, rank, size = next(dist.rendezvous("env://"))
    store = dist.PrefixStore(backend, shared)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=100))
    world = current_world(None)
    assert current_world(world) is world
    assert world.size == dist.get_world_size()
    check_collectives(world)
    check_phases(world)
    check_subgroup(world)
    apart = distributed(purpose="async", timeout=20.0)
    assert apart.timeout == 20.0
    check_collectives(apart)
    assert coordination_group(dist.group.WORLD, 20.0, "async") is coordination_group(dist.group.WORLD, 9.0, "async")
    if backend == "gloo":
        assert coordination_group(dist.group.WORLD, 20.0, None) is not dist.group.WORLD
    world.barrier()
    if backend == "fake":
        return  # A program may end without destroying its group; gloo's threads mustn't abort it then.
    dist.destroy_process_group()
    with pytest.raises(WorldError):
        world.barrier()
    assert current_world(None).size == 1


if __name__ == "__main__":
    for name in sys.argv[1:]:
        main(name)
