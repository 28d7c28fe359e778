"""Boxes, flat ranges and overlaps as columns of int64: geometry that knows nothing of tensors or keys."""

from ._boxes import Column as Column
from ._boxes import box_column as box_column
from ._boxes import intersect as intersect
from ._boxes import row_major_strides as row_major_strides
from ._boxes import volumes as volumes
from ._boxes import widen as widen
from ._flat import flat_boxes as flat_boxes
from ._pairs import overlapping_pairs as overlapping_pairs
