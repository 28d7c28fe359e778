"""Plans: which rank writes which shard, and where stored bytes go. Every rank computes the same plan.

This module isn't stable yet: its names may still change, except those that `shardtree` itself also exports.
"""

from __future__ import annotations

import typing

from .core.deferred import face

__all__ = [
    "Explanation",
    "FailedCheck",
    "Gap",
    "Misfit",
    "Mismatch",
    "Origin",
    "Provenance",
    "RankReads",
    "ReadCost",
    "Refusal",
    "ReshardPlan",
    "ScaledValues",
    "Schedule",
    "Transfers",
    "Undecided",
    "Unexpected",
    "peak_bytes",
    "plan_reshard",
    "reshard",
    "with_relays",
]

if typing.TYPE_CHECKING:
    from .core.plans import (
        Gap,
        Misfit,
        Mismatch,
        ReadCost,
        Refusal,
        ScaledValues,
        Unexpected,
    )
    from .inspection import Explanation, FailedCheck, RankReads, Undecided
    from .live.resharding import (
        Origin,
        Provenance,
        ReshardPlan,
        Schedule,
        Transfers,
        peak_bytes,
        plan_reshard,
        reshard,
        with_relays,
    )
else:
    __getattr__, __dir__ = face(
        __name__,
        __all__,
        "..core.plans",
        {
            "..inspection": "Explanation FailedCheck RankReads Undecided",
            "..live.resharding": (
                "Origin Provenance ReshardPlan Schedule Transfers peak_bytes plan_reshard reshard with_relays"
            ),
        },
    )
