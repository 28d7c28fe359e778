"""Casts and functions that elements pass through in a move; and `Constant` and `Computed`, from which moves can read.

A move (`Move`) copies elements from a source, a `Constant` or a `Computed`. Comparisons are exact: 0.0 isn't -0.0.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import Any

import torch

from ..core.codec import dtype_name, kind_from_file
from ..core.lazy import as_integers, flat_bytes, is_exact, steady
from ..errors import shorten


@dataclass(frozen=True, slots=True)
class Kind:
    """A tensor's shape and dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    def __str__(self) -> str:
        return f"{dtype_name(self.dtype)}[{','.join(map(str, self.shape))}]"


def kind_of(like: Any) -> Kind:
    """Return the shape and dtype of an object that has both; for a shard, those of the whole tensor."""
    if not hasattr(like, "dtype"):  # a slice of a safetensors file
        dtype, shape = kind_from_file(like.get_dtype(), tuple(like.get_shape()))
        return Kind(shape, dtype)
    shape = like.global_shape if hasattr(like, "global_shape") else like.shape
    return Kind(tuple(map(int, shape)), like.dtype)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bytes, uint8 (bytes,)."""
    return flat_bytes(as_integers(tensor))


def number(value: Any, dtype: torch.dtype) -> torch.Tensor:
    """Return a number as a tensor without axes, cast as torch's `fill_` does."""
    with torch._C._DisableTorchDispatch():
        new = torch.zeros((), dtype=dtype, device="cpu")
        return new if isinstance(value, int) and not value else new.fill_(value)  # some dtypes can't be filled


def exactly(value: Any) -> Any:
    """Return a key for comparisons: values with equal keys are the same to every function; 0.0 and -0.0 differ.

    Examples:
        >>> exactly(0.0) == exactly(-0.0), exactly(1) == exactly(1.0), exactly(float("nan")) == exactly(float("nan"))
        (False, True, True)
    """
    if isinstance(value, complex):
        return complex, struct.pack("2d", value.real, value.imag)
    if isinstance(value, float) or (isinstance(value, int) and abs(value) < 1 << 53):
        return float, struct.pack("d", value)
    if isinstance(value, tuple | list):
        return tuple([exactly(item) for item in value])
    return type(value), value


@dataclass(frozen=True, slots=True)
class Constant:
    """Elements that a `Move` copies, but that come from no source, such as zeros of padding.

    Attributes:
        value: Flat tensor of the elements, with only one element if all are equal. If the constant is an argument of a
            `Function` or `Computed`, `value` has no axes.
    """

    value: torch.Tensor

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Constant) or self.value.dtype != other.value.dtype:
            return False
        return self.value.shape == other.value.shape and torch.equal(bits(self.value), bits(other.value))

    def __hash__(self) -> int:
        return hash((self.value.dtype, self.value.shape))

    def __str__(self) -> str:
        return str(self.value.reshape(-1)[0].item()) if self.value.numel() == 1 else f"constant{[*self.value.shape]}"


@dataclass(frozen=True, slots=True)
class Cast:
    """A cast of each element.

    Attributes:
        source: Dtype before the cast.
        dtype: Dtype after the cast.
        keeps: Whether the cast rounds no value: `dtype` has all values of `source`, or the elements came from `dtype`
            by an earlier cast that rounds none.
    """

    source: torch.dtype
    dtype: torch.dtype
    keeps: bool = field(compare=False)  # depends on earlier steps; the cast itself is the same

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.dtype)

    def __str__(self) -> str:
        return f"to({dtype_name(self.dtype)})"


@dataclass(frozen=True, slots=True)
class Bits:
    """A view of each element's bits as another dtype of the same size."""

    source: torch.dtype
    dtype: torch.dtype

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view(self.dtype)

    def __str__(self) -> str:
        return f"view({dtype_name(self.dtype)})"


@dataclass(frozen=True, slots=True)
class Function:
    """A torch function that is called on each element, with fixed other arguments.

    Attributes:
        func: Operator.
        place: Position of the element among the arguments.
        args: Arguments, with None for the element.
        options: Keyword arguments, sorted by name.
        alone: Whether the element's tensor had no axes, which changes the dtype to which torch promotes.
    """

    func: Any
    place: int
    args: tuple[Any, ...]
    options: tuple[tuple[str, Any], ...]
    alone: bool

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        shape = tensor.shape
        # torch's promotion depends on whether a tensor has axes, so none are added to a tensor without axes.
        if self.alone:
            return torch.stack([self._of(element) for element in tensor.reshape(-1)]).reshape(shape)
        return self._of(tensor if shape else tensor.reshape(1)).reshape(shape)

    def _of(self, tensor: torch.Tensor) -> torch.Tensor:
        values = [each.value if isinstance(each, Constant) else each for each in self.args]
        values[self.place] = tensor
        return _result(self.func, values, dict(self.options))

    def _exactly(self) -> Any:
        return self.func, self.place, exactly(self.args), exactly(self.options), self.alone

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Function) and self._exactly() == other._exactly()

    def __hash__(self) -> int:
        return hash(self._exactly())

    def __str__(self) -> str:
        others = (str(each) for number, each in enumerate(self.args) if number != self.place)
        return f"{operator_name(self.func)}({', '.join(others)})"

    def of(self, text: str) -> str:
        """Return the function's call as text, such as ``pow(2, x)``; the argument `text` stands for the element."""
        texts = (text if number == self.place else str(each) for number, each in enumerate(self.args))
        return f"{operator_name(self.func)}({', '.join(texts)})"


def via_text(text: str, via: Sequence[Any]) -> str:
    """Return an element and its steps as text, such as ``w[a].to(float32)``.

    Steps are written as methods; only a function whose first argument isn't the element is written as a call.

    Examples:
        >>> power = Function(torch.ops.aten.pow.Scalar, 1, (2, None), (), alone=False)
        >>> via_text("w[a]", [*cast(torch.bfloat16, torch.float32), power])
        'pow(2, w[a].to(float32))'
    """
    for step in via:
        text = step.of(text) if isinstance(step, Function) and step.place else f"{text}.{step}"
    return text


@dataclass(frozen=True, slots=True)
class Operand:
    """One operand of a computed tensor.

    Attributes:
        moves: Moves of the operand's elements into a flat tensor. It has the result's size, or one element if `alone`.
        dtype: Dtype of the operand.
        alone: Whether the operand has no axes, so that all elements of the result use its only element.
    """

    moves: Any
    dtype: torch.dtype
    alone: bool


@dataclass(frozen=True, slots=True)
class Computed:
    """The result of an elementwise operator on several tensors, from which a move (`Move`) can read its elements.

    Attributes:
        func: Operator.
        operands: Operands in order: `Operand`, `Constant`, or numbers and other values.
        options: Keyword arguments, sorted by name.
        dtype: Dtype of the result.
    """

    func: Any
    operands: tuple[Any, ...]
    options: tuple[tuple[str, Any], ...]
    dtype: torch.dtype

    @property
    def tensors(self) -> tuple[Operand, ...]:
        """The operands that are an `Operand`: tensors, but neither constants nor numbers."""
        return tuple(each for each in self.operands if isinstance(each, Operand))

    def __call__(self, parts: Iterable[torch.Tensor]) -> torch.Tensor:
        tensors = iter(parts)
        values = [
            next(tensors)
            if isinstance(operand, Operand)
            else operand.value
            if isinstance(operand, Constant)
            else operand
            for operand in self.operands
        ]
        return _result(self.func, values, dict(self.options))

    def _exactly(self) -> Any:
        return self.func, exactly(self.operands), exactly(self.options), self.dtype

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Computed) and self._exactly() == other._exactly())

    def __hash__(self) -> int:
        return hash((self.func, exactly(self.options), self.dtype))

    def __str__(self) -> str:
        names = (
            ", ".join(shorten(dict.fromkeys(str(move.root) for move in operand.moves), shown=3))
            if isinstance(operand, Operand)
            else str(operand)
            for operand in self.operands
        )
        return f"{operator_name(self.func)}({'; '.join(names)})"


@lru_cache(maxsize=4096)
def operator_name(func: Any) -> str:
    """Return an operator's name without its namespace."""
    return str(func._schema.name).removeprefix("aten::")


_CONJUGATE = Function(torch.ops.aten.conj_physical.default, 0, (None,), (), alone=False)
_NEGATE = Function(torch.ops.aten.neg.default, 0, (None,), (), alone=False)


def _result(func: Any, operands: Sequence[Any], options: Mapping[str, Any]) -> torch.Tensor:
    """Return the result of an elementwise function; its bits do not depend on how tensors are cut into parts."""
    if is_exact(operator_name(func), operands, options):
        return func(*operands, **options)  # type: ignore[no-any-return]
    return steady(func, operands, options)


@lru_cache(maxsize=256)
def has_all_values(dtype: torch.dtype, source: torch.dtype) -> bool:
    """Return whether `dtype` can represent every value of `source`.

    Examples:
        >>> has_all_values(torch.float32, torch.bfloat16), has_all_values(torch.float32, torch.int32)
        (True, False)
    """
    if source is torch.bool or dtype is source:
        return True
    if dtype is torch.bool or source.is_complex:
        return dtype.is_complex and dtype.itemsize >= source.itemsize
    if dtype.is_complex:
        return has_all_values(torch.float64 if dtype is torch.complex128 else torch.float32, source)
    if not dtype.is_floating_point:
        if source.is_floating_point:
            return False
        wide, narrow = torch.iinfo(dtype), torch.iinfo(source)
        return wide.min <= narrow.min and narrow.max <= wide.max
    limits = torch.finfo(dtype)
    # All integers up to 2/eps are values of a floating-point dtype.
    if not source.is_floating_point:
        integers = torch.iinfo(source)
        return bool(max(-integers.min, integers.max) <= min(2 / limits.eps, limits.max))
    floats = torch.finfo(source)
    # Subnormal numbers count, too: the smallest one is smallest_normal * eps.
    finer = limits.smallest_normal * limits.eps <= floats.smallest_normal * floats.eps
    return bool(limits.eps <= floats.eps and limits.max >= floats.max and finer)


@lru_cache(maxsize=256)
def takes_numbers_of(dtype: torch.dtype, source: torch.dtype) -> bool:
    """Return whether torch can fill a tensor of `dtype` with every number of `source`, so that none is out of range.

    Examples:
        >>> takes_numbers_of(torch.bfloat16, torch.float32), takes_numbers_of(torch.float16, torch.float32)
        (True, False)
    """
    if source.is_complex or torch.bool in (source, dtype):
        return dtype.is_complex or not source.is_complex
    if not (dtype.is_floating_point or dtype.is_complex):
        return has_all_values(dtype, source)
    limits = torch.finfo(source) if source.is_floating_point else torch.iinfo(source)
    return torch.finfo(dtype).max >= limits.max * 0.99  # the largest number of bfloat16 is a little less than float32's


def cast(source: torch.dtype, dtype: torch.dtype) -> tuple[Cast, ...]:
    """Return the step that casts from one dtype to another, in a tuple; empty if the dtypes are equal."""
    return () if source is dtype else (Cast(source, dtype, has_all_values(dtype, source)),)


def reread(source: torch.dtype, dtype: torch.dtype) -> tuple[Bits, ...]:
    """Return the step that views bits as another dtype, in a tuple; empty if the dtypes are equal."""
    return () if source is dtype else (Bits(source, dtype),)


def joined(first: tuple[Any, ...], then: tuple[Any, ...]) -> tuple[Any, ...]:
    """Concatenate two sequences of steps (casts and functions), and leave out steps that undo each other.

    Examples:
        >>> joined(cast(torch.bfloat16, torch.float32), cast(torch.float32, torch.bfloat16))
        ()
    """
    if not first or not then:
        return first or then
    last, step, later = first[-1], then[0], then[1:]
    # After a cast that rounds, a cast back gives other values, so both stay.
    if isinstance(last, Cast) and isinstance(step, Cast) and last.keeps and not _overflows(last, step):
        keeps = step.keeps or has_all_values(step.dtype, last.source)
        new: tuple[Any, ...] = () if last.source is step.dtype else (Cast(last.source, step.dtype, keeps),)
    elif isinstance(last, Bits) and isinstance(step, Bits):
        new = reread(last.source, step.dtype)
    elif _is_own_inverse(last) and last == step:
        new = ()
    else:
        return (*first, *then)
    return joined(joined(first[:-1], new), later)


def _overflows(last: Cast, step: Cast) -> bool:
    """Return whether `step`, a cast after `last`, may overflow an integer; its result then depends on `last.dtype`."""
    is_integer = not (step.dtype.is_floating_point or step.dtype.is_complex or step.dtype is torch.bool)
    return is_integer and last.dtype.is_floating_point and not has_all_values(step.dtype, last.source)


def _is_own_inverse(step: Any) -> bool:
    return isinstance(step, Function) and operator_name(step.func) in ("neg", "conj_physical")


def seen_through(view: torch.Tensor) -> tuple[Function, ...]:
    """Return the functions that conjugate or negate elements of a lazily conjugated or negated view; usually none."""
    conjugated = (_CONJUGATE,) if view.is_conj() else ()
    return (*conjugated, _NEGATE) if view.is_neg() else conjugated


def undone(via: tuple[Any, ...], root: str) -> tuple[Any, ...] | str:
    """Return the steps that undo other steps; if one can't be undone, the reason as text, such as "is rounded: ...".

    Args:
        via: Steps to undo.
        root: Name of the tensor before the steps, for the text.
    """
    back: tuple[Any, ...] = ()
    for number, step in enumerate(via):
        if isinstance(step, Cast) and step.keeps:
            inverse: Any = Cast(step.dtype, step.source, keeps=True)
        elif isinstance(step, Bits):
            inverse = Bits(step.dtype, step.source)
        elif _is_own_inverse(step):
            inverse = step
        elif isinstance(step, Cast):
            return f"is rounded: {dtype_name(step.source)} -> {dtype_name(step.dtype)}"
        else:
            return f"is computed: {step.of(via_text(root, via[:number]))}"
        back = joined((inverse,), back)
    return back
