"""Simulated and started ranks, and tensors that move between ranks from memory to memory."""

import typing

__all__ = [
    "Transport",
    "redistribute",
]

if typing.TYPE_CHECKING:
    from ._memory import make_buffers
    from ._move import Route, Transport, long_pieces_apart, move
    from ._processes import launched_rank, launched_world, run_processes
    from ._reading import cuts_shards, foretold_exchange, foretold_groups
    from ._redistribute import redistribute
    from ._reduce import reduce_elements, tree_norm, tree_sum
    from ._simulated import simulate
else:
    from ..core.deferred import later

    __getattr__ = later(
        __name__,
        {
            "._memory": "make_buffers",
            "._move": "Route Transport long_pieces_apart move",
            "._processes": "launched_rank launched_world run_processes",
            "._reading": "cuts_shards foretold_exchange foretold_groups",
            "._redistribute": "redistribute",
            "._reduce": "reduce_elements tree_norm tree_sum",
            "._simulated": "simulate",
        },
    )
