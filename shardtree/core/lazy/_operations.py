"""The torch operations that a lazy tensor records or answers; all others are refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import index as as_int
from types import EllipsisType
from typing import Any, TypeVar

import torch

from ...errors import UnsupportedValue, error_text
from ._sources import Strided
from ._steady import ALIASES

Class = TypeVar("Class", bound=type)

# Operations that are recorded: those that return a view in torch.
VIEWS = {
    *("__getitem__", "narrow", "select", "split", "split_with_sizes", "chunk", "tensor_split", "unbind"),
    *("transpose", "swapaxes", "swapdims", "t", "permute", "movedim", "moveaxis", "unsqueeze", "squeeze"),
    *("reshape", "view", "flatten", "ravel", "unflatten", "expand", "broadcast_to"),
}
# Operations that return the tensor itself if they have no options: it is immutable and on the CPU.
UNCHANGED: dict[str, torch.dtype | None] = {"clone": None, "contiguous": None, "cpu": None, "detach": None}
JOINS = {"cat", "concat", "concatenate", "stack"}
ARITHMETIC = {"add", "sub", "rsub", "mul", "div", "neg", *ALIASES}
PRODUCTS = {"matmul", "mm"}
INQUIRIES = {
    *("dim", "ndimension", "size", "numel", "nelement"),
    *("element_size", "is_complex", "is_floating_point", "is_signed"),
}
CASTS: dict[str, torch.dtype | None] = {
    "bfloat16": torch.bfloat16,
    "bool": torch.bool,
    "byte": torch.uint8,
    "cdouble": torch.complex128,
    "cfloat": torch.complex64,
    "char": torch.int8,
    "double": torch.float64,
    "float": torch.float32,
    "half": torch.float16,
    "int": torch.int32,
    "long": torch.int64,
    "short": torch.int16,
}

_BINARY = (
    *("floordiv", "mod", "divmod", "pow"),
    *("lshift", "rshift", "and", "xor", "or"),
)
_OTHER = (
    *("lt", "le", "gt", "ge", "pos", "abs", "invert", "round", "bool", "int", "float", "complex", "array"),
    *("setitem", "delitem", "contains", "reversed", "reduce_ex"),
)
_OPERATORS = [*_BINARY, *(f"r{word}" for word in _BINARY), *_OTHER]


_FIX = """Call read() first, and apply the operation to the result.
  Without read(), use indexing, narrow, split, chunk, transpose, permute, reshape that returns
  a view, cat, stack, dtype casts, + - * / with scalars and lazy tensors of one shape, products of
  two matrices, or `lazy_map` for a function of each element."""


def refusal(name: str, operation: str, why: str = "is not recorded") -> UnsupportedValue:
    """Return the error for an operation that a lazy tensor refuses.

    Examples:
        >>> print(refusal("w", "add"))  # doctest: +ELLIPSIS
        LazyTensor 'w': add is not recorded
          Call read() first, and apply the operation to the result.
          Without read(), use indexing, ...
    """
    return UnsupportedValue(error_text(f"LazyTensor {name!r}: {operation} {why}", fix=_FIX))


def refusing_operators(cls: Class) -> Class:
    """Decorate a class so that unsupported operators, such as ``%``, raise an error on its instances.

    ``__getattr__`` of the class can't do this, since operators bypass it.
    """
    for word in _OPERATORS:
        setattr(cls, f"__{word}__", _refuser(f"__{word}__"))
    return cls


def _refuser(operation: str) -> Callable[..., Any]:
    def refuse(self: Any, *args: object, **kwargs: object) -> Any:
        raise refusal(self.name, "pickling" if operation == "__reduce_ex__" else operation)

    refuse.__name__ = operation
    return refuse


def is_view(result: torch.Tensor, operand: torch.Tensor) -> bool:
    """Return whether an operation's result is a view of its operand; an empty result counts as a view."""
    # Storages are compared, since meta tensors have no addresses.
    return not result.numel() or result.untyped_storage()._cdata == operand.untyped_storage()._cdata


def place_of(tensor: torch.Tensor) -> Strided:
    """Return the storage offset, size and strides of a tensor as a `Strided`."""
    return Strided(int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride())


def check_index(name: str, index: object) -> None:
    """Raise unless an index selects a view, as ints, slices, None and Ellipsis do."""
    for entry in index if isinstance(index, tuple) else (index,):
        if not (entry is None or isinstance(entry, slice | EllipsisType) or _is_int(entry)):
            raise refusal(name, f"indexing with {type(entry).__name__}")


def _is_int(value: Any) -> bool:
    if isinstance(value, bool | torch.Tensor):
        return False
    try:
        as_int(value)
    except TypeError:
        return False
    return True


def requested_dtype(
    name: str, operation: str, args: Sequence[object], kwargs: Mapping[str, object]
) -> torch.dtype | None:
    """Return the dtype that an operation casts a lazy tensor to; None if the operation leaves the tensor unchanged.

    Raises:
        UnsupportedValue: The operation isn't a cast, or names a device other than the CPU, or an unsupported option.
    """
    if operation == "to":
        return _to(name, args, kwargs)
    if operation == "type" and len(args) == 1 and not kwargs and isinstance(args[0], torch.dtype):
        return args[0]
    if operation in CASTS | UNCHANGED and not args and not kwargs:
        return (CASTS | UNCHANGED)[operation]
    raise refusal(name, operation)


def _to(name: str, args: Sequence[object], kwargs: Mapping[str, object]) -> torch.dtype | None:
    if unknown := kwargs.keys() - {"dtype", "device", "copy", "non_blocking"}:
        raise refusal(name, f"to({', '.join(sorted(unknown))}=...)")
    # A positional bool is `non_blocking` or `copy`, which make no difference for an immutable tensor.
    values = (*args, kwargs.get("dtype"), kwargs.get("device"))
    options = [value for value in values if not (value is None or isinstance(value, bool))]
    dtypes = [value for value in options if isinstance(value, torch.dtype)]
    for place in options:
        is_cpu = isinstance(place, str | torch.device) and torch.device(place).type == "cpu"
        if not isinstance(place, torch.dtype) and not is_cpu:
            raise refusal(name, f"to({place if isinstance(place, str) else type(place).__name__})")
    return dtypes[0] if dtypes else None
