"""Dtypes as names, tags and bits."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from shardtree.core.codec import (
    bit_view,
    byte_buffer,
    check_storable,
    dtype_from_name,
    dtype_from_tag,
    dtype_name,
    format_tag,
    is_tagged,
    kind_from_file,
    kind_in_file,
    row_major_bits,
)
from shardtree.core.codec._header import byte_length
from shardtree.errors import MetadataError, UnsupportedValue

DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
QUANTISED = [dtype for dtype in DTYPES if str(dtype).startswith(("torch.qint", "torch.quint"))]
STORABLE = [dtype for dtype in DTYPES if dtype not in QUANTISED]
VARIANTS = {
    "matrix": lambda base: base,
    "transposed": lambda base: base.t(),
    "strided": lambda base: base[::2],
    "column": lambda base: base[:, 1],
    "expanded": lambda base: base[:1].expand(3, 2),
    "0-dim": lambda base: base[0, 1],
    "empty": lambda base: base[:0],
}


def example(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(96, dtype=torch.uint8).view(dtype).reshape(-1, 2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_name_is_invertible(dtype: torch.dtype) -> None:
    assert dtype_from_name(dtype_name(dtype)) is dtype


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tag_is_invertible_where_the_format_has_one(dtype: torch.dtype) -> None:
    if is_tagged(dtype):
        assert dtype_from_tag(format_tag(dtype)) is dtype
    else:
        assert format_tag(dtype) == "U8"


@pytest.mark.parametrize("shape", [(), (3,), (4, 1), (2, 3, 5), (0, 3), (3, 0)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kind_in_a_file_is_invertible_and_has_the_bytes_of_the_tensor(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    kind = kind_in_file(dtype, shape)
    are_pairs = "float4" in str(dtype)
    assert (kind is not None) is (is_tagged(dtype) or (are_pairs and shape != ()))
    if kind is not None:
        assert kind_from_file(*kind) == (dtype, shape)
        assert byte_length(*kind) == math.prod(shape) * dtype.itemsize
        assert kind == (("F4", (*shape[:-1], 2 * shape[-1])) if are_pairs else (format_tag(dtype), shape))


@pytest.mark.parametrize("shape", [(), (3,), (4, 1), (0, 3)], ids=str)
def test_four_bit_floats_that_are_no_pairs_along_the_last_axis_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(UnsupportedValue, match="an even length"):
        kind_from_file("F4", shape)


@pytest.mark.parametrize("tag", ["F6_E2M3", "F6_E3M2", "F128"])
def test_tags_that_torch_lacks_are_named(tag: str) -> None:
    with pytest.raises(UnsupportedValue, match=f"no dtype for the safetensors tag '{tag}'"):
        kind_from_file(tag, (4,))


@pytest.mark.parametrize("dtype", STORABLE, ids=str)
def test_bit_view_shares_memory_and_is_invertible(dtype: torch.dtype) -> None:
    tensor = example(dtype)
    bits = bit_view(tensor)
    assert bits.data_ptr() == tensor.data_ptr()
    assert bits.tolist() == list(range(96))
    assert bits.view(dtype).reshape(tensor.shape).dtype is dtype
    assert not bit_view(torch.ones(2, requires_grad=True)).requires_grad
    assert bit_view(tensor[:0]).shape == (0,)
    assert bit_view(tensor[0, 0]).shape == (dtype.itemsize,)


CONTIGUOUS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "as it is": lambda tensor: tensor,
    "flat": lambda tensor: tensor.view(-1),
    "no elements": lambda tensor: tensor[:0],
    "one element": lambda tensor: tensor[0, 0],
    "one element of any stride": lambda tensor: tensor.as_strided((1, 1), (3, 5)),
    "a last axis of any stride": lambda tensor: tensor.view(-1).as_strided((2, 1), (1, 7)),
    "more axes than NumPy has": lambda tensor: tensor.view(-1)[: 8 // tensor.itemsize].view(*[1] * 70, -1),
    "an empty axis in the middle": lambda tensor: tensor.view(-1)[:0].view(2, 0, 3),
}


def is_the_memory(buffer_of: Callable[[torch.Tensor], memoryview], tensor: torch.Tensor) -> bool:
    """Return whether a buffer has a tensor's bytes, and what is written to it is the tensor's."""
    bits, buffer = bit_view(tensor), buffer_of(tensor)
    same = (buffer.ndim, buffer.itemsize, buffer.tolist()) == (1, 1, bits.tolist())
    if bits.numel():
        buffer[-1] = 255 - buffer[-1]
    return same and buffer.tolist() == bits.tolist()


@pytest.mark.parametrize("dtype", STORABLE, ids=str)
def test_byte_buffer_is_the_memory_of_bit_view(dtype: torch.dtype) -> None:
    assert [name for name, view in CONTIGUOUS.items() if not is_the_memory(byte_buffer, view(example(dtype)))] == []


def test_the_law_catches_a_buffer_of_a_copy() -> None:
    assert not is_the_memory(lambda tensor: memoryview(bytearray(byte_buffer(tensor))), example(torch.int16))


def test_byte_buffer_is_detached() -> None:
    assert byte_buffer(torch.ones(2, 3, requires_grad=True)).nbytes == 24


@pytest.mark.parametrize("dtype", STORABLE, ids=str)
def test_row_major_bits_are_those_of_the_elements_in_order(dtype: torch.dtype) -> None:
    assert [variant for variant in VARIANTS if not is_row_major(row_major_bits, dtype, variant)] == []


def is_row_major(bits_of: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype, variant: str) -> bool:
    # The same view of a table of numbers says which element stands where, whatever the dtype.
    tensor = VARIANTS[variant](example(dtype))
    index = VARIANTS[variant](torch.arange(96 // dtype.itemsize).reshape(-1, 2))
    expected = [first * dtype.itemsize + byte for first in index.flatten().tolist() for byte in range(dtype.itemsize)]
    return bits_of(tensor).tolist() == expected


def test_row_major_bits_resolve_what_is_lazy() -> None:
    tensor = torch.tensor([1 + 2j, 3 - 4j])
    assert row_major_bits(tensor.conj()).view(torch.complex64).tolist() == [1 - 2j, 3 + 4j]
    assert row_major_bits(tensor.conj().imag).view(torch.float32).tolist() == [-2.0, 4.0]


@pytest.mark.parametrize(
    ("tensor", "fix"),
    [
        (torch.ones(2, 3).t(), ".contiguous()"),
        (torch.ones(2, dtype=torch.complex64).conj(), ".resolve_conj()"),
        (torch.ones(2, dtype=torch.complex64).conj().imag.clone()._neg_view(), ".resolve_neg()"),
        (torch.ones(2, device="meta"), ".cpu()"),
        (torch.eye(2).to_sparse(), ".to_dense()"),
    ],
)
def test_bit_view_says_what_to_call(tensor: torch.Tensor, fix: str) -> None:
    for view in (bit_view, byte_buffer):
        with pytest.raises(MetadataError, match=rf"call \{fix[:-2]}"):
            view(tensor)


@pytest.mark.parametrize("dtype", QUANTISED, ids=str)
def test_quantised_dtypes_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(UnsupportedValue, match=r"'w': quantised(.|\n)*int_repr"):
        check_storable(dtype, "'w'")


def test_unknown_names_are_refused() -> None:
    with pytest.raises(UnsupportedValue, match="no dtype named 'float'"):
        dtype_from_name("float")
    with pytest.raises(UnsupportedValue, match="tag 'F6_E2M3'"):
        dtype_from_tag("F6_E2M3")
