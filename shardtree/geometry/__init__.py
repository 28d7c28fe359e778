"""Geometry of boxes, flat ranges and overlaps, as columns of int64, without any notion of tensors or keys."""

from ._boxes import (
    Column,
    Mask,
    as_int64,
    begins,
    box_column,
    box_slices,
    check_type,
    distinct,
    flat_range,
    group_sums,
    integer,
    integers,
    intersect,
    joined_rows,
    narrowed,
    refuse,
    row_major_strides,
    row_numbers,
    rows_of,
    span_numbers,
    volumes,
    widen,
)
from ._carve import Cuts, aligned_boxes, carve_boxes, first_rows, flat_boxes, grid_cells
from ._coverage import coverage_faults, shared_groups, tiled_groups
from ._grid import (
    Box,
    Spans,
    box_shape,
    cell_index,
    cell_shape,
    check_box,
    check_cell,
    check_flat_range,
    check_lengths,
    check_ranks,
    cut_spans,
    grid_cell,
    narrow_axis,
    narrow_flat_range,
    narrow_place,
    slabs,
    slices,
    tiles,
)
from ._pairs import overlapping_pairs, reach_of, rows_in_reach
