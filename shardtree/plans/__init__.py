"""Plans: who writes which shard, and which stored bytes go where, as columns. Every rank computes the same plan.

This room isn't settled: its names may still change, those of the root alone stay.
"""

import typing

from .._deferred import later
from ._convert import convert
from ._explain import Explanation, FailedCheck, Prospect, RankReads, ReadCost, Undecided
from ._fit import (
    Gap,
    Misfit,
    Mismatch,
    Overlap,
    PrefixDifference,
    Refusal,
    Unexpected,
    convertible,
    find_gaps,
    find_mismatches,
    find_unexpected,
    is_integer,
    misfit_lines,
    overlaps,
    prefix_difference,
    stored_elements,
    wants_names,
)
from ._load import LoadPlan, Runs, StoredChunks, Strided, grouped, plan_load, read_rounds, runs_plan
from ._save import held_places, level_writes, main_writes
from ._without_scales import ScaledValues, find_scaled

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
    from ._exchange import ExchangePlan, SharedReads, plan_exchange, plan_reads
    from ._in_memory import (
        SourceTree,
        TargetTree,
        agreed_common,
        complete,
        join_filled,
        reshard,
        take_source,
        take_target,
    )
    from .resharding import (
        Origin,
        Provenance,
        ReshardPlan,
        Schedule,
        Transfers,
        peak_bytes,
        plan_reshard,
        with_relays,
    )
else:
    from .._deferred import later

    __getattr__ = later(
        __name__,
        {
            "ExchangePlan": "._exchange",
            "Origin": ".resharding",
            "Provenance": ".resharding",
            "ReshardPlan": ".resharding",
            "Schedule": ".resharding",
            "SharedReads": "._exchange",
            "SourceTree": "._in_memory",
            "TargetTree": "._in_memory",
            "Transfers": ".resharding",
            "agreed_common": "._in_memory",
            "complete": "._in_memory",
            "join_filled": "._in_memory",
            "peak_bytes": ".resharding",
            "plan_exchange": "._exchange",
            "plan_reads": "._exchange",
            "plan_reshard": ".resharding",
            "reshard": "._in_memory",
            "take_source": "._in_memory",
            "take_target": "._in_memory",
            "with_relays": ".resharding",
        },
    )
