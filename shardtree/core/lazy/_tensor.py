"""The lazy tensor: a description of a tensor whose elements are read only by ``read()``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from math import prod
from numbers import Number
from operator import add, matmul, mul, neg, sub, truediv
from typing import Any, Self

import numpy as np
import torch

from ...errors import ShapeError, error_text, shorten
from ..ambient import shielded
from . import _operations as operations
from ._computed import arithmetic, check_one_shape, product
from ._sources import (
    Box,
    Concatenated,
    Fetch,
    Shape,
    Source,
    Strided,
    covering,
    dense,
    narrow,
)

Args = tuple[Any, ...]


@operations.refusing_operators
@dataclass(frozen=True, slots=True, eq=False, repr=False)
class LazyTensor:
    """A description of a tensor: a view of a source, then casts. It is immutable, and equal only to itself.

    These operations return new lazy tensors and read nothing, as functions, methods or operators: torch's view
    operations, ``torch.cat``, ``torch.stack``, dtype casts, ``+ - * /`` and products of matrices. Every other operation
    that needs elements raises ``UnsupportedValue`` with the advice to call ``read()``.

    Attributes:
        source: Dense tensor that is viewed: stored, or computed, for example by ``torch.cat``.
        place: Offset, size and strides of the view in the source.
        casts: Dtypes to which the elements are cast after a read, in order.
    """

    source: Source
    place: Strided
    casts: tuple[torch.dtype, ...] = ()

    @property
    def name(self) -> str:
        """The source's name."""
        return self.source.name

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.place.size)

    @property
    def dtype(self) -> torch.dtype:
        return self.casts[-1] if self.casts else self.source.dtype

    @property
    def ndim(self) -> int:
        return len(self.place.size)

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """The size in bytes of the result of ``read()``."""
        return prod(self.place.size) * self.itemsize

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def layout(self) -> torch.layout:
        return torch.strided

    @property
    def requires_grad(self) -> bool:
        return False

    @property
    def T(self) -> LazyTensor:  # noqa: N802 - torch's name
        return self.permute(*reversed(range(self.ndim)))  # type: ignore[no-any-return]

    @property
    def mT(self) -> LazyTensor:  # noqa: N802 - torch's name
        return self.transpose(-2, -1)  # type: ignore[no-any-return]

    @property
    def fetches(self) -> tuple[Fetch, ...]:
        """The boxes of stored tensors that ``read()`` fetches, in order."""
        return tuple(self.box_fetches((0,) * self.ndim, self.place.size))

    @property
    def nbytes_to_read(self) -> int:
        """The number of bytes that ``read()`` fetches, including elements that the view skips."""
        return sum(fetch.nbytes for fetch in self.fetches)

    @shielded
    def read(self) -> torch.Tensor:
        """Return the elements as a new dense row-major tensor that the caller owns.

        Only the smallest boxes of the stored tensors that hold the elements are fetched.

        Raises:
            ShapeError: Storage returned a box of another shape or dtype.
        """
        return _elements(self.source, self.place, self.casts)

    @shielded
    def read_box(self, offset: Shape, shape: Shape) -> torch.Tensor:
        """Return one box of the elements, like ``read()``.

        Args:
            offset: First index of the box, (dims,).
            shape: Shape of the box, (dims,). The box must lie inside.
        """
        return _elements(self.source, narrow(self.place, Box(offset, shape)), self.casts)

    def box_fetches(self, offset: Shape, shape: Shape) -> Iterator[Fetch]:
        """Yield the boxes of stored tensors that are fetched when a box of this tensor is read."""
        if prod(shape):
            box, _ = covering(narrow(self.place, Box(offset, shape)), self.source.shape)
            yield from self.source.box_fetches(*box)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return _apply(func, tuple(args), dict(kwargs or {}))

    def __getattr__(self, name: str) -> Any:
        # Python's and NumPy's protocols look for private names, and must not find torch's methods under these.
        method = None if name.startswith("_") else getattr(torch.Tensor, name, None)
        if not callable(method):
            raise AttributeError(f"LazyTensor {self.name!r} has no attribute {name!r}; call read() for a tensor")
        return lambda *args, **kwargs: _apply(method, (self, *args), kwargs)

    def __getitem__(self, index: Any) -> LazyTensor:
        offset, size, stride = self.place
        if type(index) is slice and index.step is None and size:
            # A few rows are the most frequent request; torch's algebra of views would take longer than the read.
            first, last, _ = index.indices(size[0])
            return _at(self, Strided(offset + first * stride[0], (max(last - first, 0), *size[1:]), stride))
        return _view(self, torch.Tensor.__getitem__, (self, index), {})  # type: ignore[no-any-return]

    def __len__(self) -> int:
        if not self.ndim:  # otherwise torch.as_tensor and torch.tensor would read it as a sequence
            raise operations.refusal(self.name, "__len__ of a 0-dim tensor")
        return self.shape[0]

    __array_ufunc__ = None  # a NumPy scalar on the left leaves arithmetic to this class

    def __add__(self, other: Any) -> LazyTensor:
        return _apply(add, (self, other), {})  # type: ignore[no-any-return]

    def __radd__(self, other: Any) -> LazyTensor:
        return _apply(add, (other, self), {})  # type: ignore[no-any-return]

    def __sub__(self, other: Any) -> LazyTensor:
        return _apply(sub, (self, other), {})  # type: ignore[no-any-return]

    def __rsub__(self, other: Any) -> LazyTensor:
        return _apply(sub, (other, self), {})  # type: ignore[no-any-return]

    def __mul__(self, other: Any) -> LazyTensor:
        return _apply(mul, (self, other), {})  # type: ignore[no-any-return]

    def __rmul__(self, other: Any) -> LazyTensor:
        return _apply(mul, (other, self), {})  # type: ignore[no-any-return]

    def __truediv__(self, other: Any) -> LazyTensor:
        return _apply(truediv, (self, other), {})  # type: ignore[no-any-return]

    def __rtruediv__(self, other: Any) -> LazyTensor:
        return _apply(truediv, (other, self), {})  # type: ignore[no-any-return]

    def __neg__(self) -> LazyTensor:
        return _apply(neg, (self,), {})  # type: ignore[no-any-return]

    def __matmul__(self, other: Any) -> LazyTensor:
        return _apply(matmul, (self, other), {})  # type: ignore[no-any-return]

    def __rmatmul__(self, other: Any) -> LazyTensor:
        return _apply(matmul, (other, self), {})  # type: ignore[no-any-return]

    def __iter__(self) -> Iterator[LazyTensor]:
        len(self)  # refuses a 0-dim tensor
        return iter(self.unbind(0))

    def __eq__(self, other: object) -> bool:
        # torch's `==` compares elementwise, which needs elements; returning False would be wrong.
        if isinstance(other, torch.Tensor | np.ndarray | Number):
            raise operations.refusal(self.name, "__eq__")
        return self is other

    __hash__ = object.__hash__

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __repr__(self) -> str:
        return f"LazyTensor({self.name!r}, {self.place.size}, {self.dtype})"


_PUT_SOURCE, _PUT_PLACE, _PUT_CASTS = (getattr(LazyTensor, name).__set__ for name in ("source", "place", "casts"))


def _at(lazy: LazyTensor, place: Strided) -> LazyTensor:
    """Return a lazy tensor with the same source and casts, but another view."""
    # The constructor of a frozen class isn't called, since it takes twice as long.
    view = object.__new__(LazyTensor)
    _PUT_SOURCE(view, lazy.source)
    _PUT_PLACE(view, place)
    _PUT_CASTS(view, lazy.casts)
    return view


def of_source(source: Source) -> LazyTensor:
    """Return a lazy tensor that is the view of a whole source."""
    return LazyTensor(source, dense(source.shape))


def _apply(func: Callable[..., Any], args: Args, kwargs: dict[str, Any]) -> Any:
    """Record a torch function or method of lazy tensors, or answer it from shapes and dtypes, or refuse it."""
    name = func.__name__
    if name in operations.JOINS:
        return _concatenate(func, *args, **kwargs)
    if name in operations.ARITHMETIC:
        return _elementwise(func, args, kwargs)
    if name in operations.PRODUCTS:
        return _matmul(func, args, kwargs)
    operands = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor | LazyTensor)]
    lazy = next((value for value in operands if isinstance(value, LazyTensor)), None)
    # Views, casts and inquiries take one tensor; any other operation on several tensors needs elements.
    if lazy is None or len(operands) > 1:
        raise operations.refusal("?" if lazy is None else lazy.name, name)
    if name in operations.VIEWS:
        return _view(lazy, func, args, kwargs)
    if name in operations.INQUIRIES:
        return _call_with_meta(lazy, _meta(lazy), func, args, kwargs)
    options = {word: value for word, value in kwargs.items() if value is not lazy}
    dtype = operations.requested_dtype(lazy.name, name, tuple(value for value in args if value is not lazy), options)
    return lazy if dtype in (None, lazy.dtype) else replace(lazy, casts=(*lazy.casts, dtype))


def _meta(lazy: LazyTensor) -> torch.Tensor:
    """Return a lazy tensor as a meta tensor; operations on it show the views, shapes and dtypes of their results."""
    return torch.empty(lazy.source.shape, dtype=lazy.dtype, device="meta").as_strided(
        *lazy.place[1:], lazy.place.offset
    )


def _call_with_meta(
    lazy: LazyTensor, meta: torch.Tensor, func: Callable[..., Any], args: Args, kwargs: dict[str, Any]
) -> Any:
    """Call an operation with the meta tensor in place of the lazy one, and return its result."""
    words = {word: meta if value is lazy else value for word, value in kwargs.items()}
    return func(*(meta if value is lazy else value for value in args), **words)


def _view(lazy: LazyTensor, func: Callable[..., Any], args: Args, kwargs: dict[str, Any]) -> Any:
    if func.__name__ == "__getitem__":
        operations.check_index(lazy.name, args[1])
    meta = _meta(lazy)
    result = _call_with_meta(lazy, meta, func, args, kwargs)
    pieces = (result,) if isinstance(result, torch.Tensor) else tuple(result)
    if not all(piece.dtype == meta.dtype and operations.is_view(piece, meta) for piece in pieces):
        raise operations.refusal(lazy.name, func.__name__, f"of this {tuple(meta.shape)} view cannot be a view itself")
    views = tuple(LazyTensor(lazy.source, operations.place_of(piece), lazy.casts) for piece in pieces)
    return views[0] if isinstance(result, torch.Tensor) else views


def _concatenate(
    func: Callable[..., Any], tensors: Sequence[Any], dim: int = 0, *, axis: int | None = None, out: Any = None
) -> LazyTensor:
    """Return the lazy result of ``torch.cat``, or of ``torch.stack``, which is a cat of unsqueezed tensors."""
    name = next((part.name for part in tensors if isinstance(part, LazyTensor)), "?")
    if out is not None or not all(isinstance(part, LazyTensor) for part in tensors):
        raise operations.refusal(name, f"{func.__name__} with a tensor that is not lazy")
    along = dim if axis is None else axis
    result = func([_meta(part) for part in tensors], dim=along)
    along %= max(result.ndim, 1)
    parts = [part.unsqueeze(along) if func.__name__ == "stack" else part for part in tensors]
    # Empty parts add nothing; torch accepts one of shape (0,) beside parts of any shape.
    pieces = tuple(part.to(result.dtype) for part in parts if prod(part.shape))
    return of_source(Concatenated(pieces, along, tuple(result.shape), result.dtype))


def _elementwise(func: Callable[..., Any], args: Args, kwargs: dict[str, Any]) -> LazyTensor:
    """Return the lazy result of an elementwise sum, difference, product, quotient or negative."""
    values = [*args, *(kwargs.pop(word) for word in ("input", "other") if word in kwargs)]
    lazies = [value for value in values if isinstance(value, LazyTensor)]
    operands = tuple(_operand(lazies[0].name, func, value) for value in values)
    name = f"{func.__name__}({', '.join(shorten((lazy.name for lazy in lazies), shown=2))})"
    if kwargs.get("out") is not None:
        raise operations.refusal(lazies[0].name, f"{func.__name__} with out=")
    check_one_shape(lazies[0].name, func.__name__, [lazy.shape for lazy in lazies])
    # Meta tensors apply torch's own promotion of tensors, 0-dim tensors and Python numbers.
    result = func(*(_meta(value) if isinstance(value, LazyTensor) else value for value in operands), **kwargs)
    return of_source(arithmetic(func, operands, kwargs, tuple(result.shape), result.dtype, name))


def _operand(name: str, func: Callable[..., Any], value: Any) -> Any:
    if isinstance(value, LazyTensor | Number):
        return value
    if isinstance(value, torch.Tensor) and value.ndim == 0 and value.device.type == "cpu":
        return value.detach().clone()  # the caller may write to the original
    kind = "a tensor that is not lazy" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
    raise operations.refusal(name, f"{func.__name__} with {kind}")


def _matmul(func: Callable[..., Any], args: Args, kwargs: dict[str, Any]) -> LazyTensor:
    operands = [*args, *(kwargs.pop(word) for word in ("input", "other", "mat2") if word in kwargs)]
    lazy = next(value for value in (*operands, *kwargs.values()) if isinstance(value, LazyTensor))
    if options := [word for word, value in kwargs.items() if value is not None]:
        raise operations.refusal(lazy.name, f"{func.__name__} with {options[0]}=")
    if len(operands) != 2 or not all(isinstance(value, LazyTensor) and value.ndim == 2 for value in operands):
        raise operations.refusal(lazy.name, f"{func.__name__} of anything but two lazy matrices")
    left, right = operands
    if left.shape[1] != right.shape[0] or left.dtype != right.dtype:
        kinds = f"{tuple(left.shape)} {left.dtype} and {tuple(right.shape)} {right.dtype}"
        expected = "as many columns on the left as rows on the right, and one dtype"
        heading = f"LazyTensor {lazy.name!r}: operands of {func.__name__} do not fit"
        raise ShapeError(error_text(heading, found=kinds, expected=expected))
    return of_source(product(left, right))


def _elements(source: Source, view: Strided, casts: tuple[torch.dtype, ...]) -> torch.Tensor:
    """Read the elements of a source's view, and return them after the casts as a new dense tensor."""
    if 0 in view.size:
        return torch.empty(view.size, dtype=casts[-1] if casts else source.dtype, device="cpu")
    box, inner = covering(view, source.shape)
    elements = source.read_box(*box)
    if inner != dense(box.shape) or not elements.is_contiguous():
        elements = _copy_view(elements, inner)
    return reduce(torch.Tensor.to, casts, elements)


def _copy_view(box: torch.Tensor, view: Strided) -> torch.Tensor:
    """Return a view's elements as a dense tensor, taken from the box that contains them."""
    flat = box.contiguous()
    elements = flat.as_strided(view.size, view.stride, flat.storage_offset() + view.offset)
    if elements.is_contiguous() and elements.numel() == flat.numel():
        return flat.as_strided(view.size, dense(view.size).stride, flat.storage_offset())
    # A copy lets the rest of the box be freed.
    return elements.clone(memory_format=torch.contiguous_format)
