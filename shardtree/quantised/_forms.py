"""The forms of the field: FP8 by blocks and rows, MXFP8, MXFP4, NVFP4, and integers of 4 bits."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

from ._codes import FP8, MOST, floats, fours, nearest_fp4, nearest_fp8, nibbles, power_above, scales
from ._encode import Encode
from ._form import Form
from ._part import Part

_NUMBERS = (torch.float32, torch.bfloat16, torch.float16)
_POWERS = getattr(torch, "float8_e8m0fnu", torch.uint8)  # torch 2.6 hasn't


def _blocks(matrix: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return matrices as (..., blocks, rows, blocks, columns), and the largest size of each block; 0 is all of them."""
    rows, columns = (each or size for each, size in zip(block, matrix.shape[-2:], strict=True))
    cut = torch.unflatten(torch.unflatten(matrix, -1, (-1, columns)), -3, (-1, rows))
    return cut, cut.abs().amax((-3, -1))


def _whole(cut: torch.Tensor) -> torch.Tensor:
    return cut.flatten(-2).flatten(-3, -2)


def _to_fp8(matrix: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return FP8 values, and scales by which the largest of a block is the largest of FP8."""
    cut, largest = _blocks(matrix, block)
    # As transformers computes it, bit for bit: what values are multiplied by, and the reciprocal of that.
    by = torch.where(largest > 0, MOST[FP8] / torch.where(largest > 0, largest, 1.0), 1.0)
    by = by.clamp(max=torch.finfo(torch.float32).max)  # of the smallest numbers it would be infinite
    return nearest_fp8(_whole(cut * by[..., :, None, :, None])), 1.0 / by


def _to_fp8_by_powers(matrix: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return FP8 values, and scales that are powers of two."""
    cut, largest = _blocks(matrix, block)
    scale = power_above(torch.where(largest > 0, largest, MOST[FP8]) / MOST[FP8])
    return nearest_fp8(_whole(cut / scale[..., :, None, :, None])), scale


def _to_mxfp8(matrix: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    values, scale = _to_fp8_by_powers(matrix, block)
    return values, _exponents(scale)


def _to_mxfp4(matrix: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    cut, largest = _blocks(matrix, block)
    scale = power_above(torch.where(largest > 0, largest, MOST["fp4"]) / MOST["fp4"])
    codes = nearest_fp4(_whole(cut / scale[..., :, None, :, None]))
    return torch.unflatten(codes, -1, (-1, 16)), _exponents(scale)


def _exponents(powers: torch.Tensor) -> torch.Tensor:
    """Return powers of two as bytes."""
    return powers.to(_POWERS).view(torch.uint8)


def _grouped_fours(tensor: torch.Tensor) -> torch.Tensor:
    return fours(tensor).flatten(-2)


def _above_zeros(values: torch.Tensor, scale: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
    return (values - zeros) * scale


def _fp8(name: str, scale: str, dtypes: tuple[torch.dtype, ...], block: tuple[int, int], encode: Encode) -> Form:
    parts = (Part("", (FP8,), floats), Part(scale, dtypes, scales, per=block))
    return Form(name, parts, block=block, encode=encode)


_ORDER = nibbles(0, 4, 1, 5, 2, 6, 3, 7)
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
_KNOWN = (
    _fp8("fp8_blocks", "_scale_inv", _NUMBERS, (128, 128), _to_fp8),
    _fp8("fp8_blocks_ue8m0", "_scale_inv", (_POWERS,), (128, 128), _to_fp8_by_powers),
    _fp8("fp8_rows", "_scale", _NUMBERS, (1, 0), _to_fp8),
    _fp8("mxfp8", "_scale_inv", (torch.uint8, _POWERS), (1, 32), _to_mxfp8),
    Form("mxfp4", _MXFP4, is_turned=True, block=(1, 32), encode=_to_mxfp4),
    Form("nvfp4", _NVFP4, block=(1, 16)),
    Form("awq", _AWQ, base="weight", is_turned=True, block=(128, 1), join=_above_zeros),
)
FORMS: Mapping[str, Form] = MappingProxyType({form.name: form for form in _KNOWN})
"""The forms that checkpoints of the field have, by name.

``fp8_blocks`` and ``fp8_blocks_ue8m0`` (whose scales are powers of two) have blocks of 128 x 128, ``fp8_rows`` a scale
a row; ``mxfp8``, ``mxfp4`` (gpt-oss's) and ``nvfp4`` (ModelOpt's) have 32, 32 and 16 elements of a row to a scale;
``awq`` has groups of 128 rows of packed integers.
"""
