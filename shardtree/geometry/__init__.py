"""Boxes, flat ranges and overlaps as columns of int64: geometry that knows nothing of tensors or keys."""

from ._boxes import Column as Column
from ._boxes import box_column as box_column
from ._boxes import intersect as intersect
from ._boxes import row_major_strides as row_major_strides
from ._boxes import volumes as volumes
from ._boxes import widen as widen
from ._flat import flat_boxes as flat_boxes
from ._grid import cell_index as cell_index
from ._grid import cell_shape as cell_shape
from ._grid import check_box as check_box
from ._grid import check_cell as check_cell
from ._grid import check_flat_range as check_flat_range
from ._grid import check_lengths as check_lengths
from ._grid import check_ranks as check_ranks
from ._grid import grid_cell as grid_cell
from ._grid import narrow_axis as narrow_axis
from ._grid import narrow_place as narrow_place
from ._narrow import narrow_flat_range as narrow_flat_range
from ._numbers import flat_range as flat_range
from ._numbers import integer as integer
from ._numbers import integers as integers
from ._numbers import refuse as refuse
from ._pairs import overlapping_pairs as overlapping_pairs
