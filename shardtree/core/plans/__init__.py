"""Plans: who writes which shard, and which stored bytes go where, as columns. Every rank computes the same plan."""

import typing

from ._save import (
    Holders,
    Line,
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
    from ._convert import convert
    from ._cost import Prospect, ReadCost
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
    from ._without_scales import ScaledValues, find_scaled
else:
    from ..deferred import later

    __getattr__ = later(
        __name__,
        {
            "._convert": "convert",
            "._cost": "Prospect ReadCost",
            "._fit": (
                "Gap Misfit Mismatch Overlap PrefixDifference Refusal Unexpected convertible find_gaps "
                "find_mismatches find_unexpected is_integer misfit_lines overlaps prefix_difference stored_elements "
                "wants_names"
            ),
            "._load": "LoadPlan Runs StoredChunks Strided grouped plan_load read_rounds runs_plan",
            "._without_scales": "ScaledValues find_scaled",
        },
    )
