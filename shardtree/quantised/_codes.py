"""Bits of quantised elements: decoding of FP8, FP4, powers of two and packed integers; encoding of FP8 and FP4."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch

FP8 = torch.float8_e4m3fn
MOST = {FP8: 448.0, "fp4": 6.0}
"""Largest number of each format."""


def floats(tensor: torch.Tensor) -> torch.Tensor:
    """Return FP8 values as float32."""
    if tensor.dtype is not FP8 or not is_plain(tensor):
        return tensor.to(torch.float32)
    # A table, of pairs for rows of even length, is eight times as fast as torch, which converts one by one.
    if tensor.ndim and tensor.stride(-1) == 1 and tensor.shape[-1] % 2 == 0:
        pairs = tensor.view(torch.uint8).numpy().view(np.uint16)
        return torch.from_numpy(_float_pairs().take(pairs)).view(torch.float32)
    return torch.from_numpy(_floats().take(tensor.view(torch.uint8).numpy()))


@cache
def _floats() -> np.ndarray[Any, Any]:
    return torch.arange(256, dtype=torch.uint8, device="cpu").view(FP8).to(torch.float32).numpy()


@cache
def _float_pairs() -> np.ndarray[Any, Any]:
    bytes_of_pairs = np.arange(2**16, dtype=np.uint16).view(np.uint8).reshape(-1, 2)
    return _floats().take(bytes_of_pairs).view(np.float64)[:, 0]


def fours(tensor: torch.Tensor) -> torch.Tensor:
    """Return FP4 values as float32.

    Each byte holds two values, the first one in its low bits. A value has a sign bit, two exponent bits and one bit of
    mantissa.
    """
    if is_plain(tensor):
        return torch.from_numpy(_fours_table().take(tensor.numpy())).view(torch.float32)
    return _fours(tensor)


def _fours(tensor: torch.Tensor) -> torch.Tensor:
    # Arithmetic alone can be traced: the magnitudes are 0, 0.5, 1, 1.5, 2, then 3 and 4, then 6.
    codes = torch.stack([tensor & 15, tensor >> 4], -1).flatten(-2)
    size = (codes & 7).to(torch.float32)
    return (size.clamp(max=4) / 2 + (size - 4).clamp(0, 2) + (size - 6).clamp(min=0) * 2) * (
        1 - (codes & 8).to(torch.float32) / 4
    )


def scales(tensor: torch.Tensor) -> torch.Tensor:
    """Return scales as float32; uint8 scales are decoded as powers of two (E8M0), where 255 is NaN."""
    if tensor.dtype is not torch.uint8:
        return tensor.to(torch.float32)
    # Except for 0 and NaN, the bytes are float32's exponent bits; torch 2.6 has no E8M0 dtype.
    bits = torch.where(tensor == 0, 1 << 22, tensor.to(torch.int32) << 23)
    return torch.where(tensor == 255, 0x7FC00000, bits).view(torch.float32)


def nibbles(*places: int, axis: int = -1, above: int = 0) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that unpacks each int32 into eight 4-bit integers along an axis, as float32.

    Args:
        places: Position of the 4 bits of each of the eight elements, counted in units of 4 bits; 0 is the lowest.
        axis: Axis along which elements are packed, -1 or -2.
        above: Number to add to each integer, modulo 16.
    """

    def unpacked(tensor: torch.Tensor) -> torch.Tensor:
        integers = torch.stack([(tensor >> 4 * place) + above & 15 for place in places], axis)
        return integers.flatten(axis - 1, axis).to(torch.float32)

    return unpacked


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether NumPy may read a tensor's memory; a traced tensor has none."""
    return type(tensor) is torch.Tensor and tensor.device.type == "cpu"


@cache
def _fours_table() -> np.ndarray[Any, Any]:
    return _fours(torch.arange(256, dtype=torch.uint8, device="cpu")[:, None]).view(torch.float64)[:, 0].numpy()


# Encoding: numbers are rounded to nearest, ties to even, without further optimisation.


def nearest_fp8(numbers: torch.Tensor) -> torch.Tensor:
    """Return numbers rounded to the nearest FP8 values; numbers beyond the largest one are clipped to it."""
    return numbers.clamp(-MOST[FP8], MOST[FP8]).to(FP8)


def nearest_fp4(numbers: torch.Tensor) -> torch.Tensor:
    """Return numbers rounded to the nearest FP4 values, two in each byte; numbers beyond FP4's range are clipped."""
    size = numbers.abs().clamp(max=MOST["fp4"])
    # Values are 0.5 apart up to 2, then 1, then 2; a code is even where its mantissa is.
    above = torch.where(size < 4, size.round() + 2, (size / 2).round() + 4)
    codes = torch.where(size < 2, (size * 2).round(), above).to(torch.uint8) | (numbers.signbit().to(torch.uint8) << 3)
    return codes[..., ::2] | (codes[..., 1::2] << 4)


def power_above(numbers: torch.Tensor) -> torch.Tensor:
    """Return each positive number rounded up to a power of two, clipped to the range from 2**-127 to 2**127.

    If such powers are the scales, quantising twice is harmless: the second time, the rounded numbers get the same scale
    or a smaller one, and don't change.
    """
    mantissa, exponent = torch.frexp(numbers)
    return torch.ldexp(torch.ones_like(numbers), (exponent - (mantissa == 0.5).to(exponent.dtype)).clamp(-127, 127))
