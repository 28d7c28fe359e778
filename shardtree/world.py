"""Ranks and their collectives: one process, simulated ranks, or torch.distributed; and errors that all ranks raise."""

from __future__ import annotations

import typing

from .core.deferred import face

__all__ = [
    "World",
    "agree",
    "current_world",
    "distributed",
    "one_process",
    "simulate",
]

if typing.TYPE_CHECKING:
    from .live import simulate
    from .shell.world import World, agree, current_world, distributed, one_process
else:
    __getattr__, __dir__ = face(
        __name__,
        __all__,
        "..shell.world",
        {
            "..live": "simulate",
        },
    )
