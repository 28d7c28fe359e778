"""Resharding plans: which bytes go from which rank to which, in which order, when tensors change their layout."""

import typing

if typing.TYPE_CHECKING:
    from ._copies import (
        CARRIERS,
        Boxes,
        Memories,
        Regions,
        copy_boxes,
        copy_transfers,
        region_views,
        select_regions,
        shard_regions,
        target_regions,
        write_boxes,
    )
    from ._in_memory import reshard
    from ._plan import ReshardPlan, peak_bytes, plan_reshard
    from ._relay import with_relays
    from ._schedule import BYTES_IN_FLIGHT, Schedule
    from ._summary import Origin, Provenance
    from ._transfers import Transfers
    from ._unshard import unshard
else:
    from ...core.deferred import later

    __getattr__ = later(
        __name__,
        {
            "BYTES_IN_FLIGHT": "._schedule",
            "Boxes": "._copies",
            "CARRIERS": "._copies",
            "Memories": "._copies",
            "Origin": "._summary",
            "Provenance": "._summary",
            "Regions": "._copies",
            "ReshardPlan": "._plan",
            "Schedule": "._schedule",
            "Transfers": "._transfers",
            "copy_boxes": "._copies",
            "copy_transfers": "._copies",
            "peak_bytes": "._plan",
            "plan_reshard": "._plan",
            "region_views": "._copies",
            "reshard": "._in_memory",
            "select_regions": "._copies",
            "shard_regions": "._copies",
            "target_regions": "._copies",
            "unshard": "._unshard",
            "with_relays": "._relay",
            "write_boxes": "._copies",
        },
    )
