"""Sources of lazy tensors that are computed: elementwise functions, matrix products, functions of whole tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import add
from typing import Any

import torch

from ...errors import ShapeError, UnsupportedValue, error_text
from .. import limits
from ..geometry import slabs, slices
from ._bits import flat_bytes
from ._sources import Box, Boxwise, Identify, Recipe, Shape, Source
from ._steady import is_exact, steady, whole_vectors

_FIX = "Pass a function of each element alone; compute values of the whole tensor, such as a norm, beforehand."


def arithmetic(
    function: Callable[..., torch.Tensor],
    operands: Sequence[Any],
    options: Mapping[str, Any],
    shape: Shape,
    dtype: torch.dtype,
    name: str,
) -> Boxwise:
    """Return a source that computes an elementwise sum, difference, product, quotient or negative.

    Args:
        function: Function of the operands and options.
        operands: Sources of one shape, and scalars.
        options: Keyword arguments of the function.
        shape: Shape of the sources and the result.
        dtype: Dtype of the result.
        name: Name for errors and ``repr``.
    """
    is_steady = is_exact(function.__name__, operands, options)

    def compute(values: Sequence[Any]) -> torch.Tensor:
        return function(*values, **options) if is_steady else steady(function, values, options)

    def identify() -> tuple[Any, ...]:
        words = (f"{word}={scalar_text(value)}" for word, value in sorted(options.items()))
        values = (value if _is_source(value) else scalar_text(value) for value in operands)
        return function.__name__, ", ".join(words), *values

    return _by_windows(compute, operands, shape, dtype, name, identify)


def mapped(function: Callable[..., torch.Tensor], lazies: Sequence[Source], dtype: torch.dtype, name: str) -> Boxwise:
    """Return a source that computes a caller's elementwise function.

    When the first window is read, `check_elementwise` tests the function with it. A later window is tested only if
    `elements_tested` is larger for it than for the windows tested before.

    Args:
        function: Function from 1-D tensors to a 1-D tensor.
        lazies: Operands, of one shape.
        dtype: Dtype of the result.
        name: Name for errors and ``repr``.
    """
    tests: list[int] = []  # number of elements in each test so far; they have no effect on results

    def checked(*parts: torch.Tensor) -> torch.Tensor:
        result = function(*parts)
        check_kind(result, tuple(parts[0].shape), dtype)
        return result

    def compute(values: Sequence[torch.Tensor]) -> torch.Tensor:
        count = elements_tested(values)
        if not tests or count > max(tests):
            check_elementwise(function, values)
            tests.append(count)
        # The function gets one axis, since torch promotes dtypes of tensors without axes differently.
        return steady(checked, [value.reshape(-1) for value in values], {}).view(values[0].shape)

    return _by_windows(compute, lazies, tuple(lazies[0].shape), dtype, name, _unknown)


def _by_windows(
    compute: Callable[[Sequence[Any]], torch.Tensor],
    operands: Sequence[Any],
    shape: Shape,
    dtype: torch.dtype,
    name: str,
    identify: Identify,
) -> Boxwise:
    """Return a source that computes each box elementwise, one window of the box at a time to bound the memory."""
    sources = [value for value in operands if _is_source(value)]
    most = max(1, limits.COMPUTED_BYTES // (dtype.itemsize + sum(source.dtype.itemsize for source in sources)))

    def recipe(box: Box) -> Recipe:
        windows = list(slabs(box.shape, most))

        def make(parts: Iterator[torch.Tensor]) -> torch.Tensor:
            whole = torch.empty(box.shape, dtype=dtype, device="cpu")
            for start, window in windows:
                elements = compute([next(parts) if _is_source(value) else value for value in operands])
                # A small read, the usual case, needs no copy into a larger result.
                if window == box.shape:
                    return elements.contiguous()
                whole[slices(start, window)] = elements
            return whole

        places = [Box(tuple(map(add, box.offset, start)), window) for start, window in windows]
        return [(source, place) for place in places for source in sources], make

    return Boxwise(name, shape, dtype, recipe, identify)


def _is_source(operand: Any) -> bool:
    return hasattr(operand, "read_box")  # `isinstance` would evaluate all properties of the protocol


def _unknown() -> None:
    """Return None as a source's identity, since the results of a caller's function can't be identified."""


def scalar_text(value: Any) -> str:
    """Return the type and value of a number, a 0-dim tensor or an option as text, with all digits.

    Examples:
        >>> scalar_text(0.5), scalar_text(torch.tensor(2, dtype=torch.int8))
        ("<class 'float'> 0.5", 'torch.int8 2')
    """
    return f"{value.dtype} {value.item()!r}" if isinstance(value, torch.Tensor) else f"{type(value)} {value!r}"


def check_kind(result: Any, shape: Shape | None, dtype: torch.dtype | None) -> None:
    """Raise unless a function's result is a tensor of the expected shape and dtype; None accepts any.

    Raises:
        UnsupportedValue: The result is another value.
    """
    is_tensor = isinstance(result, torch.Tensor)
    if is_tensor and shape in (None, tuple(result.shape)) and dtype in (None, result.dtype):
        return
    kind = f"{tuple(result.shape)} {result.dtype}" if is_tensor else type(result).__name__
    expected = f"{shape} {dtype}" if dtype else f"a tensor of shape {shape}"
    heading = "lazy_map: the function returned a wrong shape or dtype for slices of its operands"
    raise UnsupportedValue(error_text(heading, found=kind, expected=expected, fix=_FIX))


def check_elementwise(function: Callable[..., Any], values: Sequence[torch.Tensor]) -> None:
    """Raise unless a function returns the same bits for a window, for the window's parts, and for its transpose.

    At most 16,384 elements of the window are tested: as a matrix, or along one axis if the window has only one. These
    are cut into two parts, then into three; a matrix is also transposed. The function gets each part flattened, and
    padded to a multiple of 64 elements.

    Args:
        function: The caller's function.
        values: Each operand's elements in the window, of one shape.

    Raises:
        UnsupportedValue: An element depends on more than the elements at its index.

    Examples:
        >>> check_elementwise(torch.square, [torch.tensor([3.0, 4.0])])
        >>> try:
        ...     check_elementwise(lambda x: x / x.norm(), [torch.tensor([3.0, 4.0])])
        ... except UnsupportedValue as error:
        ...     print(str(error).splitlines()[0])
        lazy_map: the function is not elementwise: its results change if the operands are cut in 2 along axis 0
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
    """Return the number of elements that `check_elementwise` would test; 0 if these are equal in each operand.

    Examples:
        >>> elements_tested([torch.tensor([3.0, 4.0])]), elements_tested([torch.zeros(2)])
        (2, 0)
    """
    samples = [_sample(value) for value in values]
    rows = [flat_bytes(sample).view(sample.numel(), -1) for sample in samples]
    return samples[0].numel() if any(bool((row != row[:1]).any()) for row in rows) else 0


def _sample(value: torch.Tensor) -> torch.Tensor:
    """Return at most 16,384 elements of an operand, for tests; a matrix if the operand has two axes or more."""
    if value.ndim < 2:
        return value.reshape(-1)[:16_384]
    return value.reshape(-1, value.shape[-1])[:128, :128]


def _result(function: Callable[..., Any], values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Call a function with tensors flattened and padded to whole vectors, and return its result in their shape."""
    flat = [whole_vectors(value.reshape(-1)) for value in values]
    result = function(*flat)
    check_kind(result, tuple(flat[0].shape), None)
    count, shape = values[0].numel(), tuple(values[0].shape)
    return result[:count].view(shape)  # type: ignore[no-any-return]


def _not_elementwise(how: str) -> UnsupportedValue:
    heading = f"lazy_map: the function is not elementwise: its results change if the operands are {how}"
    return UnsupportedValue(error_text(heading, fix=_FIX))


def product(left: Source, right: Source) -> Boxwise:
    """Return a source that computes the product of two matrices, (M, K) and (K, N), block by block.

    The grid of blocks doesn't depend on the box that is read, so each element always has the same bits. If one block
    holds the whole product, the bits are those of ``torch.matmul``. Otherwise sums may be rounded differently: the
    difference is at most ``K * eps * (abs(left) @ abs(right))``, where K is the length of the sums.
    """
    inner, (rows_in_all, columns_in_all), dtype = left.shape[1], (left.shape[0], right.shape[1]), left.dtype
    most = limits.COMPUTED_BYTES // dtype.itemsize
    # Half of the memory is for columns of the right matrix, which stay while the left matrix's rows pass in blocks.
    width = max(1, min(columns_in_all, most // 2 // max(1, inner)))
    height = max(1, (most - width * max(1, inner)) // (max(1, inner) + width))

    def recipe(box: Box) -> Recipe:
        columns_of = list(_spans(box.offset[1], box.shape[1], width, columns_in_all)) if inner else []
        rows_of = list(_spans(box.offset[0], box.shape[0], height, rows_in_all))

        def needs() -> Iterator[tuple[Source, Box]]:
            # Each column of the right matrix is read once; the left matrix is read again for each block of columns.
            for column, columns in columns_of:
                yield right, Box((0, column), (inner, columns))
                for row, rows in rows_of:
                    yield left, Box((row, 0), (rows, inner))

        def make(parts: Iterator[torch.Tensor]) -> torch.Tensor:
            whole, (top, first) = torch.zeros(box.shape, dtype=dtype, device="cpu"), box.offset
            for column, _ in columns_of:
                columns = next(parts)
                for row, _ in rows_of:
                    block = torch.matmul(next(parts), columns)
                    low, start = max(row, top), max(column, first)
                    part = block[low - row : top + box.shape[0] - row, start - column : first + box.shape[1] - column]
                    whole[low - top :, start - first :][: part.shape[0], : part.shape[1]] = part
            return whole

        return needs(), make

    name = f"matmul({left.name}, {right.name})"
    return Boxwise(name, (rows_in_all, columns_in_all), dtype, recipe, lambda: ("matmul", left, right))


def _spans(start: int, count: int, step: int, length: int) -> Iterator[tuple[int, int]]:
    """Divide an axis into blocks, and yield (begin, length) of each block that overlaps a range of indices.

    Args:
        start: First index of the range.
        count: Number of indices in the range.
        step: Length of the blocks; the axis's last block may be shorter.
        length: Length of the axis.
    """
    first = start // step * step
    return ((low, min(step, length - low)) for low in range(first, start + count, step))


def of_whole(
    function: Callable[[torch.Tensor], torch.Tensor], operand: Source, shape: Shape, dtype: torch.dtype
) -> Boxwise:
    """Return a source that computes a caller's function of a whole tensor, such as its row means, at the first read.

    Args:
        function: Function from all of the operand's elements to a tensor of `shape` and `dtype`.
        operand: Tensor that is in memory as a whole while the function runs.
        shape: Shape of the result.
        dtype: Dtype of the result.
    """
    memo: list[torch.Tensor] = []  # the result, once it is computed

    def recipe(box: Box) -> Recipe:
        def make(parts: Iterator[torch.Tensor]) -> torch.Tensor:
            if not memo:
                memo.append(function(next(parts)))
            return memo[0][slices(*box)].clone()

        # The operand is read as a whole for every box: sums of parts could be rounded differently.
        return [(operand, Box((0,) * len(operand.shape), operand.shape))], make

    return Boxwise(f"a function of {operand.name}", shape, dtype, recipe, _unknown)


def check_one_shape(name: str, operation: str, shapes: Sequence[Shape]) -> None:
    """Raise unless operands have one shape, since a box of a broadcast result isn't a box of its operands.

    Raises:
        ShapeError: The shapes differ.
    """
    if len(set(shapes)) > 1:
        heading = f"LazyTensor {name!r}: {operation} needs tensors of one shape"
        fix = "Expand the smaller one with `expand`, or call read() first."
        raise ShapeError(error_text(heading, found=", ".join(map(str, map(tuple, shapes))), fix=fix))
