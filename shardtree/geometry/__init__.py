"""Geometry of boxes, flat ranges and overlaps, as columns of int64, without any notion of tensors or keys."""

from ._boxes import (
    Column,
    as_int64,
    begins,
    box_column,
    box_slices,
    distinct,
    flat_boxes,
    intersect,
    joined_rows,
    narrow_flat_range,
    narrowed,
    row_major_strides,
    row_numbers,
    rows_of,
    volumes,
    widen,
)
from ._carve import Carved, carve_boxes, shared_groups
from ._coverage import coverage_faults, held_elements, overlapping_groups, tiled_groups
from ._grid import (
    Spans,
    cell_index,
    cell_shape,
    check_box,
    check_cell,
    check_flat_range,
    check_lengths,
    check_ranks,
    check_type,
    cut_spans,
    flat_range,
    grid_cell,
    integer,
    integers,
    narrow_axis,
    narrow_place,
    refuse,
    slabs,
    slices,
)
from ._pairs import overlapping_pairs, reach_of, rows_in_reach
