"""Resharding plans: which bytes go from which rank to which, in which order, when tensors change their layout."""

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
from ._plan import ReshardPlan, peak_bytes, plan_reshard
from ._relay import with_relays
from ._schedule import BYTES_IN_FLIGHT, Schedule
from ._summary import Origin, Provenance
from ._transfers import Transfers
