"""Torch dtypes: their names and safetensors tags, and the bits of tensors."""

from __future__ import annotations

from contextlib import suppress

import torch

from ...errors import MetadataError, UnsupportedValue, error_text
from ..lazy import INTEGERS, as_integers, flat_bytes

# The table has all dtypes of this torch, since torch adds dtypes faster than formats add versions. Each dtype is listed
# by the name that it prints, and aliases aren't: torch.half prints as float16.
_BY_NAME: dict[str, torch.dtype] = {
    str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)
}
_NAMES = {dtype: name for name, dtype in _BY_NAME.items()}

_TAGS_BY_NAME = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "complex64": "C64",
}
_TAGS = {_BY_NAME[name]: tag for name, tag in _TAGS_BY_NAME.items() if name in _BY_NAME}
_BY_TAG = {tag: dtype for dtype, tag in _TAGS.items()}

# Dtypes of two values in a byte: an element in torch is a pair, while safetensors headers count values.
_PAIR_TAGS = {_BY_NAME[name]: tag for name, tag in {"float4_e2m1fn_x2": "F4"}.items() if name in _BY_NAME}
_PAIRS_BY_TAG = {tag: dtype for dtype, tag in _PAIR_TAGS.items()}

_QUANTISED_DTYPES = frozenset(
    _BY_NAME[name] for name in ("qint8", "quint8", "qint32", "quint4x2", "quint2x4") if name in _BY_NAME
)


# Dtypes that NumPy and memoryview support; other tagged dtypes are viewed as integers of their size.
_IN_NUMPY = (torch.float32, torch.float64, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_VIEWED_AS = {dtype: INTEGERS[dtype.itemsize] for dtype in _TAGS} | {dtype: dtype for dtype in _IN_NUMPY}


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's own name in torch, without the module.

    Examples:
        >>> dtype_name(torch.bfloat16), dtype_name(torch.half)
        ('bfloat16', 'float16')
    """
    return _NAMES[dtype]


def dtype_from_name(name: str) -> torch.dtype:
    """Return the dtype with a name, the inverse of `dtype_name`.

    Raises:
        UnsupportedValue: This torch has no dtype of that name.

    Examples:
        >>> dtype_from_name("bfloat16")
        torch.bfloat16
    """
    try:
        return _BY_NAME[name]
    except KeyError:
        heading = f"dtype: torch {torch.__version__} has no dtype named {name[:100]!r}"
        raise UnsupportedValue(error_text(heading, fix="Use a torch that has it, or cast before saving.")) from None


def format_tag(dtype: torch.dtype) -> str:
    """Return a dtype's safetensors tag; `"U8"` (plain bytes) for a dtype without one, or one that packs two values.

    Examples:
        >>> format_tag(torch.bfloat16), format_tag(torch.complex128)
        ('BF16', 'U8')
    """
    return _TAGS.get(dtype, "U8")


def is_tagged(dtype: torch.dtype) -> bool:
    """Return whether a dtype has a safetensors tag; dtypes that pack two values in an element don't count.

    Examples:
        >>> is_tagged(torch.uint8), is_tagged(torch.complex128)
        (True, False)
    """
    return dtype in _TAGS


def dtype_from_tag(tag: str) -> torch.dtype:
    """Return the dtype of a safetensors tag, the inverse of `format_tag` on the dtypes that have a tag.

    Raises:
        UnsupportedValue: This torch has no dtype for the tag, such as the tag of a 6-bit float.

    Examples:
        >>> dtype_from_tag("BF16")
        torch.bfloat16
    """
    try:
        return _BY_TAG[tag]
    except KeyError:
        heading = f"dtype: torch {torch.__version__} has no dtype for the safetensors tag {tag[:100]!r}"
        raise UnsupportedValue(error_text(heading, fix="Use a torch that has it.")) from None


def kind_in_file(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]] | None:
    """Return the tag and shape that safetensors' library writes for a tensor, or None if it can't.

    The tag is that of `format_tag`, except that 4-bit floats have a tag of their own. Torch counts 4-bit floats in
    pairs, while a header counts single values, so the last axis is twice as long in the header.

    Examples:
        >>> kind_in_file(torch.bfloat16, (2, 3)), kind_in_file(torch.complex128, (2, 3))
        (('BF16', (2, 3)), None)
        >>> kind_in_file(*kind_from_file("F4", (2, 6)))
        ('F4', (2, 6))
    """
    if dtype in _PAIR_TAGS:  # without an axis, a header can't count the two values of a pair
        return (_PAIR_TAGS[dtype], (*shape[:-1], 2 * shape[-1])) if shape else None
    return (_TAGS[dtype], shape) if dtype in _TAGS else None


def kind_from_file(tag: str, shape: tuple[int, ...]) -> tuple[torch.dtype, tuple[int, ...]]:
    """Return the dtype and shape in torch of a tensor in a safetensors file, the inverse of `kind_in_file`.

    Raises:
        UnsupportedValue: This torch has no dtype for the tag, or the shape has an odd number of 4-bit floats.

    Examples:
        >>> kind_from_file("BF16", (2, 3))
        (torch.bfloat16, (2, 3))
    """
    if tag not in _PAIRS_BY_TAG:
        return dtype_from_tag(tag), shape
    if not shape or shape[-1] % 2:
        heading = f"the safetensors dtype {tag!r} needs an even last axis, since two values share a byte"
        raise UnsupportedValue(error_text(heading, found=shape, expected="a last axis of an even length"))
    return _PAIRS_BY_TAG[tag], (*shape[:-1], shape[-1] // 2)


def is_quantised(dtype: torch.dtype) -> bool:
    """Return whether a dtype is quantised; its values then also depend on a scale and a zero point.

    Examples:
        >>> is_quantised(torch.qint8), is_quantised(torch.int8)
        (True, False)
    """
    return dtype in _QUANTISED_DTYPES


def check_storable(dtype: torch.dtype, what: str) -> None:
    """Raise unless a tensor of this dtype can be stored bit for bit.

    Args:
        dtype: Dtype of the tensor.
        what: Name of the stored tensor, for the message.

    Raises:
        UnsupportedValue: The dtype is quantised: a scale and a zero point aren't part of its bits.

    Examples:
        >>> check_storable(torch.float32, "'decoder.weight'")
    """
    if dtype in _QUANTISED_DTYPES:
        fix = "Store tensor.dequantize(), or tensor.int_repr() with its scale and zero point beside it."
        raise UnsupportedValue(error_text(f"{what}: quantised tensors cannot be stored", found=dtype, fix=fix))


def bit_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bytes as a tensor that shares its memory.

    Args:
        tensor: Contiguous tensor on the CPU, of any storable dtype and shape.

    Returns:
        uint8 (bytes,), in row-major order, detached from autograd.

    Raises:
        MetadataError: The tensor's memory doesn't hold its elements in row-major order.
        UnsupportedValue: The dtype is quantised.

    Examples:
        >>> bit_view(torch.tensor([1, 256], dtype=torch.int16))
        tensor([1, 0, 0, 1], dtype=torch.uint8)
    """
    return flat_bytes(_plain(tensor))


def byte_buffer(tensor: torch.Tensor) -> memoryview:
    r"""Return a tensor's bytes as a writable buffer that shares its memory; three times as fast as `bit_view`.

    Args:
        tensor: Contiguous tensor on the CPU, as for `bit_view`.

    Returns:
        The bytes in row-major order, one per item.

    Raises:
        MetadataError, UnsupportedValue: The tensor has no such buffer, for the reasons that `bit_view` gives.

    Examples:
        >>> bytes(byte_buffer(torch.tensor([1, 256], dtype=torch.int16)))
        b'\x01\x00\x00\x01'
    """
    plain = tensor.detach() if tensor.requires_grad else tensor
    viewed_as = _VIEWED_AS.get(plain.dtype)
    if viewed_as is not None and plain.is_contiguous():
        # A load calls this for each tensor, so there are no checks beforehand: NumPy and memoryview themselves refuse
        # other devices (TypeError), lazy conjugates (RuntimeError), no elements (TypeError) and too many axes
        # (ValueError).
        with suppress(RuntimeError, TypeError, ValueError):
            return memoryview((plain if viewed_as is plain.dtype else plain.view(viewed_as)).numpy()).cast("B")
    return memoryview(bit_view(plain).numpy())


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor detached from autograd; raise unless its memory holds its elements in row-major order."""
    if tensor.dtype in _QUANTISED_DTYPES or tensor.layout is not torch.strided or not is_plain_memory(tensor):
        raise _no_bit_view(tensor)
    return tensor.detach() if tensor.requires_grad else tensor


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether a tensor consists of elements in memory; it isn't sparse, nested, quantised or meta.

    Examples:
        >>> is_dense(torch.eye(2).t()), is_dense(torch.eye(2).to_sparse())
        (True, False)
    """
    return tensor.layout is torch.strided and not (tensor.is_meta or tensor.is_nested or is_quantised(tensor.dtype))


def row_major_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bytes in row-major order on the CPU; a view of its memory if possible, else a copy.

    Args:
        tensor: Tensor of any storable dtype and shape, on any device, with any strides.

    Returns:
        uint8 (bytes,), detached from autograd.

    Raises:
        UnsupportedValue: The dtype is quantised.

    Examples:
        >>> row_major_bits(torch.tensor([[1, 2], [3, 4]], dtype=torch.int8).t())
        tensor([1, 3, 2, 4], dtype=torch.uint8)
    """
    return device_bits(tensor).cpu()


def device_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bytes in row-major order on its device: a view of its memory if possible, else a copy.

    Raises:
        UnsupportedValue: The dtype is quantised.

    Examples:
        >>> device_bits(torch.tensor([[1, 2], [3, 4]], dtype=torch.int8).t())
        tensor([1, 3, 2, 4], dtype=torch.uint8)
    """
    check_storable(tensor.dtype, "row_major_bits")
    return flat_bytes(as_integers(tensor))


def is_plain_memory(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is on the CPU, with its elements in row-major order, so that its memory can be filled.

    Examples:
        >>> is_plain_memory(torch.eye(2)), is_plain_memory(torch.eye(2, 3).t())
        (True, False)
    """
    return tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _no_bit_view(tensor: torch.Tensor) -> Exception:
    check_storable(tensor.dtype, "bit_view")
    wrong = {
        f"layout {tensor.layout}; call .to_dense() first": tensor.layout is not torch.strided,
        f"on {tensor.device}; call .cpu() first": not tensor.is_cpu,
        "conjugated lazily; call .resolve_conj() first": tensor.is_conj(),
        "negated lazily; call .resolve_neg() first": tensor.layout is torch.strided and tensor.is_neg(),
        "not contiguous; call .contiguous() first": tensor.layout is torch.strided and not tensor.is_contiguous(),
    }
    expected = "a contiguous tensor on the CPU"
    return MetadataError(
        error_text(
            "bit_view: the tensor's memory cannot be viewed as its bytes",
            expected=expected,
            offenders=[fault for fault, is_wrong in wrong.items() if is_wrong],
        )
    )
