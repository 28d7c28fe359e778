"""Plans: who writes which shard, and which stored bytes go where, as columns. Every rank computes the same plan.

This room isn't settled: its names may still change, those of the root alone stay.
"""

from ._copies import (
    CARRIERS,
    Boxes,
    Memories,
    Regions,
    convert,
    copy_boxes,
    copy_transfers,
    region_views,
    select_regions,
    shard_regions,
    target_regions,
    write_boxes,
)
from ._exchange import ExchangePlan, SharedReads, plan_exchange, plan_reads
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
from ._load import LoadPlan, Runs, StoredChunks, Strided, grouped, plan_load, read_rounds, runs_plan
from ._save import held_places, level_writes, main_writes
from ._without_scales import ScaledValues, find_scaled
from .resharding import Origin, Provenance, ReshardPlan, Schedule, Transfers, peak_bytes, plan_reshard, with_relays

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
