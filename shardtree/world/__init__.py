"""Ranks and their collectives: one process, simulated ranks, or the ranks of torch.distributed; and phases."""

from ._distributed import current_world, distributed
from ._phases import agree, gather, gather_on_rank_zero, on_one_rank, on_rank_zero, share, step, tried
from ._processes import launched_rank, launched_world, run_processes
from ._simulated import simulate
from ._world import World, one_process

__all__ = [
    "World",
    "current_world",
    "distributed",
    "one_process",
    "simulate",
]
