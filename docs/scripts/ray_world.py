"""A world of Ray's actors, held to its promises: python ray_world.py."""

import asyncio
import pickle
from collections import Counter, defaultdict

import ray

from shardtree.errors import WorldError
from shardtree.world import World


@ray.remote(num_cpus=0)
class Table:
    """The place where ranks meet: it keeps the values of a call until all that take part have come."""

    def __init__(self):
        self.calls = defaultdict(lambda: ({}, asyncio.Event()))

    async def meet(self, call, count, rank, value):
        values, is_full = self.calls[call]
        values[rank] = value
        if len(values) == count:
            del self.calls[call]
            is_full.set()
        await is_full.wait()
        return values


class RayWorld(World):
    def __init__(self, table, rank, size, timeout=600.0):
        super().__init__(rank, size, timeout)
        self.table, self.counts = table, Counter()

    def meet(self, what, value, members=None):
        self.counts[what] += 1  # the same on every rank, since all make the same calls
        call, count = (what, self.counts[what]), self.size if members is None else members
        try:
            return ray.get(self.table.meet.remote(call, count, self.rank, value), timeout=self.timeout)
        except ray.exceptions.GetTimeoutError as error:
            raise WorldError(f"{what}: rank {self.rank} waited {self.timeout:g} seconds") from error

    def all_gather(self, value):
        values = self.meet("all_gather", pickle.dumps(value))
        return [pickle.loads(values[rank]) for rank in range(self.size)]

    def broadcast(self, value, root=0):
        values = self.meet("broadcast", pickle.dumps(value) if self.rank == root else b"")
        return pickle.loads(values[root])

    def barrier(self):
        self.meet("barrier", b"")

    def all_to_all(self, values):
        rows = self.meet("all_to_all", [pickle.dumps(value) for value in values])
        return [pickle.loads(rows[rank][self.rank]) for rank in range(self.size)]

    def send(self, value, to):
        self.meet(("send", self.rank, to), pickle.dumps(value), members=2)

    def recv(self, source):
        return pickle.loads(self.meet(("send", source, self.rank), b"", members=2)[source])


@ray.remote(num_cpus=0)
class Trainer:
    def __init__(self, table, rank, size):
        self.world = RayWorld(table, rank, size, timeout=20.0)

    def run(self, function):
        return function(self.world)


def run_on_actors(function, size=3):
    table = Table.remote()
    trainers = [Trainer.remote(table, rank, size) for rank in range(size)]
    return ray.get([trainer.run.remote(function) for trainer in trainers])


if __name__ == "__main__":
    from shardtree.testing import check_world

    ray.init()
    check_world(run_on_actors, hears_of_the_dead=True)
    print("the world keeps its promises")
