"""Functions that read a tensor's elements one by one, as those of tensors in lists, past everything that records."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

_MAKES = {"tensor", "as_tensor", "asarray", "new_tensor", "new", "sparse_coo_tensor"}
_INDEXES = {"__getitem__", "__setitem__"}
_NUMBERS = {"__float__", "__int__", "__index__", "__complex__"}


def read_alone(func: Any, args: Sequence[Any]) -> tuple[str, list[torch.Tensor]]:
    """Return the tensors that a function of torch reads by itself, after the function's name for a message.

    Args:
        func: a function, as torch's function modes are told it.
        args: its arguments.
    """
    name = getattr(func, "__name__", "")
    if name in _NUMBERS:
        return "item, bool, int or float", list(args[:1])
    if name in _MAKES:
        lists = [each for each in args if isinstance(each, list | tuple)]
    elif name in _INDEXES:
        lists = [each for each in (args[1] if isinstance(args[1], tuple) else args[1:2]) if isinstance(each, list)]
    else:
        return name, []
    return f"{name} with a list of tensors", list(_within(lists))


def _within(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _within(each)
