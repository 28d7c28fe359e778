"""Elementwise functions: their names, and results with bits that don't depend on an element's position in a tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Number, Real
from typing import Any

import torch

ALIASES = {
    "subtract": "sub",
    "multiply": "mul",
    "negative": "neg",
    **dict.fromkeys(("divide", "true_divide", "truediv"), "div"),
}
"""Other names of functions in torch and in Python's `operator`; the dispatcher has one name for each."""
EXACT = {
    *("add", "sub", "rsub", "mul", "div", "neg", "abs", "sqrt", "reciprocal", "clamp", "clamp_min", "clamp_max"),
    *("bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not", "__lshift__", "__rshift__", "floor_divide"),
    *("bitwise_left_shift", "bitwise_right_shift", "remainder", "minimum", "maximum", "where"),
    *("eq", "ne", "lt", "le", "gt", "ge", "conj_physical"),
}
"""Functions whose result for an element is rounded in the same way at every position in a tensor."""
INEXACT = {"exp", "exp2", "expm1", "log", "log2", "rsqrt", "pow", "ldexp", "sigmoid", "tanh"}
"""Functions that torch computes with different instructions at the end of a row."""
_CHUNK = 32_768
"""Number of elements that torch computes in one thread; several threads would each have an end of a row."""
_VECTOR = 64
"""A multiple of the number of elements in a vector register of any processor."""


def is_exact(name: str, operands: Sequence[Any], options: Mapping[str, Any]) -> bool:
    """Return whether a function's result for an element is rounded in the same way at every position in a tensor.

    Args:
        name: Name of the function, or an alias.
        operands: Tensors, lazy or not, numbers and other values.
        options: Keyword arguments.

    Examples:
        >>> is_exact("multiply", [torch.ones(2), 3.0], {}), is_exact("mul", [torch.ones(2), 3j], {})
        (True, False)
    """
    # Products of complex numbers and `add` with `alpha` consist of operations that torch fuses in whole vectors only.
    return ALIASES.get(name, name) in EXACT and not options and not any(map(_is_complex, operands))


def _is_complex(value: Any) -> bool:
    if isinstance(value, Number):
        return not isinstance(value, Real)
    return bool(getattr(value, "dtype", torch.bool).is_complex)


def steady(function: Callable[..., torch.Tensor], operands: Sequence[Any], options: Mapping[str, Any]) -> torch.Tensor:
    """Return an elementwise function's result, with bits that don't depend on the elements' position in a tensor.

    torch computes the end of a row element by element, and the rest by vector instructions. Here tensors are cut and
    padded, so that each element is part of a whole vector. Operands without axes are passed on unchanged.

    Args:
        function: Function of the operands and options.
        operands: Tensors of one shape, with at least one element; tensors without axes, numbers and other values.
        options: Keyword arguments of the function.
    """
    shape = next((value.shape for value in operands if _has_axes(value)), None)
    if shape is None:
        return function(*operands, **options)
    flat = [value.reshape(-1) if _has_axes(value) else value for value in operands]
    parts = [function(*part, **options)[:count] for part, count in _chunks(flat, shape.numel())]
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).view(shape)


def _chunks(flat: Sequence[Any], numel: int) -> Iterator[tuple[list[Any], int]]:
    for start in range(0, numel, _CHUNK):
        count = min(_CHUNK, numel - start)
        yield [whole_vectors(value[start : start + count]) if _has_axes(value) else value for value in flat], count


def _has_axes(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim > 0


def whole_vectors(flat: torch.Tensor) -> torch.Tensor:
    """Return a 1-D tensor, padded with its last element to a multiple of 64 elements, which are whole vector registers.

    Examples:
        >>> whole_vectors(torch.arange(3)).shape
        torch.Size([64])
    """
    missing = -len(flat) % _VECTOR
    return torch.cat([flat, flat[-1:].expand(missing)]) if missing else flat.contiguous()
