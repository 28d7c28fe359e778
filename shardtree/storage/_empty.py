"""New memory for a load, in huge pages where the system has them: first contact is what costs, and it is per page."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

_LEAST_BYTES = 4 * 1024 * 1024


def empty_tensor(*shape: Any, **options: Any) -> torch.Tensor:
    """Return what ``torch.empty`` returns, its memory in huge pages if there is much of it in the CPU's memory.

    Examples:
        >>> empty_tensor((2, 3), dtype=torch.bfloat16).shape
        torch.Size([2, 3])
    """
    tensor = torch.empty(*shape, **options)
    if tensor.is_cpu and tensor.nbytes >= _LEAST_BYTES:
        _prefer_huge_pages(tensor.data_ptr(), tensor.nbytes)
    return tensor


def _prefer_huge_pages(address: int, length: int) -> None:
    call = _madvise()
    begin = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    if call is not None:
        # A refusal changes nothing but speed.
        call(begin, address + length - begin, mmap.MADV_HUGEPAGE)


@cache
def _madvise() -> Callable[..., int] | None:
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    call = ctypes.CDLL(None).madvise
    call.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return call
