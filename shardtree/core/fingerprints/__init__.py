"""Fingerprints: one number for each tensor, a sum over its elements that doesn't depend on their distribution to ranks.

The number depends on key, dtype, global shape and the elements' bits, so that it is the same in every layout and
format. docs/checks.md defines it to the bit.
"""

from ._parts import (
    PIECE,
    ShardPiece,
    box_pieces,
    box_total,
    bytes_total,
    piece_total,
    run_pieces,
    run_total,
    shard_pieces,
)
from ._sums import axis_weights, device_total, host_total
from ._tensors import (
    PartialFingerprint,
    add_fingerprints,
    box_part,
    column_parts,
    main_shards,
    partial_fingerprints,
    shard_parts,
    shard_totals,
    tensor_fingerprint,
    unlike_replicas,
)
