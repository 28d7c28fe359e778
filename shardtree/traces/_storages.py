"""Storages as traced code is given them: asked only which one they are, they stay the tensor's own."""

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
"""What tells which storage it is, and nothing of its elements."""


class LentStorage(torch.TypedStorage):
    """A tensor's storage, whose memory is lent once more is asked for than which one it is.

    Torch's functions in C take the `_untyped_storage` of a typed one, so none gets at the memory unseen.
    """

    def __new__(cls, *args: Any) -> LentStorage:
        return object.__new__(cls)  # that of typed ones makes memory

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


# Python looks for these in the class.
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
    """Return whether it is torch's own code that has called: it makes other storages of one, or writes it to a file."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back
    return frame.f_code.co_filename.startswith(_TORCH)
