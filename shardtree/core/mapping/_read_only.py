"""Detection of donated tensors whose memory can't be written, such as the memory of a file mapped for reading.

A donated tensor is a target's tensor that a load fills in place. A system call tells whether a page of memory is
writable, without any effect on elements, files or the process.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import sys
from collections.abc import Callable, Iterable
from functools import cache

import torch

from ...errors import ShapeError, error_text

# Linux's futex. Its WAKE_OP changes a word atomically, and reports EFAULT where an ordinary write would end the
# process. "Or 0" leaves the word unchanged even if others write to it meanwhile. No thread waits at the word, so none
# is woken.
_SYSCALL_NUMBERS = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "loongarch64": 98, "ppc64le": 221, "s390x": 238}
_WAKE_OP_PRIVATE = 5 | 128
_OR_ZERO = 2 << 28
_WORD_BYTES = 4


def refuse_read_only(doing: str, donated: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raise if the memory of a donated tensor can't be written; nothing is checked on systems other than Linux.

    Only memory that is mapped without write permission is found. numpy's flag for read-only arrays isn't noticed, since
    torch doesn't pass it on.

    Args:
        doing: Name of the operation, for the message.
        donated: (key, dense tensor) pairs.

    Raises:
        ShapeError: The memory of some tensors can't be written; nothing was changed.

    Examples:
        >>> import mmap, warnings
        >>> refuse_read_only("load", [("w", torch.zeros(2))])
        >>> with warnings.catch_warnings(action="ignore"):  # torch warns that it does not support read-only memory
        ...     mapped = torch.frombuffer(mmap.mmap(-1, 8, prot=mmap.PROT_READ), dtype=torch.float32)
        >>> refuse_read_only("load", [("w", mapped)])
        Traceback (most recent call last):
        ...
        shardtree.errors.ShapeError: load: donated tensors are in memory that cannot be written
          'w'
          Donate tensors with memory of their own, as .clone() gives, or load without donate.
    """
    wrong = sorted({repr(key) for key, tensor in donated if _may_be_mapped(tensor) and _is_read_only(tensor)})
    if wrong:
        fix = f"Donate tensors with memory of their own, as .clone() gives, or {doing} without donate."
        raise ShapeError(
            error_text(f"{doing}: donated tensors are in memory that cannot be written", offenders=wrong, fix=fix)
        )


def _may_be_mapped(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's memory was allocated outside of torch: only such memory can be read-only."""
    is_plain = tensor.is_cpu and tensor.layout is torch.strided and tensor.numel() > 0
    return is_plain and not tensor.untyped_storage().resizable()


def _is_read_only(tensor: torch.Tensor) -> bool:
    futex = _futex()
    if futex is None:
        return False
    word = tensor.data_ptr() // _WORD_BYTES * _WORD_BYTES  # in the same page, whatever the items' size
    return futex(word) < 0 and ctypes.get_errno() == errno.EFAULT


@cache
def _futex() -> Callable[[int], int] | None:
    """Return a function that tests whether memory at an address can be written; None if the system has no such call.

    The function leaves the memory unchanged. It returns a negative number, with errno EFAULT, if writing is impossible.
    """
    number = _SYSCALL_NUMBERS.get(platform.machine())
    if number is None or not sys.platform.startswith("linux"):
        return None
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.argtypes = [ctypes.c_long, ctypes.c_void_p, ctypes.c_int, *[ctypes.c_long] * 2, ctypes.c_void_p, ctypes.c_int]
    call.restype = ctypes.c_long
    return lambda word: call(number, word, _WAKE_OP_PRIVATE, 0, 0, word, _OR_ZERO)
