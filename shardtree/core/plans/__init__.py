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
    from ._without_scales import ScaledValues, find_scaled
else:
    from ..deferred import later

    __getattr__ = later(
        __name__,
        {
            "Explanation": "._explain",
            "FailedCheck": "._explain",
            "Gap": "._fit",
            "LoadPlan": "._load",
            "Misfit": "._fit",
            "Mismatch": "._fit",
            "Overlap": "._fit",
            "PrefixDifference": "._fit",
            "Prospect": "._explain",
            "RankReads": "._explain",
            "ReadCost": "._explain",
            "Refusal": "._fit",
            "Runs": "._load",
            "ScaledValues": "._without_scales",
            "StoredChunks": "._load",
            "Strided": "._load",
            "Undecided": "._explain",
            "Unexpected": "._fit",
            "convert": "._convert",
            "convertible": "._fit",
            "find_gaps": "._fit",
            "find_mismatches": "._fit",
            "find_scaled": "._without_scales",
            "find_unexpected": "._fit",
            "grouped": "._load",
            "is_integer": "._fit",
            "misfit_lines": "._fit",
            "overlaps": "._fit",
            "plan_load": "._load",
            "prefix_difference": "._fit",
            "read_rounds": "._load",
            "runs_plan": "._load",
            "stored_elements": "._fit",
            "wants_names": "._fit",
        },
    )
