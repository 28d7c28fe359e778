"""The elements of meta tensors that code makes of numbers alone: indices, masks, rows of padding.

A meta tensor has no memory. So where an engine is built on meta, what `torch.arange` or a comparison makes there is
computed once more on the CPU, and kept beside the storage.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ._arguments import is_ordinary, mapped, tensors_in, written
from ._steps import operator_name

_MOST = 1 << 22
"""The largest result that is computed; indices and masks of a loader are smaller."""

Known = Callable[[torch.Tensor], torch.Tensor | None]

_FILLS = {"zeros": 0, "ones": 1, "zeros_like": 0, "ones_like": 1, "new_zeros": 0, "new_ones": 1}
_FILLED_AT = {"full": 1, "full_like": 1, "new_full": 2, "scalar_tensor": 0}


class MetaConstants:
    """Known elements of meta storages of one run, by the storages' addresses."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[StorageWeakRef, torch.Tensor]] = {}

    def elements(self, storage: torch.UntypedStorage) -> torch.Tensor | None:
        """Return the flat elements of a storage, or one element that all of them equal; None if they aren't known."""
        reference, elements = self._known.get(storage._cdata, (None, None))
        return elements if reference is not None and not reference.expired() else None  # type: ignore[no-untyped-call]

    def of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return a meta tensor's elements as a view in the CPU's memory, None if they aren't known."""
        elements = self.elements(tensor.untyped_storage()) if is_ordinary(tensor) else None
        if elements is None or elements.dtype is not tensor.dtype or tensor.is_conj() or tensor.is_neg():
            return None
        if elements.numel() == 1:
            return elements.reshape(()).expand(tensor.shape)
        return elements.as_strided(tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def note(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any, known: Known) -> None:
        """Keep what an operation made on meta, if its arguments are known; forget what it changed.

        Args:
            func: Operator, which has run.
            args: Its arguments.
            kwargs: Its keywords.
            result: Its result.
            known: Function that returns the elements of a tensor in the CPU's memory, or None.
        """
        for changed in written(func, args, kwargs):
            self.forget(changed)
        is_new = isinstance(result, torch.Tensor) and result.is_meta and is_ordinary(result) and not func.is_view
        if is_new and result.numel() and (value := _computed(func, args, kwargs, result, known)) is not None:
            self.keep(result, value)

    def keep(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """Keep the elements of a new meta tensor: a tensor like it, or one element that all of its elements equal."""
        storage = tensor.untyped_storage()
        if value.numel() > 1:
            flat = torch.zeros(storage.nbytes() // tensor.itemsize, dtype=value.dtype, device="cpu")
            flat.as_strided(tensor.shape, tensor.stride(), int(tensor.storage_offset())).copy_(value)
            value = flat
        self._known[storage._cdata] = StorageWeakRef(storage), value.reshape(-1)  # type: ignore[no-untyped-call]

    def forget(self, tensor: torch.Tensor) -> None:
        """Let the elements of a tensor's storage be unknown."""
        if is_ordinary(tensor):
            self._known.pop(tensor.untyped_storage()._cdata, None)


def _computed(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: torch.Tensor, known: Known
) -> torch.Tensor | None:
    """Return an operation's result on the CPU, or one element that all of its elements equal; None if unknown."""
    name = operator_name(func)
    if torch.Tag.nondeterministic_seeded in func.tags or "empty" in name:
        return None
    fill = args[_FILLED_AT[name]] if name in _FILLED_AT else _FILLS.get(name)
    if fill is not None and not isinstance(fill, torch.Tensor):
        return torch.zeros(1, dtype=result.dtype, device="cpu").fill_(fill)
    if result.numel() > _MOST:
        return None
    value = on_cpu(func, args, kwargs, known)
    return value if value is not None and value.shape == result.shape and value.dtype is result.dtype else None


def on_cpu(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], known: Known) -> Any:
    """Return the result of an operation on the CPU, None if an argument isn't known or the CPU can't compute it."""
    values = {id(each): known(each) for each in tensors_in(args, kwargs)}
    if any(each is None for each in values.values()):
        return None

    def value_of(value: Any) -> Any:
        return values[id(value)] if isinstance(value, torch.Tensor) else value

    options = {word: mapped(value_of, value) for word, value in kwargs.items() if word != "device"}
    options |= {"device": torch.device("cpu")} if "device" in kwargs else {}
    try:
        return func(*(mapped(value_of, value) for value in args), **options)
    except (RuntimeError, NotImplementedError):  # torch can't compute some dtypes
        return None
