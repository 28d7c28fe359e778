"""A world of MPI's ranks, held to its promises: mpirun -n 3 python -m mpi4py mpi_world.py."""

from shardtree.world import World


class MPIWorld(World):
    def __init__(self, comm):
        super().__init__(comm.rank, comm.size, timeout=600.0)
        self.comm = comm

    def all_gather(self, value):
        return self.comm.allgather(value)

    def broadcast(self, value, root=0):
        return self.comm.bcast(value, root)

    def barrier(self):
        self.comm.barrier()

    def all_to_all(self, values):
        return self.comm.alltoall(values)

    def send(self, value, to):
        self.comm.send(value, to)

    def recv(self, source):
        return self.comm.recv(source=source)


if __name__ == "__main__":
    from mpi4py import MPI

    from shardtree.testing import check_world

    world = MPIWorld(MPI.COMM_WORLD)
    check_world(lambda function: function(world))
    print(f"rank {world.rank} of {world.size}: the world keeps its promises")
