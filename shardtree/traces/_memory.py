"""Functions that read a tensor's memory, or give it to other code, without torch's dispatcher.

Traced values are in no memory. So these functions raise an error for a tensor that holds traced values. And traced
values cannot be written to memory that the code has given away, since the trace would not see who reads them there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from ._arguments import is_ordinary, tensors_in
from ._cells import Cells, Number, Tracer, become, number_of
from ._constants import write_constant
from ._leftovers import note_data
from ._steps import kind_of
from ._storages import LentStorage, is_asked_by_torch

Args = tuple[Any, ...]
Options = Mapping[str, Any]
Rule = Callable[[Cells, Callable[..., Any], Args, Options], Any]


class Watch(TorchFunctionMode):
    """A mode of one thread that sees calls of torch's functions before the dispatcher and its recording mode do."""

    def __init__(self, record: Cells) -> None:
        super().__init__()
        self.record = record

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (rule := _RULES.get(func)) is None or self.record.is_done:
            return func(*args, **(kwargs or {}))
        return rule(self.record, func, args, kwargs or {})

    def show(self, name: str, func: Callable[..., Any], args: Args, kwargs: Options) -> Any:
        """Apply the rule ``SHOWN[name]`` to a call that torch passes to no function mode; return the call's result."""
        return func(*args, **kwargs) if self.record.is_done else SHOWN[name](self.record, func, args, kwargs)


def _check(record: Cells, func: Callable[..., Any], values: Sequence[Any]) -> None:
    """Raise if tensors among a function's arguments hold traced values, which the function wouldn't find in memory."""
    if holders := [tensor for tensor in tensors_in(values) if record.held(tensor) is not None]:
        record.refuse(_name(func), holders)


def _name(func: Any) -> str:
    named = getattr(getattr(func, "__self__", None), "fget", func)  # of a property, its getter
    name = str(named.__name__).lstrip("_")
    return _ITEM if func in _NUMBERS else name.removesuffix("__")


# Rules: each of these calls the function, or does what it would do.


def _set_data(record: Cells, func: Callable[..., Any], args: Args, kwargs: Options) -> Any:
    """Set a tensor's data. If the new data are a `Tracer`, which has no memory, turn the tensor into a tracer too."""
    if isinstance(args[1], Tracer):
        return become(args[0], args[1])
    if is_ordinary(args[0]):
        with torch._C._DisableTorchDispatch():
            note_data(record, args[0])
    return func(*args)


def _read_number(record: Cells, func: Callable[..., Any], args: Args, kwargs: Options) -> Any:
    """Return a tensor's elements as Python numbers, for `item`, `tolist` and conversions such as `int`.

    If the element comes from a source (an input of the traced code), `item` returns a `Number`, which is a tensor, and
    the other functions raise an error.
    """
    tensor = args[0]
    if record.held(tensor) is None and not (tensor.is_meta and is_ordinary(tensor)):
        return func(*args, **kwargs)
    with record.lock, torch._C.DisableTorchFunction():
        if (value := record.known_value(tensor)) is not None:
            with torch._C._DisableTorchDispatch():
                return func(value, *args[1:], **kwargs)
        if record.is_blank(tensor):
            record.refuse_meta(_name(func))
        if func is _T.item and tensor.numel() == 1:
            return number_of(record.as_tracer(tensor))
    return record.refuse(_name(func), [tensor])


def _read_lists(record: Cells, func: Callable[..., Any], args: Args, kwargs: Options) -> Any:
    """Make a tensor from data, as `torch.tensor` does; refuse lists with tensors of traced values.

    Torch reads tensors in lists without its dispatcher, so that they couldn't be recorded.
    """
    _check(record, func, [value for value in (*args, *kwargs.values()) if isinstance(value, (list, tuple, Number))])
    result = func(*args, **kwargs)
    if isinstance(result, torch.Tensor) and result.is_meta and is_ordinary(result):
        data = (
            args[func is _T.new_tensor]
            if len(args) > (func is _T.new_tensor)
            else kwargs.get("data", kwargs.get("obj"))
        )
        if not isinstance(data, torch.Tensor):  # a tensor reaches the dispatcher
            with torch._C._DisableTorchDispatch():
                value = torch.tensor(data, dtype=result.dtype, device="cpu")
            record.own(result)
            write_constant(record, result, value)
    return result


def _read_index(record: Cells, func: Callable[..., Any], args: Args, kwargs: Options) -> Any:
    """Read or write indexed elements of a tensor; refuse indices that are lists of traced values.

    For a tensor on meta, lists of numbers become tensors on the CPU first, since torch would make meta tensors of them,
    which have no elements.
    """
    tensor, index, *value = args
    if isinstance(index, (list, tuple)):
        _check(record, func, [item for item in index if isinstance(item, (list, tuple))])
    if tensor.is_meta and not isinstance(tensor, Tracer):
        index = tuple(map(_index_on_cpu, index)) if isinstance(index, tuple) else _index_on_cpu(index)
    return func(tensor, index, *value, **kwargs)


def _index_on_cpu(index: Any) -> Any:
    """Return a list of numbers or an array as a tensor on the CPU; another index unchanged."""
    if not isinstance(index, (list, np.ndarray)) or not len(index) or not _is_of_numbers(index):
        return index
    with torch._C._DisableTorchDispatch():
        return torch.tensor(index, device="cpu")


def _is_of_numbers(index: Any) -> bool:
    if isinstance(index, list):
        return all(map(_is_of_numbers, index))
    return isinstance(index, (int, np.ndarray, np.integer))


def _read_sizes(record: Cells, func: Callable[..., Any], args: Args, kwargs: Options) -> Any:
    """Split a tensor at positions that another tensor's elements give."""
    _check(record, func, [*args[1:], *kwargs.values()])
    return func(*args, **kwargs)


def _change(record: Cells, func: Callable[..., Any], args: Args, kwargs: Options) -> Any:
    """Let a function change a tensor's memory. The record of its elements is dropped, since it no longer holds."""
    _check(record, func, args)
    if is_ordinary(args[0]) and not record.is_own(args[0]):
        record.refuse(_name(func), [args[0]], why="it would change a tensor that existed before the trace")
    record.forget(args[0])
    return func(*args, **kwargs)


def _give(record: Cells, func: Callable[..., Any], args: Args, kwargs: Options) -> Any:
    tensor = args[0]
    if func in _STORAGES and tensor.device.type == "meta":
        return func(*args, **kwargs)  # there is nothing to read
    _check(record, func, [tensor])
    if not is_ordinary(tensor):
        return func(*args, **kwargs)
    with torch._C._DisableTorchDispatch():  # some functions copy the memory by operations, which aren't the code's
        result = func(*args, **kwargs)
    record.lend(tensor, _name(func))
    return result


def _place(record: Cells, func: Callable[..., Any], args: Args, kwargs: Options) -> Any:
    """Return the result of `is_pinned`, `is_shared` or `__dlpack_device__`; for a tracer, that of a CPU tensor."""
    if isinstance(args[0], Tracer):
        return (1, 0) if func is _T.__dlpack_device__ else False  # DLPack's number of the CPU
    with torch._C._DisableTorchDispatch():
        return func(*args, **kwargs)


def _interface(record: Cells, func: Callable[..., Any], args: Args, kwargs: Options) -> Any:
    """Return ``__cuda_array_interface__``, and record that other code got access to the memory on the GPU.

    Raises:
        AttributeError: the tensor is on the CPU; torch raises it too.
    """
    if args[0].device.type == "cpu":
        raise AttributeError("__cuda_array_interface__")
    return _give(record, func, args, kwargs)


def _storage(record: Cells, func: Callable[..., Any], args: Args, kwargs: Options) -> Any:
    """Return a tensor's storage; for traced code it is a proxy, a `LentStorage`.

    If the code uses the proxy for more than its address, size and the like, the trace assumes that untraced objects
    share the memory.
    """
    tensor = args[0]
    is_untyped = func is _T.untyped_storage
    if not is_ordinary(tensor) or tensor.device.type == "meta" or (is_untyped and is_asked_by_torch()):
        return _give(record, func, args, kwargs)
    with torch._C._DisableTorchDispatch():
        true = func(*args, **kwargs)
    storage = LentStorage(record, tensor, true, _name(func))
    # Torch has one untyped object for each storage, which code may compare.
    return record.storages.setdefault(true._cdata, storage) if is_untyped else storage


def _take(record: Cells, func: Callable[..., Any], args: Args, kwargs: Options) -> Any:
    """Make a tensor from the memory of another object, as `torch.frombuffer` does, and record that they share it."""
    result = func(*args, **kwargs)
    record.own(result)
    record.lend(result, _name(func))
    return result


def _describe(record: Cells, func: Callable[..., Any], args: Args, kwargs: Options) -> Any:
    """Return the text of the tensor ``args[0]``, as ``repr`` or ``format`` does; traced values aren't shown."""
    cell = record.held(args[0])
    return func(*args, **kwargs) if cell is None else f"Tracer({record.names_in([cell])}, {kind_of(args[0])})"


def _copy_deeply(record: Cells, func: Callable[..., Any], args: Args, kwargs: Options) -> Any:
    tensor, memo = args
    if record.held(tensor) is not None:
        memo[id(tensor)] = copy = (tensor if record.is_blank(tensor) else record.as_tracer(tensor)).clone()
        return copy
    if not is_ordinary(tensor):
        return func(*args, **kwargs)
    with torch._C._DisableTorchDispatch():  # it copies the storage's bytes, which must not be recorded as bytes
        copy = func(*args, **kwargs)
    record.own(copy)
    return copy


_T = torch.Tensor
_ITEM = "item, bool, int or float"
_NUMBERS = (_T.item, _T.__bool__, _T.__int__, _T.__float__, _T.__complex__, _T.__index__)
_STORAGES = (_T.untyped_storage, _T.storage)
_OF_LISTS = (
    *(torch.tensor, torch.as_tensor, torch.asarray, _T.new_tensor, _T.new),
    *(torch.sparse_coo_tensor, torch.sparse_compressed_tensor),
    *(torch.sparse_csr_tensor, torch.sparse_csc_tensor, torch.sparse_bsr_tensor, torch.sparse_bsc_tensor),
)
_RULES: dict[Any, Rule] = {
    _T.data.__set__: _set_data,  # type: ignore[attr-defined]
    _T.__deepcopy__: _copy_deeply,
    **dict.fromkeys((_T.__repr__, _T.__format__), _describe),
    **dict.fromkeys((*_NUMBERS, _T.tolist), _read_number),
    **dict.fromkeys(_OF_LISTS, _read_lists),
    **dict.fromkeys((_T.__getitem__, _T.__setitem__), _read_index),
    **dict.fromkeys((torch.tensor_split, _T.tensor_split), _read_sizes),
    **dict.fromkeys((_T.apply_, _T.map_, _T.map2_), _change),
    **dict.fromkeys(_STORAGES, _storage),
    **dict.fromkeys((_T.numpy, _T.__array__, _T.__dlpack__, _T.share_memory_), _give),
    _T.__cuda_array_interface__.__get__: _interface,
    **dict.fromkeys((_T.is_pinned, _T.is_shared, _T.__dlpack_device__), _place),
}
SHOWN: dict[str, Rule] = {"from_dlpack": _take, "frombuffer": _take, "to_dlpack": _give}
"""Rules of functions that torch passes to no mode, by name."""
