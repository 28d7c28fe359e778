"""Sources computed from others: elementwise arithmetic and products of matrices by windows; functions of a whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ...errors import ShapeError, UnsupportedValue, error_text
from .. import limits
from ..geometry import slabs, slices
from ._bits import flat_bytes
from ._sources import Fetch, Shape, Source

_FIX = "Give a function of each element alone, and compute what needs the whole tensor, such as a norm, beforehand."


@dataclass(frozen=True, slots=True, eq=False)
class Elementwise:
    """A tensor of which each element is a function of other tensors' elements at the same index.

    Attributes:
        function: from the operands, in order, to a tensor of their shape.
        operands: sources of one shape, and scalars.
        options: keywords of the function.
        shape: of the sources and the result.
        dtype: of the result.
        name: for errors and ``repr``.
        is_checked: whether the function is a caller's. Then it is tested on the first window that is read, and on
            later ones that have more distinct elements to test.
        tests: how many elements each test had so far: a memo that changes no result.
    """

    function: Callable[..., torch.Tensor]
    operands: tuple[Any, ...]
    options: Mapping[str, Any]
    shape: Shape
    dtype: torch.dtype
    name: str
    is_checked: bool = False
    tests: list[int] = field(default_factory=list)

    @property
    def made_of(self) -> tuple[Any, ...] | None:
        """What identifies it: names, numbers and sources; None with a caller's function, which has no identity."""
        if self.is_checked:
            return None
        values = (each if isinstance(each, Source) else scalar_text(each) for each in self.operands)
        options = (f"{word}={scalar_text(value)}" for word, value in sorted(self.options.items()))
        return self.function.__name__, ", ".join(options), *values

    @property
    def sources(self) -> tuple[Source, ...]:
        """The operands that are tensors."""
        return tuple(each for each in self.operands if isinstance(each, Source))

    def read_box(self, offset: Shape, shape: Shape) -> torch.Tensor:
        """Return a box's elements in a new tensor that the caller owns."""
        box = torch.empty(shape, dtype=self.dtype, device="cpu")
        for start, window in self._windows(shape):
            place = tuple(map(sum, zip(offset, start, strict=True)))
            values = [each.read_box(place, window) if isinstance(each, Source) else each for each in self.operands]
            result = self._value(values, window)
            # The usual case of a small read: no copy into a larger result.
            if window == shape:
                return result.contiguous()
            box[slices(start, window)] = result
        return box

    def box_fetches(self, offset: Shape, shape: Shape) -> Iterator[Fetch]:
        """Yield what reading the box would fetch from storage, in that order."""
        for start, window in self._windows(shape):
            place = tuple(map(sum, zip(offset, start, strict=True)))
            for each in self.sources:
                yield from each.box_fetches(place, window)

    def _windows(self, shape: Shape) -> Iterator[tuple[Shape, Shape]]:
        row = self.dtype.itemsize + sum(each.dtype.itemsize for each in self.sources)
        return slabs(shape, max(1, limits.COMPUTED_BYTES // row))

    def _value(self, values: Sequence[Any], window: Shape) -> torch.Tensor:
        if self.is_checked:
            count = elements_tested(values)
            if not self.tests or count > max(self.tests):
                check_elementwise(self.function, values)
                self.tests.append(count)
            # As tensors of one axis, since torch promotes dtypes of tensors without axes differently.
            values = [value.reshape(-1) for value in values]
        # Sums, products and quotients of real numbers are rounded the same everywhere. Others may not be: torch
        # computes the end of a row element by element, and the rest by vector instructions.
        is_exact = not (self.is_checked or self.options or self.dtype.is_complex)
        if is_exact or not (window or self.is_checked):
            return self.function(*values, **self.options)
        return self._in_chunks(values).view(window)

    def _in_chunks(self, values: Sequence[Any]) -> torch.Tensor:
        """Return a window's elements along one axis, each computed as all others are, however the window is cut."""
        flat = [value.reshape(-1) if isinstance(value, torch.Tensor) and value.ndim else value for value in values]
        count = next(value.numel() for value in flat if isinstance(value, torch.Tensor) and value.ndim)
        elements = torch.empty(count, dtype=self.dtype, device="cpu")
        for start in range(0, count, _CHUNK):
            stop = min(count, start + _CHUNK)
            parts = [_pad(each[start:stop]) if isinstance(each, torch.Tensor) and each.ndim else each for each in flat]
            result = self.function(*parts, **self.options)
            check_kind(result, tuple(parts[0].shape) if self.is_checked else None, self.dtype)
            elements[start:stop] = result[: stop - start]
        return elements


_CHUNK = 32_768
"""So many elements torch computes in one thread: with several, each one's share would have an end of its own."""
_VECTOR = 64
"""A multiple of the elements in a processor's vector, whatever the processor."""


def _pad(chunk: torch.Tensor) -> torch.Tensor:
    """Return a chunk padded to whole vectors with its last element."""
    missing = -len(chunk) % _VECTOR
    return torch.cat([chunk, chunk[-1:].expand(missing)]) if missing else chunk.contiguous()


def scalar_text(value: Any) -> str:
    """Return the type and all digits of a number, a tensor of one, or an option; torch's own text has four digits.

    Examples:
        >>> scalar_text(0.5), scalar_text(torch.tensor(2, dtype=torch.int8))
        ("<class 'float'> 0.5", 'torch.int8 2')
    """
    return f"{value.dtype} {value.item()!r}" if isinstance(value, torch.Tensor) else f"{type(value)} {value!r}"


def check_kind(result: Any, shape: Shape | None, dtype: torch.dtype | None) -> None:
    """Raise unless a function returned a tensor of the expected shape and dtype, where these are known.

    Raises:
        UnsupportedValue: it didn't.
    """
    is_tensor = isinstance(result, torch.Tensor)
    if is_tensor and shape in (None, tuple(result.shape)) and dtype in (None, result.dtype):
        return
    kind = f"{tuple(result.shape)} {result.dtype}" if is_tensor else type(result).__name__
    expected = f"{shape} {dtype}" if dtype else f"a tensor of shape {shape}"
    what = "lazy_map: given a part of its operands, the function returned another shape or dtype"
    raise UnsupportedValue(error_text(what, found=kind, expected=expected, fix=_FIX))


def check_elementwise(function: Callable[..., Any], values: Sequence[torch.Tensor]) -> None:
    """Raise unless a function gives the same bits for a whole window, for it cut in two ways, and transposed.

    At most 16,384 elements are tested, as tensors of one axis and whole vectors.

    Args:
        function: the caller's.
        values: its operands in a window, of one shape.

    Raises:
        UnsupportedValue: an element depends on more than the elements at its index.

    Examples:
        >>> check_elementwise(torch.square, [torch.tensor([3.0, 4.0])])
        >>> try:
        ...     check_elementwise(lambda x: x / x.norm(), [torch.tensor([3.0, 4.0])])
        ... except UnsupportedValue as error:
        ...     print(str(error).splitlines()[0])
        lazy_map: the function isn't elementwise: cut in 2 along axis 0, the first window gives other elements
    """
    samples = [_sample(value) for value in values]
    whole = _result(function, samples)
    cuts = [(0, 2), (0, 3)] if whole.ndim == 1 else [(0, 2), (1, 3)]
    for axis, count in cuts:
        pieces = list(zip(*(sample.tensor_split(count, axis) for sample in samples), strict=True))
        result = torch.cat([_result(function, piece) for piece in pieces if piece[0].numel()], axis)
        if not torch.equal(flat_bytes(result), flat_bytes(whole)):
            raise _not_elementwise(f"cut in {count} along axis {axis}")
    if whole.ndim == 2:
        result = _result(function, [sample.T for sample in samples]).T
        if not torch.equal(flat_bytes(result), flat_bytes(whole)):
            raise _not_elementwise("transposed")


def elements_tested(values: Sequence[torch.Tensor]) -> int:
    """Return how many elements of a window are tested; 0 if each operand's are all equal, which shows too little.

    Examples:
        >>> elements_tested([torch.tensor([3.0, 4.0])]), elements_tested([torch.zeros(2)])
        (2, 0)
    """
    samples = [_sample(value) for value in values]
    rows = [flat_bytes(sample).view(sample.numel(), -1) for sample in samples]
    return samples[0].numel() if any(bool((row != row[:1]).any()) for row in rows) else 0


def _sample(value: torch.Tensor) -> torch.Tensor:
    """Return some elements of a window, along two axes where it has as many."""
    if value.ndim < 2:
        return value.reshape(-1)[:16_384]
    return value.reshape(-1, value.shape[-1])[:128, :128]


def _result(function: Callable[..., Any], values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return what a function gives for tensors, which it is passed along one axis, as whole vectors."""
    flat = [_pad(value.reshape(-1)) for value in values]
    result = function(*flat)
    check_kind(result, tuple(flat[0].shape), None)
    count, shape = values[0].numel(), tuple(values[0].shape)
    return result[:count].view(shape)  # type: ignore[no-any-return]


def _not_elementwise(how: str) -> UnsupportedValue:
    what = f"lazy_map: the function isn't elementwise: {how}, the first window gives other elements"
    return UnsupportedValue(error_text(what, fix=_FIX))


@dataclass(frozen=True, slots=True, eq=False)
class Product:
    """The product of two matrices, computed in blocks: whole rows of the left by whole columns of the right.

    Blocks are on one grid, whatever is read, so that each element has the same bits however the product is cut. Where
    one block holds all of it, these are what ``torch.matmul`` gives. Else sums may be rounded differently: within
    ``K * eps * (abs(left) @ abs(right))``, K the length of the sums.

    Attributes:
        left: (M, K).
        right: (K, N).
        shape: (M, N).
        dtype: of all three.
    """

    left: Source
    right: Source
    shape: Shape
    dtype: torch.dtype

    @property
    def made_of(self) -> tuple[Any, ...]:
        """What identifies it."""
        return "matmul", self.left, self.right

    @property
    def name(self) -> str:
        """For errors and ``repr``."""
        return f"matmul({self.left.name}, {self.right.name})"

    def read_box(self, offset: Shape, shape: Shape) -> torch.Tensor:
        """Return a box's elements in a new tensor that the caller owns."""
        box, inner = torch.zeros(shape, dtype=self.dtype, device="cpu"), self.left.shape[1]
        height, width = self._block()
        for column, columns in _spans(offset[1], shape[1], width, self.shape[1]) if inner else ():
            # Each column of the right is read once; rows of the left are read again for each block of columns.
            right = self.right.read_box((0, column), (inner, columns))
            for row, rows in _spans(offset[0], shape[0], height, self.shape[0]):
                block = torch.matmul(self.left.read_box((row, 0), (rows, inner)), right)
                low, left = max(row, offset[0]), max(column, offset[1])
                part = block[low - row : offset[0] + shape[0] - row, left - column : offset[1] + shape[1] - column]
                box[low - offset[0] :, left - offset[1] :][: part.shape[0], : part.shape[1]] = part
        return box

    def box_fetches(self, offset: Shape, shape: Shape) -> Iterator[Fetch]:
        """Yield what reading the box would fetch from storage, in that order."""
        inner, (height, width) = self.left.shape[1], self._block()
        for column, columns in _spans(offset[1], shape[1], width, self.shape[1]) if inner else ():
            yield from self.right.box_fetches((0, column), (inner, columns))
            for row, rows in _spans(offset[0], shape[0], height, self.shape[0]):
                yield from self.left.box_fetches((row, 0), (rows, inner))

    def _block(self) -> tuple[int, int]:
        """Return how many rows and columns a block has."""
        inner, most = max(1, self.left.shape[1]), limits.COMPUTED_BYTES // self.dtype.itemsize
        # Half of the memory is for the right's columns, which stay while blocks of the left's rows pass.
        width = max(1, min(self.shape[1], most // 2 // inner))
        return max(1, (most - width * inner) // (inner + width)), width


def _spans(start: int, count: int, step: int, length: int) -> Iterator[tuple[int, int]]:
    """Yield begin and length of the grid's intervals that overlap a range; the last one of the grid may be shorter."""
    first = start // step * step
    return ((low, min(step, length - low)) for low in range(first, start + count, step))


@dataclass(frozen=True, slots=True, eq=False)
class OfWhole:
    """What a caller's function returns for a whole tensor, computed at the first read and kept: a row of means, say.

    Attributes:
        function: from the operand's elements to a tensor of `shape` and `dtype`.
        operand: all of it is in memory while the function runs.
        shape: of the result.
        dtype: of the result.
        memo: the result, once it is computed: a memo that changes no result.
    """

    function: Callable[[torch.Tensor], torch.Tensor]
    operand: Source
    shape: Shape
    dtype: torch.dtype
    memo: list[torch.Tensor] = field(default_factory=list)

    @property
    def made_of(self) -> None:
        """What identifies it: nothing, since a caller's function has no identity."""
        return None

    @property
    def name(self) -> str:
        """For errors and ``repr``."""
        return f"a function of {self.operand.name}"

    def read_box(self, offset: Shape, shape: Shape) -> torch.Tensor:
        """Return a box's elements in a new tensor that the caller owns."""
        if not self.memo:
            # Whole, whatever is read of the result: cut otherwise, sums could be rounded otherwise.
            whole = self.operand.read_box((0,) * len(self.operand.shape), self.operand.shape)
            self.memo.append(self.function(whole))
        return self.memo[0][slices(offset, shape)].clone()

    def box_fetches(self, offset: Shape, shape: Shape) -> Iterator[Fetch]:
        """Yield what reading the box would fetch from storage, in that order."""
        return self.operand.box_fetches((0,) * len(self.operand.shape), self.operand.shape)


def check_one_shape(name: str, operation: str, shapes: Sequence[Shape]) -> None:
    """Raise unless operands have one shape: a box of the result wouldn't be a box of what is broadcast.

    Raises:
        ShapeError: they haven't.
    """
    if len(set(shapes)) > 1:
        what = f"LazyTensor {name!r}: {operation} of tensors of different shapes"
        fix = "Expand the smaller one with `expand`, or call read() first."
        raise ShapeError(error_text(what, found=", ".join(map(str, map(tuple, shapes))), fix=fix))
