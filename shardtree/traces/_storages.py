"""Proxies of storages for traced code, which note every access that may reach a storage's elements."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from ._cells import Cells

_OURS, _TORCH = __file__.removesuffix("_storages.py"), tuple(torch.__path__)
_WHICH = {
    *("data_ptr", "nbytes", "size", "device", "_cdata", "element_size", "is_cuda", "dtype", "is_shared", "_weak_ref"),
    *("_data_ptr", "_nbytes", "_size"),
}
"""Attributes that identify a storage, and give no access to its elements."""


class LentStorage(torch.TypedStorage):
    """A proxy of a tensor's storage, which notes when code may reach the memory.

    Code may compare storages, and ask for `data_ptr` or `nbytes`. Any other use counts as giving the memory to objects
    that the trace can't see: from then on, a write of traced values to this memory is refused. Torch's functions in C
    read `_untyped_storage` of the proxy, so their use is noted too.
    """

    def __new__(cls, *args: Any) -> LentStorage:
        return object.__new__(cls)  # TypedStorage's own would allocate memory

    def __init__(self, record: Cells, tensor: torch.Tensor, true: Any, name: str) -> None:
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            alias = tensor.detach()  # the tensor itself may get other data
        object.__setattr__(self, "_which", (record, alias, true, name))

    def __getattribute__(self, word: str) -> Any:
        record, alias, true, name = object.__getattribute__(self, "_which")
        if word == "__class__":
            return LentStorage
        if word == "dtype":
            return alias.dtype
        if word not in _WHICH and not record.is_done:
            record.lend(alias, name)
        if word == "_untyped_storage":
            return true._untyped_storage if isinstance(true, torch.TypedStorage) else true
        return getattr(true, word)

    def __setattr__(self, word: str, value: Any) -> None:
        raise AttributeError(word)

    def __len__(self) -> int:
        return int(self.size())  # type: ignore[no-untyped-call]


def _lends(word: str) -> Callable[..., Any]:
    def forward(self: LentStorage, *args: Any) -> Any:
        return getattr(self, word)(*args)

    return forward


# Python looks these methods up in the class.
for _word in (
    "__getitem__",
    "__setitem__",
    "__iter__",
    "__repr__",
    "__str__",
    "__copy__",
    "__deepcopy__",
    "__reduce__",
):
    setattr(LentStorage, _word, _lends(_word))


def is_asked_by_torch() -> bool:
    """Return whether torch's own code asks for a storage, for example to write it to a file or to derive another."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back
    return frame.f_code.co_filename.startswith(_TORCH)
