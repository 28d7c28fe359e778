"""Fingerprints: one number for each tensor, a sum over its elements, independent of which rank holds which.

The number depends on key, dtype, global shape and the elements' bits, so that it is the same in every layout and
format. docs/fingerprints.md defines it to the bit.
"""

from ._parts import PIECE as PIECE
from ._parts import ShardPiece as ShardPiece
from ._parts import box_total as box_total
from ._parts import piece_total as piece_total
from ._parts import run_pieces as run_pieces
from ._parts import run_total as run_total
from ._parts import shard_pieces as shard_pieces
from ._sums import axis_weights as axis_weights
from ._sums import device_total as device_total
from ._sums import host_total as host_total
from ._tensors import PartialFingerprint as PartialFingerprint
from ._tensors import add_fingerprints as add_fingerprints
from ._tensors import column_parts as column_parts
from ._tensors import main_shards as main_shards
from ._tensors import partial_fingerprints as partial_fingerprints
from ._tensors import replica_problems as replica_problems
from ._tensors import shard_parts as shard_parts
from ._tensors import shard_totals as shard_totals
from ._tensors import tensor_fingerprint as tensor_fingerprint

__all__ = [
    "PartialFingerprint",
    "add_fingerprints",
    "partial_fingerprints",
]
