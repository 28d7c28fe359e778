"""Ranks and their collectives: one process, simulated ranks, or the ranks of torch.distributed; and phases."""

import typing

from ._distributed import current_world, distributed
from ._phases import agree, gather, gather_on_rank_zero, on_one_rank, on_rank_zero, share, step, tried
from ._world import World, one_process

if typing.TYPE_CHECKING:
    from ._processes import launched_rank, launched_world, run_processes
    from ._simulated import simulate
else:
    from ...core.deferred import later

    __getattr__ = later(
        __name__,
        {
            "launched_rank": "._processes",
            "launched_world": "._processes",
            "run_processes": "._processes",
            "simulate": "._simulated",
        },
    )
