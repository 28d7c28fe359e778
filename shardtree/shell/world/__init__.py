"""Ranks and their collectives, and phases: work that succeeds on every rank or raises on every rank."""

from ._distributed import current_world, distributed
from ._phases import agree, gather, gather_on_rank_zero, on_one_rank, on_rank_zero, share, step, tried
from ._world import (
    DEFAULT_TIMEOUT,
    World,
    one_process,
    pack,
    unpack,
)
