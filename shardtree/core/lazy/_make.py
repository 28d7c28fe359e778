"""Lazy tensors made: of what reads stored boxes, of functions of other tensors, and many at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import repeat
from typing import Any, TypeVar

import torch

from ...errors import MetadataError, UnsupportedValue, error_text, shorten
from ..ambient import shielded
from ._computed import check_kind, check_one_shape, mapped, of_whole
from ._filled import has_no_elements, memory_beside
from ._sources import ReadBox, Shape, Stored, dense
from ._tensor import LazyTensor, of_source


def stored(read_box: ReadBox, shape: Sequence[int], dtype: torch.dtype, *, name: str) -> LazyTensor:
    """Return the lazy tensor that a function reads boxes of.

    Args:
        read_box: from a box's offset and shape, both (dims,), to its elements: a new tensor that the caller owns.
            It is only called for boxes that have elements and lie inside.
        shape: the whole tensor's.
        dtype: the whole tensor's.
        name: for errors and ``repr``, as its key.

    Raises:
        MetadataError: a negative length.

    Examples:
        >>> whole = torch.arange(24).reshape(4, 6)
        >>> def read_box(offset, shape):
        ...     return whole[tuple(slice(low, low + length) for low, length in zip(offset, shape))].clone()
        >>> weight = stored(read_box, (4, 6), torch.int64, name="decoder.weight")
        >>> left, right = torch.chunk(weight, 2, dim=1)
        >>> torch.cat([right, left], dim=1)[0, :4].read()
        tensor([3, 4, 5, 0])
    """
    sizes = tuple(int(length) for length in shape)
    if any(length < 0 for length in sizes):
        raise MetadataError(error_text(f"stored: the shape of {name!r} has a negative length", found=sizes))
    return of_source(Stored(read_box, sizes, dtype, name))


@shielded
def lazy_map(function: Callable[..., torch.Tensor], *lazies: LazyTensor) -> LazyTensor:
    """Return the lazy tensor of a function of each element, computed window by window when it is read.

    Args:
        function: from tensors of one axis, in order, to a tensor of their shape; pure, and elementwise: an element of
            the result depends on the elements at its index alone. It is called at once with tensors of one element,
            for the result's dtype. The first window that is read is also computed cut in other ways, and transposed
            where it has two axes: the bits must be the same. Later windows that are larger, or whose elements vary
            more, are tested too.
        lazies: of one shape, at least one.

    Raises:
        ShapeError: the tensors are of different shapes.
        UnsupportedValue: one of them isn't lazy, or the function's result isn't a tensor of its operands' shape. Later,
            on the first read: the function isn't elementwise.

    Examples:
        >>> whole = torch.tensor([1.0, 4.0, 9.0])
        >>> def read_box(offset, shape):
        ...     return whole[offset[0] : offset[0] + shape[0]].clone()
        >>> weight = stored(read_box, (3,), torch.float32, name="weight")
        >>> lazy_map(torch.sqrt, weight)[1:].read()
        tensor([2., 3.])
    """
    others = [type(value).__name__ for value in lazies if not isinstance(value, LazyTensor)]
    if others or not lazies:
        what, fix = "lazy_map: operands that aren't lazy tensors", "Give it what open_checkpoint has as shards' data."
        raise UnsupportedValue(error_text(what, found=", ".join(others) or "none", fix=fix))
    check_one_shape(lazies[0].name, "lazy_map", [one.shape for one in lazies])
    sample = function(*(torch.ones(1, dtype=torch.float32, device="cpu").to(one.dtype) for one in lazies))
    check_kind(sample, (1,), None)
    name = f"lazy_map({', '.join(shorten((one.name for one in lazies), shown=2))})"
    return of_source(mapped(function, lazies, sample.dtype, name))


def computed(
    function: Callable[[torch.Tensor], torch.Tensor], data: Any, shape: Sequence[int], dtype: torch.dtype
) -> Any:
    """Return what a function makes of a shard's data, whatever that is: for lenses of one's own that compute.

    Of a lazy tensor the result is lazy: the function is called once, at the first read, with all elements. So it may do
    what isn't recorded (a maximum, quantising), and one tensor at a time is whole in memory. Where there
    are no elements, as on the meta device, or none that count, as while a load builds its target, the result is memory
    alone: the function isn't called.

    Args:
        function: from a tensor to a tensor of that shape and dtype; pure.
        data: a tensor, a lazy tensor, or None, which stays None.
        shape: of the result.
        dtype: of the result.

    Returns:
        A tensor, a lazy tensor or None, as the data.

    Examples:
        >>> weight = stored(lambda offset, shape: torch.ones(shape), (4, 2), torch.float32, name="weight")
        >>> computed(lambda table: table.sum(0), weight, (2,), torch.float32).read()
        tensor([4., 4.])
        >>> computed(torch.abs, torch.tensor([-1.0]), (1,), torch.float32)
        tensor([1.])
    """
    if isinstance(data, LazyTensor):
        return of_source(of_whole(function, data, tuple(shape), dtype))
    if isinstance(data, torch.Tensor) and has_no_elements(data):
        return memory_beside(data, shape, dtype)
    return None if data is None else function(data)


# Many instances of frozen classes at once, set column by column, without their constructors' calls and checks.

Value = TypeVar("Value")


def frozen_values(kind: type[Value], count: int, columns: Mapping[str, Iterable[Any]]) -> list[Value]:
    """Return instances of a frozen dataclass with slots whose constructor isn't called.

    For hundreds of thousands of values that were checked as columns: constructors' calls would take most of the time.

    Args:
        kind: the class.
        count: how many.
        columns: for each of its slots a value of each instance, at least `count`; they aren't checked.

    Examples:
        >>> from shardtree.core.lazy import Fetch
        >>> from shardtree.core.lazy._sources import Stored
        >>> columns = {"reader": [None, None], "shape": [(2,), (3,)], "dtype": [torch.int8] * 2, "name": ["a", "b"]}
        >>> [(source.name, source.shape) for source in frozen_values(Stored, 2, columns)]
        [('a', (2,)), ('b', (3,))]
    """
    values = list(map(object.__new__, repeat(kind, count)))
    for name, column in columns.items():
        # By the slot's descriptor: a frozen class only forbids `__setattr__`. The deque of length 0 runs the map in C.
        deque(map(getattr(kind, name).__set__, values, column), maxlen=0)
    return values


def stored_each(
    readers: Iterable[ReadBox], shapes: Sequence[Shape], dtypes: Iterable[torch.dtype], names: Iterable[str]
) -> list[LazyTensor]:
    """Return what `stored` gives for each row, which isn't checked: shapes are tuples of ints of at least 0.

    Args:
        readers: what reads boxes of each tensor.
        shapes: of each tensor.
        dtypes: of each tensor.
        names: of each tensor, for errors and ``repr``.
    """
    count = len(shapes)
    # A model has few different shapes: each view is computed once, and shared.
    places = {shape: dense(shape) for shape in set(shapes)}
    sources = frozen_values(Stored, count, {"reader": readers, "shape": shapes, "dtype": dtypes, "name": names})
    place = map(places.__getitem__, shapes)
    return frozen_values(LazyTensor, count, {"source": sources, "place": place, "casts": repeat(())})
