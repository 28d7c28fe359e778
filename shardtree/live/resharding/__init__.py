"""Resharding plans: the bytes that move between ranks when tensors change their layout, and their order."""

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
    from ._schedule import Schedule
    from ._summary import Origin, Provenance
    from ._transfers import Transfers
    from ._unshard import unshard
else:
    from ...core.deferred import later

    __getattr__ = later(
        __name__,
        {
            "._copies": (
                "Boxes CARRIERS Memories Regions copy_boxes copy_transfers region_views select_regions shard_regions "
                "target_regions write_boxes"
            ),
            "._in_memory": "reshard",
            "._plan": "ReshardPlan peak_bytes plan_reshard",
            "._relay": "with_relays",
            "._schedule": "Schedule",
            "._summary": "Origin Provenance",
            "._transfers": "Transfers",
            "._unshard": "unshard",
        },
    )
