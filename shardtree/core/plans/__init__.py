"""Plans of saves and loads: the rank that writes each shard, and the destination of stored bytes.

Shards and plans are columns, numpy arrays with a row for each item. From equal columns, every rank computes the same
plan.
"""

import typing

from ._save import (
    HeldLine,
    Holders,
    Parts,
    deal_out,
    find_holders,
    held_places,
    holder_sets,
    level_writes,
    main_writes,
    snap,
)

if typing.TYPE_CHECKING:
    from ._convert import convert, convertible, is_integer
    from ._cost import Prospect, ReadCost
    from ._fit import Overlap, find_gaps, find_mismatches, find_unexpected, overlaps, stored_elements
    from ._load import LoadPlan, Runs, StoredChunks, Strided, grouped, plan_load, read_rounds, runs_plan
    from ._misfits import (
        Gap,
        Misfit,
        Mismatch,
        PrefixDifference,
        Refusal,
        Unexpected,
        prefix_difference,
        with_prefixes,
    )
    from ._without_scales import ScaledValues, find_scaled
else:
    from ..deferred import later

    __getattr__ = later(
        __name__,
        {
            "._convert": "convert convertible is_integer",
            "._cost": "Prospect ReadCost",
            "._fit": "Overlap find_gaps find_mismatches find_unexpected overlaps stored_elements",
            "._load": "LoadPlan Runs StoredChunks Strided grouped plan_load read_rounds runs_plan",
            "._misfits": "Gap Misfit Mismatch PrefixDifference Refusal Unexpected prefix_difference with_prefixes",
            "._without_scales": "ScaledValues find_scaled",
        },
    )
