"""Running a plan in memory: whole trees from one layout into another, box by box."""

from ._copy import (
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
from ._reshard import SourceTree, TargetTree, agreed_common, complete, join_filled, reshard, take_source, take_target
