"""The established forms: FP8, MXFP8, MXFP4, NVFP4, and 4-bit integers of AWQ, GPTQ and compressed-tensors."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

from ._codes import FP8, MOST, floats, fours, nearest_fp4, nearest_fp8, nibbles, power_above, scales
from ._encode import Encode
from ._form import Form
from ._part import Part
from ._products import as_stored, fp8_products

_NUMBERS = (torch.float32, torch.bfloat16, torch.float16)
_POWERS = [torch.float8_e8m0fnu] if hasattr(torch, "float8_e8m0fnu") else []  # torch 2.6 hasn't


def _blocks(matrix: torch.Tensor, block: tuple[int, int], bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return matrices cut into blocks, and the largest magnitude of each block.

    Numbers so large that they could be rounded to infinity are clipped to the largest float32 number with `bits`
    significant bits.

    Args:
        matrix: Matrices (..., rows, columns) of whole blocks.
        block: Numbers of rows and columns of a block; 0 means the whole axis.
        bits: Number of significant bits of the values' format.

    Returns:
        The matrices as (..., blocks down, rows, blocks across, columns), and the magnitudes as (..., blocks down,
        blocks across).
    """
    rows, columns = (side or size for side, size in zip(block, matrix.shape[-2:], strict=True))
    limit = 2.0**128 - 2.0 ** (128 - bits)
    matrix = matrix.clamp(-limit, limit)
    cut = torch.unflatten(torch.unflatten(matrix, -1, (-1, columns)), -3, (-1, rows))
    return cut, cut.abs().amax((-3, -1))


def _whole(cut: torch.Tensor) -> torch.Tensor:
    return cut.flatten(-2).flatten(-3, -2)


def _to_fp8(matrix: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return FP8 values, and scales that map each block's largest magnitude to the largest FP8 number."""
    cut, largest = _blocks(matrix, block, 4)
    # Bit for bit as in transformers: numbers are multiplied by `by`, and its reciprocal is stored.
    by = torch.where(largest > 0, MOST[FP8] / torch.where(largest > 0, largest, 1.0), 1.0)
    by = by.clamp(max=torch.finfo(torch.float32).max)  # for the smallest numbers it would be infinite
    return nearest_fp8(_whole(cut * by[..., :, None, :, None])), 1.0 / by


def _by_powers(matrix: torch.Tensor, block: tuple[int, int], bits: int, most: float) -> tuple[torch.Tensor, ...]:
    """Return matrices with each block divided by its scale, and the scales: powers of two, as small as `most` allows.

    Args:
        matrix: Matrices (..., rows, columns) of whole blocks.
        block: Numbers of rows and columns of a block; 0 means the whole axis.
        bits: Number of significant bits of the values' format.
        most: Upper bound of magnitudes after the division: the format's largest number, or a larger one that is still
            rounded to it.

    Returns:
        The divided matrices, and the scales as (..., blocks down, blocks across).
    """
    cut, largest = _blocks(matrix, block, bits)
    scale = power_above(torch.where(largest > 0, largest, most) / most)
    return _whole(cut / scale[..., :, None, :, None]), scale


def _to_fp8_by_powers(matrix: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return FP8 values, and scales that are powers of two, chosen as in transformers.

    If a dequantised block is quantised again, the products of values and scale stay the same. The values and the scale
    themselves may change: if the block's largest value is 224, half of FP8's largest number, then the values are
    doubled, and the scale is halved.
    """
    numbers, scale = _by_powers(matrix, block, 4, MOST[FP8])
    return nearest_fp8(numbers), scale


def _to_mxfp8(matrix: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    # 464 is halfway from 448, FP8's largest number, to the next one that there would be. So a block's largest number is
    # more than half of 448, before and after it is rounded, and gets the same scale again.
    numbers, scale = _by_powers(matrix, block, 4, 464.0)
    return nearest_fp8(numbers), _exponents(scale)


def _to_mxfp4(matrix: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    numbers, scale = _by_powers(matrix, block, 2, 7.0)
    return torch.unflatten(nearest_fp4(numbers), -1, (-1, 16)), _exponents(scale)


def _exponents(powers: torch.Tensor) -> torch.Tensor:
    """Return powers of two as E8M0 bytes."""
    return (torch.frexp(powers).exponent + 126).to(torch.uint8)


def _grouped_fours(tensor: torch.Tensor) -> torch.Tensor:
    return fours(tensor).flatten(-2)


def _divided(values: torch.Tensor, scale: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    return values * (scale / by)


def _above_zeros(values: torch.Tensor, scale: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
    return (values - zeros) * scale


def _of_groups(values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """Return weights dequantised with the scale and zero point of each row's group; rows of a group may lie anywhere.

    Args:
        values: Integers, (..., rows, columns).
        scales: Scale of each group and column, (..., groups, columns).
        zeros: Zero point of each group and column, (..., groups, columns).
        groups: Index of each row's group, (..., rows, 1).
    """
    return _above_zeros(values, _picked(scales, groups), _picked(zeros, groups))


def _picked(table: torch.Tensor, groups: torch.Tensor, first: int = 0) -> torch.Tensor:
    """Look up rows of a table by group index.

    Args:
        table: One row for each group, (..., groups, columns).
        groups: Group indices to look up, (..., rows, 1).
        first: Group index of the table's first row.
    """
    half = table.shape[-2] // 2
    if type(groups) is torch.Tensor or not half:
        return table if not half else torch.take_along_dim(table, groups, -2)
    # Traced groups aren't known, so each element selects its own.
    before, after = table[..., :half, :], table[..., half:, :]
    middle = first + half
    return torch.where(groups < middle, _picked(before, groups, first), _picked(after, groups, middle))


def _in_groups(values: torch.Tensor, scale: torch.Tensor, zeros: torch.Tensor, away: torch.Tensor) -> torch.Tensor:
    """Return weights dequantised in groups of consecutive rows; rows that are stored in another group become NaN.

    An error would be clearer than NaN, but a traced function can't raise one.

    Args:
        values: Integers, (..., rows, columns).
        scale: Scale of each integer; an axis may have size 1 and broadcast.
        zeros: Zero point of each integer; an axis may have size 1 and broadcast.
        away: Stored group index of each row minus the expected index, (..., rows, 1).
    """
    return torch.where(away == 0, _above_zeros(values, scale, zeros), float("nan"))


def _above_eight(values: torch.Tensor, scale: torch.Tensor, away: torch.Tensor) -> torch.Tensor:
    return _of_shape((values - 8) * scale, away)


def _packed_zeros(values: torch.Tensor, scale: torch.Tensor, away: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
    return _of_shape(_above_zeros(values, scale, zeros), away)


def _of_shape(weight: torch.Tensor, away: torch.Tensor) -> torch.Tensor:
    """Return a weight unchanged if the shape stored beside it is right; otherwise, replace all elements by NaN.

    An error would be clearer than NaN, but a traced function can't raise one.

    Args:
        weight: Dequantised weight.
        away: Stored numbers of rows and columns minus those of the weight, (2,).
    """
    return torch.where((away[:1] == 0) & (away[1:] == 0), weight, float("nan"))


def _fp8(name: str, scale: str, dtypes: tuple[torch.dtype, ...], block: tuple[int, int], encode: Encode) -> Form:
    parts = (Part("", (FP8,), as_stored), Part(scale, dtypes, scales, per=block))
    return Form(name, parts, block=block, join=fp8_products, encode=encode)


_ORDER = nibbles(0, 4, 1, 5, 2, 6, 3, 7)
_STRAIGHT, _STACKED = nibbles(*range(8)), nibbles(*range(8), axis=-2)
_MXFP4 = (
    Part("_blocks", (torch.uint8,), _grouped_fours, pack=(1, 32), tail=(16,)),
    Part("_scales", (torch.uint8,), scales, per=(1, 32)),
)
_NVFP4 = (
    Part("", (torch.uint8,), fours, pack=(1, 2)),
    Part("_scale", (FP8,), floats, per=(1, 16)),
    Part("_scale_2", (torch.float32,), scales, per=None),
)
_AWQ = (
    Part("qweight", (torch.int32,), _ORDER, pack=(1, 8)),
    Part("scales", (torch.float16, torch.bfloat16), scales, per=(128, 1)),
    Part("qzeros", (torch.int32,), _ORDER, per=(128, 1), pack=(1, 8)),
)
_PACKED_NVFP4 = (
    Part("weight_packed", (torch.uint8,), fours, pack=(1, 2)),
    Part("weight_scale", (FP8,), floats, per=(1, 16)),
    Part("weight_global_scale", (torch.float32,), scales, per=None, tail=(1,)),
)
_PACKED_MXFP4 = (
    Part("weight_packed", (torch.uint8,), fours, pack=(1, 2)),
    Part("weight_scale", (torch.uint8, *_POWERS), scales, per=(1, 32)),
)


def _fp8_tensor(name: str, tail: tuple[int, ...]) -> Form:
    """Return the form of FP8 weights that have one scale for all elements; `tail` is the scale's shape."""
    parts = (Part("", (FP8,), as_stored), Part("_scale", _NUMBERS, scales, per=None, tail=tail))
    return Form(name, parts, block=(0, 0), join=fp8_products)


def _int4(name: str, columns: int, *, zeros: bool) -> Form:
    """Return a form of compressed-tensors' 4-bit integers.

    Integers and zero points are stored with 8 added.

    Args:
        name: Name of the form.
        columns: Number of consecutive columns that share one scale; 0 means the whole row.
        zeros: Whether there are zero points. If so, those of eight rows are packed into one stored element.
    """
    per = (1, columns)
    parts = (
        Part("weight_packed", (torch.int32,), _STRAIGHT, pack=(1, 8)),
        Part("weight_scale", (torch.bfloat16, torch.float16, torch.float32), scales, per=per),
        Part("weight_shape", (torch.int64, torch.int32), torch.Tensor.long, per=None, tail=(2,), shape=(0, 0)),
    )
    if zeros:
        last = Part("weight_zero_point", (torch.int32,), _STACKED, per=per, pack=(8, 1))
        return Form(name, (*parts, last), "weight", block=per, join=_packed_zeros, without=("weight_g_idx",))
    others = ("weight_zero_point", "weight_g_idx")
    return Form(name, parts, "weight", block=per, join=_above_eight, without=others)


def _gptq(name: str, above: int, *, in_order: bool) -> Form:
    """Return a form of GPTQ's 4-bit integers, with groups of 128 rows.

    Args:
        name: Name of the form.
        above: Number to add to each stored zero point.
        in_order: Whether each group has consecutive rows; otherwise, rows may belong to any group (`desc_act`).
    """
    per = (128 if in_order else -128, 1)
    parts = (
        Part("qweight", (torch.int32,), _STACKED, pack=(8, 1)),
        Part("scales", (torch.float16, torch.bfloat16), scales, per=per),
        Part("qzeros", (torch.int32,), nibbles(*range(8), above=above), per=per, pack=(1, 8)),
        Part("g_idx", (torch.int32,), torch.Tensor.long, per=(1,), group=per[0]),
    )
    join = _in_groups if in_order else _of_groups
    return Form(name, parts, base="weight", is_turned=True, block=(128, 1), join=join)


# Among forms with equal names, the most common is last: its blocks are named in the error if none fits.
_ALL = (
    _fp8("fp8_blocks", "_scale_inv", _NUMBERS, (128, 128), _to_fp8),
    *(_fp8("fp8_blocks_ue8m0", "_scale_inv", (dtype,), (128, 128), _to_fp8_by_powers) for dtype in _POWERS),
    _fp8_tensor("fp8_tensor", ()),
    _fp8_tensor("fp8_tensor_1", (1,)),
    _fp8("fp8_rows", "_scale", _NUMBERS, (1, 0), _to_fp8),
    _fp8("fp8_blocks_scale", "_scale", _NUMBERS, (128, 128), _to_fp8),
    _fp8("mxfp8", "_scale_inv", (torch.uint8, *_POWERS), (1, 32), _to_mxfp8),
    Form("mxfp4", _MXFP4, is_turned=True, block=(1, 32), encode=_to_mxfp4),
    Form("nvfp4", _NVFP4, block=(1, 16)),
    Form("awq", _AWQ, base="weight", is_turned=True, block=(128, 1), join=_above_zeros),
    Form("nvfp4_packed", _PACKED_NVFP4, base="weight", block=(1, 16), join=_divided),
    Form("mxfp4_packed", _PACKED_MXFP4, base="weight", block=(1, 32)),
    _int4("int4_packed_rows", 0, zeros=False),
    _int4("int4_packed", 128, zeros=False),
    _int4("int4_packed_rows_zeros", 0, zeros=True),
    _int4("int4_packed_zeros", 128, zeros=True),
    _gptq("gptq", 1, in_order=False),
    _gptq("gptq_v2", 0, in_order=False),
    _gptq("gptq_in_order", 1, in_order=True),
    _gptq("gptq_v2_in_order", 0, in_order=True),
)
FORMS: Mapping[str, Form] = MappingProxyType({form.name: form for form in _ALL})
"""The established forms of quantised weights, by name.

``fp8_blocks`` and ``fp8_blocks_ue8m0`` (whose scales are powers of two) have blocks of 128 x 128; ``fp8_rows`` has one
scale per row. ``mxfp8``, ``mxfp4`` (gpt-oss's) and ``nvfp4`` (ModelOpt's) have one scale per 32, 32 and 16 elements of
a row. ``awq`` and ``gptq`` have groups of 128 rows of packed integers, ``gptq`` with rows in any order; ``gptq_v2``
stores zero points as they are, and ``gptq`` stores them minus 1. ``gptq_in_order`` and ``gptq_v2_in_order`` are for
files without the order of activations, where each box needs only its own scales. ``nvfp4_packed``, ``mxfp4_packed`` and
``int4_packed`` are compressed-tensors', the last with groups of 128 elements of a row; ``int4_packed_rows`` has one
scale per row, and both have forms with zero points. ``fp8_blocks_scale`` is FP8 by blocks, with compressed-tensors'
names; ``fp8_tensor`` and ``fp8_tensor_1`` have one scale for the whole tensor, with no axis or one.
"""
