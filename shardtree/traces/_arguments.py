"""Arguments of torch's operations: the tensors among them, those that an operation changes, and kinds of tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import torch

_SPARSE = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def tensors_in(args: Sequence[Any], kwargs: Mapping[str, Any] = MappingProxyType({})) -> list[torch.Tensor]:
    """Return the tensors among arguments, also in nested lists; torch's pytrees would do the same, but slowly."""
    tensors = []
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        elif isinstance(value, (list, tuple)) and value:
            tensors += tensors_in(value)
    return tensors


@lru_cache(maxsize=1024)
def _places_written(func: Any) -> tuple[tuple[int, str], ...]:
    """Return (position, name) of each argument that an operation writes to."""
    arguments = enumerate(func._schema.arguments)
    return tuple(
        (number, argument.name)
        for number, argument in arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return the tensor arguments that an operation writes to."""
    places = _places_written(func)
    return tensors_in([args[place] if place < len(args) else kwargs.get(word) for place, word in places])


@lru_cache(maxsize=1024)
def is_composite(func: Any) -> bool:
    """Return whether torch implements an operation by calling other operations."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"))


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """Return a value, or a list of values, with a function applied to each."""
    return [function(item) for item in value] if isinstance(value, (list, tuple)) else function(value)


def is_ordinary(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is strided and leaves operations to torch: parameters are ordinary, DTensors are not."""
    return tensor.layout is torch.strided and is_plain(type(tensor))


def elements_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor that holds a tensor's elements: the tensor itself, or the values of a sparse one."""
    if tensor.layout not in _SPARSE or not is_plain(type(tensor)):
        return tensor
    return tensor._values() if tensor.is_sparse else tensor.values()


def is_plain(kind: Any) -> bool:
    """Return whether a tensor class, such as `Parameter`, has no ``__torch_dispatch__`` of its own."""
    return bool(kind.__torch_dispatch__ == torch.Tensor.__torch_dispatch__)
