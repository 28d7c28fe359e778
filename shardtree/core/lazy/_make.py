"""Constructors of lazy tensors: from functions that read stored boxes, from other tensors, and many at once."""

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
    """Return a lazy tensor that calls a function to read its boxes.

    Args:
        read_box: Function from a box's offset and shape, both (dims,), to its elements: a new tensor that the caller
            owns. It is only called for boxes that have elements and lie inside of the tensor.
        shape: Shape of the whole tensor.
        dtype: Dtype of the tensor.
        name: Name for errors and ``repr``, such as the tensor's key.

    Raises:
        MetadataError: A length is negative.

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
    """Return the lazy result of an elementwise function, computed window by window when it is read.

    Args:
        function: Function from 1-D tensors, one for each operand in order, to a tensor of their shape. It must be pure
            and elementwise: an element of the result depends only on the elements at its index. It is called at once
            with tensors of one element, to learn the result's dtype. When the first window is read, the function is
            tested: it is also called for parts of the window and, if the window has two axes or more, for its elements
            in transposed order, and must return the same bits. It is tested again if a later window has more elements
            that can be tested.
        lazies: Operands of one shape, at least one.

    Raises:
        ShapeError: The tensors have different shapes.
        UnsupportedValue: An operand isn't lazy, or the function's result isn't a tensor of its operands' shape. Later,
            at a read: the function isn't elementwise.

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
        heading, fix = "lazy_map: operands must be lazy tensors", "Pass the data of shards from open_checkpoint."
        raise UnsupportedValue(error_text(heading, found=", ".join(others) or "no operands", fix=fix))
    check_one_shape(lazies[0].name, "lazy_map", [lazy.shape for lazy in lazies])
    sample = function(*(torch.ones(1, dtype=torch.float32, device="cpu").to(lazy.dtype) for lazy in lazies))
    check_kind(sample, (1,), None)
    name = f"lazy_map({', '.join(shorten((lazy.name for lazy in lazies), shown=2))})"
    return of_source(mapped(function, lazies, sample.dtype, name))


def computed(
    function: Callable[[torch.Tensor], torch.Tensor], data: Any, shape: Sequence[int], dtype: torch.dtype
) -> Any:
    """Return a function's result for the data of a shard, lazy or not, for use in your own lenses.

    The result for a lazy tensor is lazy: the function is called once, at the first read, with all elements. It may
    therefore use operations that lazy tensors don't record (a maximum, quantising), at the cost of one whole tensor in
    memory at a time. The function isn't called for data on the meta device, or while a load builds its target, whose
    tensors are only memory to fill; the result is then uninitialised memory.

    Args:
        function: Pure function from a tensor to a tensor of the given shape and dtype.
        data: A tensor, a lazy tensor, or None, which stays None.
        shape: Shape of the result.
        dtype: Dtype of the result.

    Returns:
        A tensor, a lazy tensor or None, like the data.

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


# Many instances of frozen classes at once, set column by column, since constructors' calls and checks take long.

Value = TypeVar("Value")


def frozen_values(kind: type[Value], count: int, columns: Mapping[str, Iterable[Any]]) -> list[Value]:
    """Return instances of a frozen dataclass with slots, made without calling its constructor.

    It is meant for hundreds of thousands of values that were checked as columns: calls of their constructor would take
    most of the time.

    Args:
        kind: Class of the instances.
        count: Number of instances.
        columns: Values of each slot by its name, at least one for each instance; they aren't checked.

    Examples:
        >>> from shardtree.core.lazy import Fetch
        >>> from shardtree.core.lazy._sources import Stored
        >>> columns = {"reader": [None, None], "shape": [(2,), (3,)], "dtype": [torch.int8] * 2, "name": ["a", "b"]}
        >>> [(source.name, source.shape) for source in frozen_values(Stored, 2, columns)]
        [('a', (2,)), ('b', (3,))]
    """
    values = list(map(object.__new__, repeat(kind, count)))
    for name, column in columns.items():
        # Slots are set by their descriptors: a frozen class only forbids `__setattr__`. The deque runs the map in C.
        deque(map(getattr(kind, name).__set__, values, column), maxlen=0)
    return values


def stored_each(
    readers: Iterable[ReadBox], shapes: Sequence[Shape], dtypes: Iterable[torch.dtype], names: Iterable[str]
) -> list[LazyTensor]:
    """Return many lazy tensors as `stored` makes them, but without its checks.

    Args:
        readers: Function that reads boxes, for each tensor.
        shapes: Shape of each tensor, a tuple of ints of at least 0.
        dtypes: Dtype of each tensor.
        names: Name of each tensor, for errors and ``repr``.
    """
    count = len(shapes)
    # A model has few different shapes, so each view is computed once, and shared.
    places = {shape: dense(shape) for shape in set(shapes)}
    sources = frozen_values(Stored, count, {"reader": readers, "shape": shapes, "dtype": dtypes, "name": names})
    place = map(places.__getitem__, shapes)
    return frozen_values(LazyTensor, count, {"source": sources, "place": place, "casts": repeat(())})
