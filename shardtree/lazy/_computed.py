"""Sources that are computed from others, window by window: elementwise arithmetic and products of matrices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from shardtree.errors import ShapeError, UnsupportedValue, error_text
from shardtree.geometry import slabs, slices

from ._region import Shape
from ._sources import Fetch, Source

WINDOW_BYTES = 16 * 2**20
"""What the operands' parts and the result's of one window take together."""

_FIX = "Give a function of each element alone: what needs the whole tensor, such as a norm, is computed before."


@dataclass(frozen=True, slots=True, eq=False)
class Elementwise:
    """A tensor each of whose elements is a function of the elements at the same index of others.

    Attributes:
        function: from the operands, in order, to a tensor of their shape.
        operands: sources of one shape, and scalars.
        options: keywords of the function.
        shape: of the sources and the result.
        dtype: of the result.
        name: for errors and ``repr``.
        is_checked: whether the function is a caller's, which is tried on the first window that is read.
        tried: what that found out, once; a memo that changes nothing else.
    """

    function: Callable[..., torch.Tensor]
    operands: tuple[Any, ...]
    options: Mapping[str, Any]
    shape: Shape
    dtype: torch.dtype
    name: str
    is_checked: bool = False
    tried: list[bool] = field(default_factory=list)

    @property
    def made_of(self) -> tuple[Any, ...] | None:
        """What tells it from others: names, numbers and sources; None where a caller's function can't be told."""
        if self.is_checked:
            return None
        values = (each if isinstance(each, Source) else f"{type(each)} {each!r}" for each in self.operands)
        return self.function.__name__, repr(sorted(self.options.items())), *values

    @property
    def sources(self) -> tuple[Source, ...]:
        """The operands that are tensors."""
        return tuple(each for each in self.operands if isinstance(each, Source))

    def read_box(self, offset: Shape, shape: Shape) -> torch.Tensor:
        """Return a box's elements in a new tensor that the caller owns."""
        found = torch.empty(shape, dtype=self.dtype)
        for start, window in self._windows(shape):
            place = tuple(map(sum, zip(offset, start, strict=True)))
            values = [each.read_box(place, window) if isinstance(each, Source) else each for each in self.operands]
            result = self._value(values, window)
            if window == shape:
                return result.contiguous()
            found[slices(start, window)] = result
        return found

    def box_fetches(self, offset: Shape, shape: Shape) -> Iterator[Fetch]:
        """Yield what reading the box would ask storage for, in that order."""
        for start, window in self._windows(shape):
            place = tuple(map(sum, zip(offset, start, strict=True)))
            for each in self.sources:
                yield from each.box_fetches(place, window)

    def _windows(self, shape: Shape) -> Iterator[tuple[Shape, Shape]]:
        row = self.dtype.itemsize + sum(each.dtype.itemsize for each in self.sources)
        return slabs(shape, max(1, WINDOW_BYTES // row))

    def _value(self, values: Sequence[Any], window: Shape) -> torch.Tensor:
        result = self.function(*values, **self.options)
        if self.is_checked:
            check_kind(result, window, self.dtype)
            if not self.tried:
                check_elementwise(self.function, values)
                self.tried.append(True)
        return result


def check_kind(result: Any, shape: Shape, dtype: torch.dtype | None) -> None:
    """Raise unless a caller's function returned a tensor of the shape and dtype that it has to have.

    Raises:
        UnsupportedValue: it didn't.
    """
    is_tensor = isinstance(result, torch.Tensor)
    if is_tensor and tuple(result.shape) == shape and dtype in (None, result.dtype):
        return
    found = f"{tuple(result.shape)} {result.dtype}" if is_tensor else type(result).__name__
    expected = f"{shape} {dtype}" if dtype else f"a tensor of shape {shape}"
    what = "lazy_map: the function returned something else for a window of its operands"
    raise UnsupportedValue(error_text(what, found=found, expected=expected, fix=_FIX))


def check_elementwise(function: Callable[..., Any], values: Sequence[torch.Tensor]) -> None:
    """Raise unless a function gives the same elements for a window whole, in two other cuts, and transposed.

    At most 16,384 elements are tried. They are compared bit for bit, but where there are so few that torch computes
    some of them one by one and others by the processor's vectors, which it rounds differently.

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
    is_exact = all(length % step == 0 for length, step in zip(samples[0].shape, _steps(samples[0]), strict=True))
    whole = function(*samples)
    cuts = [(0, 2), (0, 3)] if whole.ndim == 1 else [(0, 2), (1, 3)]
    for axis, count in cuts:
        pieces = zip(*(_pieces(sample, axis, count, is_exact) for sample in samples), strict=True)
        results = [function(*piece) for piece in pieces]
        if len(results) > 1 and not _are_same(_joined(results, axis), whole, is_exact):
            raise _not_elementwise(f"cut in {len(results)} along axis {axis}")
    if whole.ndim == 2:
        turned = function(*(sample.T.contiguous() for sample in samples))
        if not _are_same(turned.T if isinstance(turned, torch.Tensor) else None, whole, is_exact):
            raise _not_elementwise("transposed")


def _sample(value: torch.Tensor) -> torch.Tensor:
    """Return some elements of a window, along one axis or two, as multiples of what vectors hold if it has so many."""
    flat = value.reshape(-1, value.shape[-1]) if value.ndim > 1 else value.reshape(-1)
    most = (128, 128) if flat.ndim == 2 else (16_384,)
    few = flat[tuple(slice(0, length) for length in most)]
    steps = _steps(few)
    lengths = [n // step * step if n >= 2 * step else n for n, step in zip(few.shape, steps, strict=True)]
    return few[tuple(slice(0, length) for length in lengths)].contiguous()


def _steps(sample: torch.Tensor) -> tuple[int, ...]:
    return (8, 8) if sample.ndim == 2 else (64,)


def _pieces(sample: torch.Tensor, axis: int, count: int, is_exact: bool) -> list[torch.Tensor]:
    """Return a sample's pieces along an axis, dense as windows are: torch rounds otherwise in strided memory."""
    step = _steps(sample)[axis] if is_exact else 1
    size = max(step, sample.shape[axis] // count // step * step)
    return [piece.contiguous() for piece in torch.split(sample, size, axis)]


def _joined(results: Sequence[Any], axis: int) -> torch.Tensor | None:
    """Return what a function gave for pieces as one tensor; None where they make none."""
    try:
        return torch.cat(list(results), axis)
    except (RuntimeError, TypeError, IndexError):
        return None


def _are_same(found: torch.Tensor | None, whole: torch.Tensor, is_exact: bool) -> bool:
    if found is None or found.dtype != whole.dtype or found.shape != whole.shape:
        return False
    if is_exact or not (whole.is_floating_point() or whole.is_complex()):
        return torch.equal(_bits(found), _bits(whole))
    return torch.allclose(found, whole, rtol=8 * torch.finfo(whole.dtype).eps, atol=0.0, equal_nan=True)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _not_elementwise(how: str) -> UnsupportedValue:
    what = f"lazy_map: the function isn't elementwise: {how}, the first window gives other elements"
    return UnsupportedValue(error_text(what, fix=_FIX))


@dataclass(frozen=True, slots=True, eq=False)
class Product:
    """The product of two matrices: each window has whole rows of the left and whole columns of the right.

    Where one window holds all of it, it is bit for bit what ``torch.matmul`` gives. Else sums may be rounded
    differently: within ``K * eps * (abs(left) @ abs(right))``, K the length of the sums.

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
        """What tells it from others."""
        return "matmul", self.left, self.right

    @property
    def name(self) -> str:
        """For errors and ``repr``."""
        return f"matmul({self.left.name}, {self.right.name})"

    def read_box(self, offset: Shape, shape: Shape) -> torch.Tensor:
        """Return a box's elements in a new tensor that the caller owns."""
        found, inner = torch.zeros(shape, dtype=self.dtype), self.left.shape[1]
        for column, width in self._columns(shape):
            right = self.right.read_box((0, offset[1] + column), (inner, width))
            for row, height in self._rows(shape, width):
                left = self.left.read_box((offset[0] + row, 0), (height, inner))
                found[row : row + height, column : column + width] = torch.matmul(left, right)
        return found

    def box_fetches(self, offset: Shape, shape: Shape) -> Iterator[Fetch]:
        """Yield what reading the box would ask storage for, in that order."""
        inner = self.left.shape[1]
        for column, width in self._columns(shape):
            yield from self.right.box_fetches((0, offset[1] + column), (inner, width))
            for row, height in self._rows(shape, width):
                yield from self.left.box_fetches((offset[0] + row, 0), (height, inner))

    def _columns(self, shape: Shape) -> Iterator[tuple[int, int]]:
        """Yield where the windows' columns begin and how many there are; none where sums have no terms."""
        inner = self.left.shape[1]
        return _spans(shape[1], self._most // 2 // inner) if inner else iter(())

    def _rows(self, shape: Shape, width: int) -> Iterator[tuple[int, int]]:
        inner = self.left.shape[1]
        return _spans(shape[0], (self._most - width * inner) // (inner + width))

    @property
    def _most(self) -> int:
        return WINDOW_BYTES // self.dtype.itemsize


def _spans(length: int, most: int) -> Iterator[tuple[int, int]]:
    step = max(1, most)
    return ((start, min(step, length - start)) for start in range(0, length, step))


def check_one_shape(name: str, operation: str, shapes: Sequence[Shape]) -> None:
    """Raise unless operands have one shape: what is broadcast has none of its own to be cut by.

    Raises:
        ShapeError: they haven't.
    """
    if len(set(shapes)) > 1:
        what = f"LazyTensor {name!r}: {operation} of tensors of different shapes"
        fix = "Expand the smaller one with `expand`, or call read() first."
        raise ShapeError(error_text(what, found=", ".join(map(str, map(tuple, shapes))), fix=fix))
