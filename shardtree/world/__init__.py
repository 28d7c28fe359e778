"""Ranks and their collectives: one process, simulated ranks, or the ranks of torch.distributed; and phases."""

from ._current import current_world as current_world
from ._current import one_process as one_process
from ._distributed import distributed as distributed
from ._phases import agree as agree
from ._phases import gather as gather
from ._phases import on_one_rank as on_one_rank
from ._phases import on_rank_zero as on_rank_zero
from ._phases import share as share
from ._phases import step as step
from ._processes import run_processes as run_processes
from ._simulated import simulate as simulate
from ._world import World as World

__all__ = [
    "World",
    "current_world",
    "distributed",
    "one_process",
    "run_processes",
    "simulate",
]
