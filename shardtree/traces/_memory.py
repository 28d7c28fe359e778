"""Functions that read a tensor's memory, or give it away, without passing torch's dispatcher.

Traced values are in no memory. So a tensor that holds some refuses these, as a tracer does; and memory that others have
got while code runs takes no traced values any more, since nobody could see what they read.
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
    """A mode that sees calls of torch's functions in a thread before they reach the dispatcher, where the record is."""

    def __init__(self, record: Cells) -> None:
        super().__init__()
        self.record = record

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (rule := _RULES.get(func)) is None or self.record.is_done:
            return func(*args, **(kwargs or {}))
        return rule(self.record, func, args, kwargs or {})

    def show(self, name: str, func: Callable[..., Any], args: Args, kwargs: Options) -> Any:
        """Return the result of a function that torch shows to no mode, given its name in `SHOWN`."""
        return func(*args, **kwargs) if self.record.is_done else SHOWN[name](self.record, func, args, kwargs)


def _check(record: Cells, func: Callable[..., Any], values: Sequence[Any]) -> None:
    """Raise if a tensor among values holds traced ones, which func would look for in its memory."""
    if holders := [each for each in tensors_in(values) if record.held(each) is not None]:
        record.refuse(_name(func), holders)


def _name(func: Any) -> str:
    own = getattr(getattr(func, "__self__", None), "fget", func)  # a property's
    name = str(own.__name__).lstrip("_")
    return _ITEM if func in _NUMBERS else name.removesuffix("__")


# Rules: each calls the function, or does what it would.


def _set_data(record: Cells, func: Callable[..., Any], args: Args, kwargs: Options) -> Any:
    """Make a parameter whose data are set to a tracer one itself; torch would leave it without memory."""
    if isinstance(args[1], Tracer):
        return become(args[0], args[1])
    if is_ordinary(args[0]):
        with torch._C._DisableTorchDispatch():
            note_data(record, args[0])
    return func(*args)


def _read_number(record: Cells, func: Callable[..., Any], args: Args, kwargs: Options) -> Any:
    """Return the number that a tensor has, if the code has it by itself; `item` of a traced one is that one itself."""
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
    """Make a tensor of data: another tensor reaches the dispatcher, and those in lists don't."""
    _check(record, func, [each for each in (*args, *kwargs.values()) if isinstance(each, (list, tuple, Number))])
    result = func(*args, **kwargs)
    if isinstance(result, torch.Tensor) and result.is_meta and is_ordinary(result):
        data = (
            args[func is _T.new_tensor]
            if len(args) > (func is _T.new_tensor)
            else kwargs.get("data", kwargs.get("obj"))
        )
        if not isinstance(data, torch.Tensor):  # which is no list, and passes the dispatcher
            with torch._C._DisableTorchDispatch():
                value = torch.tensor(data, dtype=result.dtype, device="cpu")
            record.own(result)
            write_constant(record, result, value)
    return result


def _read_index(record: Cells, func: Callable[..., Any], args: Args, kwargs: Options) -> Any:
    """Index by lists, which torch makes tensors of: on the meta device, without showing what is in them."""
    tensor, index, *value = args
    if isinstance(index, (list, tuple)):
        _check(record, func, [each for each in index if isinstance(each, (list, tuple))])
    if tensor.is_meta and not isinstance(tensor, Tracer):
        index = tuple(map(_index_on_cpu, index)) if isinstance(index, tuple) else _index_on_cpu(index)
    return func(tensor, index, *value, **kwargs)


def _index_on_cpu(index: Any) -> Any:
    """Return an index as a tensor on the CPU if it is a list of numbers, or an array; as it is otherwise."""
    if not isinstance(index, (list, np.ndarray)) or not len(index) or not _is_of_numbers(index):
        return index
    with torch._C._DisableTorchDispatch():
        return torch.tensor(index, device="cpu")


def _is_of_numbers(index: Any) -> bool:
    if isinstance(index, list):
        return all(map(_is_of_numbers, index))
    return isinstance(index, (int, np.ndarray, np.integer))


def _read_sizes(record: Cells, func: Callable[..., Any], args: Args, kwargs: Options) -> Any:
    """Cut a tensor where another one's elements say."""
    _check(record, func, [*args[1:], *kwargs.values()])
    return func(*args, **kwargs)


def _change(record: Cells, func: Callable[..., Any], args: Args, kwargs: Options) -> Any:
    """Let a function of Python's compute elements in memory, of which nothing that is known holds any longer."""
    _check(record, func, args)
    if is_ordinary(args[0]) and not record.is_own(args[0]):
        record.refuse(_name(func), [args[0]], why="it would change a tensor that isn't the code's own")
    record.forget(args[0])
    return func(*args, **kwargs)


def _give(record: Cells, func: Callable[..., Any], args: Args, kwargs: Options) -> Any:
    tensor = args[0]
    if func in _STORAGES and tensor.device.type == "meta":
        return func(*args, **kwargs)  # there is nothing to read
    _check(record, func, [tensor])
    if not is_ordinary(tensor):
        return func(*args, **kwargs)
    with torch._C._DisableTorchDispatch():  # some copy the memory, by operations that aren't the code's
        result = func(*args, **kwargs)
    record.lend(tensor, _name(func))
    return result


def _place(record: Cells, func: Callable[..., Any], args: Args, kwargs: Options) -> Any:
    """Return where a tensor's memory is, which needs no elements; a tracer's would be the CPU's."""
    if isinstance(args[0], Tracer):
        return (1, 0) if func is _T.__dlpack_device__ else False  # DLPack's number of the CPU
    with torch._C._DisableTorchDispatch():
        return func(*args, **kwargs)


def _interface(record: Cells, func: Callable[..., Any], args: Args, kwargs: Options) -> Any:
    """Give a tensor's memory to others on a GPU; on the CPU, tensors haven't got this."""
    if args[0].device.type == "cpu":
        raise AttributeError("__cuda_array_interface__")
    return _give(record, func, args, kwargs)


def _storage(record: Cells, func: Callable[..., Any], args: Args, kwargs: Options) -> Any:
    """Return a storage that answers which one it is, and is given only when asked for more."""
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
    """Make a tensor of memory that others have, too."""
    result = func(*args, **kwargs)
    record.own(result)
    record.lend(result, _name(func))
    return result


def _describe(record: Cells, func: Callable[..., Any], args: Args, kwargs: Options) -> Any:
    """Return text about a tensor; that of traced values has none of them, and asks for none."""
    cell = record.held(args[0])
    return func(*args, **kwargs) if cell is None else f"Tracer({record.names_in([cell])}, {kind_of(args[0])})"


def _copy_deeply(record: Cells, func: Callable[..., Any], args: Args, kwargs: Options) -> Any:
    tensor, memo = args
    if record.held(tensor) is not None:
        memo[id(tensor)] = copy = (tensor if record.is_blank(tensor) else record.as_tracer(tensor)).clone()
        return copy
    if not is_ordinary(tensor):
        return func(*args, **kwargs)
    with torch._C._DisableTorchDispatch():  # it copies the storage's bytes, which would be recorded as such
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
"""Functions of torch's that it shows to no mode."""
