"""The tensors without data that code runs on, and the cells that hold what was written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from ._moves import Move, Written
from ._steps import Constant, Kind

if TYPE_CHECKING:
    from ._cells import Cells

SAFETENSORS = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The names of dtypes in safetensors' files."""
_SPARSE = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


class Cell:
    """What a storage holds while code runs.

    Attributes:
        numel: of the storage.
        dtype: its unit: that of the tensor that it was first met by.
        writes: what was written to it.
        overwritten: what of sources was there, and then something else over it.
        keep: the storage of an ordinary tensor.
        before: what an ordinary tensor held when it was met.
        is_ahead: whether an ordinary tensor's memory isn't what `writes` says, so that it mustn't be read.
        versions: ordinary tensors by which it was met or written to, with torch's count of changes then, and how many
            more the record made.
    """

    __slots__ = ("before", "dtype", "is_ahead", "keep", "numel", "overwritten", "versions", "writes")

    def __init__(self, numel: int, dtype: torch.dtype, writes: Iterable[Move] = (), keep: Any = None) -> None:
        self.numel, self.dtype, self.writes, self.keep = numel, dtype, Written(writes), keep
        self.overwritten: list[Move] = []
        self.before: Constant | None = None
        self.is_ahead = False
        self.versions: list[tuple[torch.Tensor, int, int]] = []

    def note(self, tensor: torch.Tensor, changes: int = 0) -> None:
        """Note what torch counts of a tensor's changes, and how many more the record makes."""
        if self.keep is not None and not tensor.is_inference():  # those have no count
            self.versions.append((tensor, tensor._version, changes))

    def was_changed(self) -> bool:
        """Return whether an ordinary tensor was changed more often than the record knows."""
        known: dict[int, tuple[int, int]] = {}  # by the count now, which views share: the lowest before, and changes
        for tensor, before, changes in self.versions:
            # A parameter whose data were replaced isn't of this memory any longer.
            if not isinstance(tensor, Tracer) and tensor.untyped_storage()._cdata == self.keep._cdata:
                lowest, more = known.get(tensor._version, (before, 0))
                known[tensor._version] = min(lowest, before), more + changes
        return any(count - lowest > changes for count, (lowest, changes) in known.items())


class Tracer(torch.Tensor):
    """A tensor without data: a view of a cell, of which a meta tensor has shape and strides."""

    record: Cells
    cell: Cell
    meta: torch.Tensor

    @staticmethod
    def __new__(cls, record: Cells, cell: Cell, meta: torch.Tensor) -> Tracer:
        if torch.is_inference_mode_enabled():
            # Sources are made outside of it, and torch takes no inference tensors for slices of others.
            with torch.inference_mode(mode=False):
                return Tracer(record, cell, meta)
        self: Tracer = torch.Tensor._make_wrapper_subclass(
            cls,
            meta.shape,
            strides=meta.stride(),
            storage_offset=meta.storage_offset(),
            dtype=meta.dtype,
            # It says that it is on the CPU, and isn't: so torch refuses it as an ordinary tensor's `.data`, which it
            # would leave without memory, and crash on, in threads where no mode is on that could prevent it.
            device=torch.device("meta"),
            dispatch_device=True,
        )
        self.record, self.cell, self.meta = record, cell, meta
        return self

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Tracer({self.record.names([self])}, {Kind(tuple(self.shape), self.dtype)})"

    def __format__(self, spec: str) -> str:
        return repr(self)  # torch would ask a tensor without axes for its number

    # Of safetensors' slices, in whose place tracers are given to loaders.
    def get_shape(self) -> list[int]:
        """Return the shape, as safetensors' slices do."""
        return list(self.shape)

    def get_dtype(self) -> str:
        """Return the dtype's name in safetensors."""
        return SAFETENSORS[self.dtype]

    def __deepcopy__(self, memo: Any) -> Tracer:
        return self.clone()  # type: ignore[return-value]

    @property  # torch's own would leave the cell and the meta tensor as they were
    def data(self) -> Tracer:
        """The same tensor, apart from gradients; a parameter's can be set."""
        return self.detach()  # type: ignore[return-value]

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if not isinstance(value, Tracer):
            self.record.refuse("setting the data, to an ordinary tensor, of what", [self])
        become(self, value)

    def as_subclass(self, cls: Any) -> NoReturn:
        self.record.refuse(f"as_subclass({cls.__name__})", [self])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        record = next(each.record for each in tensors_in(args, kwargs or {}) if isinstance(each, Tracer))
        return record.run(func, args, kwargs or {})


def become(tensor: torch.Tensor, tracer: Tracer) -> None:
    """Make a tensor, or a parameter with its attributes, a tracer: what setting its data to one means."""
    is_parameter = isinstance(tensor, torch.nn.Parameter)
    new = torch.nn.Parameter(tracer, requires_grad=False) if is_parameter else tracer.detach()
    new.__dict__.update({word: value for word, value in tensor.__dict__.items() if word not in new.__dict__})
    torch.utils.swap_tensors(tensor, new)  # type: ignore[no-untyped-call]


def _refuses(word: str, what: str) -> None:
    def refuse(self: Tracer, *args: Any, **kwargs: Any) -> NoReturn:
        self.record.refuse(what, [self])

    setattr(Tracer, word, refuse)


# What reads a tensor's memory without passing torch's dispatcher.
for _word in (
    *("numpy", "tolist", "data_ptr", "untyped_storage", "storage", "share_memory_", "__dlpack__", "__array__"),
    *("apply_", "map_", "map2_", "new", "resize_as"),
):
    _refuses(_word, _word.removeprefix("__").removesuffix("__"))
_refuses("__reduce_ex__", "pickling")


def tensors_in(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return the tensors among arguments and in lists of lists of them; by hand: pytrees took half of the time."""
    tensors = []
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        elif isinstance(value, (list, tuple)) and value:
            tensors += tensors_in(value, {})
    return tensors


@lru_cache(maxsize=1024)
def _places_written(func: Any) -> tuple[tuple[int, str], ...]:
    """Return the positions and names of the arguments that an operation changes."""
    arguments = enumerate(func._schema.arguments)
    return tuple(
        (number, each.name) for number, each in arguments if each.alias_info is not None and each.alias_info.is_write
    )


def written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return the tensors among an operation's arguments that it changes."""
    places = _places_written(func)
    return tensors_in([args[each] if each < len(args) else kwargs.get(word) for each, word in places], {})


@lru_cache(maxsize=1024)
def is_composite(func: Any) -> bool:
    """Return whether an operation is made of others."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"))


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """Return a value, or a list of values, with a function applied to each."""
    return [function(each) for each in value] if isinstance(value, (list, tuple)) else function(value)


def is_ordinary(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has memory of its own: a parameter of any class does, a DTensor doesn't."""
    return tensor.layout is torch.strided and is_plain(type(tensor))


def elements_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor that has a tensor's elements: itself, or a sparse one's values."""
    if tensor.layout not in _SPARSE or not is_plain(type(tensor)):
        return tensor
    return tensor._values() if tensor.is_sparse else tensor.values()


def is_plain(kind: Any) -> bool:
    """Return whether tensors of a class have torch do what is done to them, as a parameter's are."""
    return bool(kind.__torch_dispatch__ == torch.Tensor.__torch_dispatch__)


def meta_of(value: Any) -> Any:
    """Return an argument with meta tensors instead of tracers."""
    if isinstance(value, (list, tuple)):
        return [meta_of(each) for each in value]
    if isinstance(value, Tracer):
        return value.meta
    return value.to("meta") if isinstance(value, torch.Tensor) and value.ndim else value
