"""The fewest bytes that any plan can move between two layouts."""

from __future__ import annotations

import numpy as np

from ...geometry import volumes
from ...layouts import ShardColumns
from ._pieces import NOWHERE, Pieces, carved_pieces, rank_groups, repeat_routes, wanted_by
from ._places import find_holdings, find_places, place_boxes


def least_bytes(source: ShardColumns, target: ShardColumns) -> int:
    """Return the bytes of all elements that a rank holds after and not before, each counted once for each such rank.

    Args:
        source: the shards of all ranks before, of as many axes as the target.
        target: the shards of all ranks after; all its keys are the source's too.
    """
    boxes = place_boxes(target)
    asked = Pieces(boxes.shard, np.full(boxes.shard.size, NOWHERE), boxes.offset, boxes.shape)
    _, wanted = repeat_routes(target, asked)
    places = find_places(source, target)
    held = find_holdings(places, np.ones(len(places.main), dtype=np.bool_))
    _, _, lacking = carved_pieces(wanted, wanted_by(target, wanted), held.boxes, rank_groups(held.key, held.rank))
    return int((volumes(lacking.shape) * target.item_size[target.key[lacking.target]]).sum())
