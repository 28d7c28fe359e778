"""Leaves of all kinds that hold tensors, as users put them into trees: what becomes of each in a save and a load."""

from __future__ import annotations

from argparse import Namespace
from collections import Counter, OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import optree
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

import shardtree as st
from shardtree.mapping import ShardedBase


class Moments(NamedTuple):
    """A named tuple."""

    mean: Any
    step: Any


@optree.dataclasses.dataclass(namespace="shardtree")
class Registered:
    """A dataclass that is registered."""

    w: Any


@dataclass
class Unregistered:
    """A dataclass that isn't."""

    w: Any


@dataclass(frozen=True)
class Layer:
    """An equinox-like module: a frozen dataclass with methods."""

    weight: Any
    activation: Any = torch.relu

    def __call__(self, x: Any) -> Any:
        return self.activation(self.weight * x)


class Fields:
    """As attrs makes classes: slots, and a description of them."""

    __slots__ = ("w",)
    __attrs_attrs__ = ("w",)

    def __init__(self, w: Any) -> None:
        self.w = w


class Holder:
    """An object with a tensor in an attribute."""

    def __init__(self, w: Any) -> None:
        self.w = w


class Slots:
    """An object with its attribute in a slot."""

    __slots__ = ("w",)

    def __init__(self, w: Any) -> None:
        self.w = w


class Slotted(Slots):
    """One whose slots are its parent's, and a name alone."""

    __slots__ = "other"


class Endless(Holder):
    """One that holds itself."""

    def __init__(self, w: Any) -> None:
        super().__init__(w)
        self.itself = self


class AppState(Holder):
    """A Stateful of torch.distributed.checkpoint."""

    def state_dict(self) -> dict[str, Any]:
        return {"w": self.w}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.w = state["w"]


class Table(dict[Any, Any]):
    """A subclass of dict."""


class Known(dict[Any, Any]):
    """A subclass of dict that is registered."""


optree.register_pytree_node(
    Known,  # type: ignore[arg-type]
    lambda known: (list(known.values()), tuple(known), tuple(known)),
    lambda names, children: Known(zip(names, children, strict=True)),
    namespace="shardtree",
)


class Row(list[Any]):
    """A subclass of list."""


class Marked(torch.Tensor):
    """A subclass of Tensor."""


class Wrapper(torch.Tensor):
    """A wrapper subclass, as torchao and quanto make them: its elements are twice those of the tensor that it holds."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapper:
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return Wrapper(args[0].inner)
        args = [each.inner * 2 if isinstance(each, Wrapper) else each for each in args]
        return func(*args, **(kwargs or {}))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Wrapper, (self.inner,)


class Mode(Enum):
    """An enum."""

    TRAIN = 1


def module(weight: torch.Tensor) -> torch.nn.Module:
    made = torch.nn.Linear(1, 1, bias=False)
    made.weight = torch.nn.Parameter(weight)
    return made


def dtensor(tensor: torch.Tensor) -> DTensor:
    return DTensor.from_local(tensor, DeviceMesh("cpu", [0], _init_backend=False, _rank=0), [Replicate()])


def megatron(name: str) -> type:
    """Return a class that looks like one of Megatron-Core's leaves, whose fields are given by keyword."""
    return type(name, (), {"__init__": lambda self, **fields: vars(self).update(fields)})


def megatron_tensor(tensor: torch.Tensor) -> Any:
    shape = tuple(tensor.shape)
    return megatron("ShardedTensor")(
        key="theirs", data=tensor, dtype=tensor.dtype, local_shape=shape, global_shape=shape, global_offset=(0,)
    )


def ordered(tensor: Any) -> OrderedDict[str, Any]:
    state: Any = OrderedDict(w=tensor)
    state._metadata = {"": {"version": 1}}
    return state  # type: ignore[no-any-return]


def array_of(value: Any) -> np.ndarray:
    made = np.empty((1, 2), dtype=object)
    made[0, 1] = value
    return made


Make = Callable[[str, torch.Tensor], Any]
"""From a key that no other leaf has, and a tensor, to a leaf that holds the tensor."""

STORED: dict[str, Make] = {
    "shard": lambda key, tensor: st.ShardedTensor.from_rank_offsets(key, tensor),
    "flat shard": lambda key, tensor: st.ShardedTensor.from_rank_offsets_flat(
        key, tensor, tuple(tensor.shape), flattened_range=slice(0, tensor.numel())
    ),
    "factory": lambda key, tensor: st.lenses.as_factory(
        st.ShardedTensor.from_rank_offsets(key, tensor.view(1, -1)), st.lenses.transposed()
    ),
    "object": lambda key, tensor: st.ShardedObject(key, {"rng": tensor}, (1,), (0,)),
    "tensor": lambda key, tensor: tensor,
    "parameter": lambda key, tensor: torch.nn.Parameter(tensor),
    "named tuple": lambda key, tensor: Moments(tensor, 3),
    "named tuple of shards": lambda key, tensor: Moments(st.ShardedTensor.from_rank_offsets(key, tensor), 3),
    "registered class": lambda key, tensor: Registered(tensor),
    "registered class of shards": lambda key, tensor: Registered(st.ShardedTensor.from_rank_offsets(key, tensor)),
    "state_dict()": lambda key, tensor: ordered(tensor),
    "registered dict of shards": lambda key, tensor: Known(w=st.ShardedTensor.from_rank_offsets(key, tensor), n=1),
    "ordered dict of shards": lambda key, tensor: ordered(st.ShardedTensor.from_rank_offsets(key, tensor)),
    "defaultdict": lambda key, tensor: defaultdict(list, w=[tensor]),
    "deque": lambda key, tensor: deque([tensor], 3),
    "set": lambda key, tensor: {tensor},
    "namespace": lambda key, tensor: Namespace(w=tensor, step=3),
    "array": lambda key, tensor: tensor.numpy(),
    "counter": lambda key, tensor: Counter({int(value): 2 for value in tensor}),
    "dataclass of plain values": lambda key, tensor: [Unregistered(3), tensor],
    "enum": lambda key, tensor: [Mode.TRAIN, tensor],
}
"""Kinds that are stored, and come back where the target has them too: the same values in the same kind of container, or
as the page says: a parameter as a tensor, a dataclass without tensors or an enum as a Record."""

SUBCLASSES: dict[str, Make] = {
    "dict subclass of shards": lambda key, tensor: Table(a=[st.ShardedTensor.from_rank_offsets(key, tensor)], n=1),
    "list subclass of objects": lambda key, tensor: Row([st.ShardedObject(key, tensor, (1,), (0,))]),
    "counter of shards": lambda key, tensor: Counter(w=st.ShardedTensor.from_rank_offsets(key, tensor)),
}
"""Kinds that are refused where a tree is saved, loaded or moved. Other functions over trees take them for the dict or
list that they derive from."""

REFUSED: dict[str, Make] = SUBCLASSES | {
    "DTensor": lambda key, tensor: dtensor(tensor),
    "shard of a wrapper subclass": lambda key, tensor: st.ShardedTensor.from_rank_offsets(key, Wrapper(tensor)),
    "shard of a DTensor": lambda key, tensor: st.ShardedTensor.from_rank_offsets(key, dtensor(tensor)),
    "Megatron's tensor": lambda key, tensor: megatron_tensor(tensor),
    "Megatron's object": lambda key, tensor: megatron("ShardedObject")(
        key=key, data=[tensor], global_shape=(1,), global_offset=(0,)
    ),
    "Megatron's factory": lambda key, tensor: megatron("ShardedTensorFactory")(
        key=key, data=tensor, build_fn=len, merge_fn=len
    ),
    "Megatron's local object": lambda key, tensor: megatron("LocalNonpersistentObject")(obj=tensor),
    "module": lambda key, tensor: module(tensor),
    "Stateful": lambda key, tensor: AppState(tensor),
    "dataclass": lambda key, tensor: Unregistered([tensor]),
    "equinox-like module": lambda key, tensor: Layer(tensor),
    "attrs class": lambda key, tensor: Fields(tensor),
    "dataclass in a namespace": lambda key, tensor: Namespace(args=[Unregistered(tensor)]),
    "DTensor in a namespace": lambda key, tensor: Namespace(w=dtensor(tensor)),
    "Megatron's tensor in a set": lambda key, tensor: {megatron_tensor(tensor)},
    "DTensor in an object": lambda key, tensor: Holder([dtensor(tensor)]),
    "DTensor in an array": lambda key, tensor: array_of(dtensor(tensor)),
    "shard in an object": lambda key, tensor: Holder(st.ShardedTensor.from_rank_offsets(key, tensor)),
    "shard in slots": lambda key, tensor: Slotted({"w": [st.ShardedTensor.from_rank_offsets(key, tensor)]}),
    "shard in a namespace": lambda key, tensor: Namespace(w=(st.ShardedTensor.from_rank_offsets(key, tensor),)),
    "local object in an object that holds itself": lambda key, tensor: Endless(st.LocalNonpersistentObject(tensor)),
}
"""Kinds that are refused, in a save and in a load's target, whatever the options."""

PICKLED: dict[str, Make] = {
    "object of a class": lambda key, tensor: Holder(tensor),
    "dict subclass": lambda key, tensor: Table(w=[tensor], n={"a": Row()}),
    "list subclass": lambda key, tensor: Row([tensor]),
    "mapping": lambda key, tensor: UserDict(w=tensor),
    "tensor subclass": lambda key, tensor: tensor.as_subclass(Marked),
    "wrapper subclass": lambda key, tensor: Wrapper(tensor),
}
"""Kinds that are refused, but for `allow_pickle=True`, with which they come back as what they were."""

KINDS: dict[str, Make] = STORED | REFUSED | PICKLED

FINAL: dict[str, type] = {
    "ShardedBase": ShardedBase,
    "ShardedTensor": st.ShardedTensor,
    "ShardedObject": st.ShardedObject,
    "ShardedTensorFactory": st.ShardedTensorFactory,
    "LocalNonpersistentObject": st.LocalNonpersistentObject,
    "Record": st.trees.Record,
}
"""Classes from which none derives: an instance would be stored without what its class adds, or not at all."""


def values_in(value: Any) -> Any:
    """Return what a leaf holds, as values that can be compared: tensors as numbers, containers by their kind."""
    if isinstance(value, (st.ShardedTensor, st.ShardedTensorFactory, st.ShardedObject, UserDict)):
        return values_in(value.data)
    if isinstance(value, Wrapper):
        return Wrapper, value.inner.tolist()
    if isinstance(value, (torch.Tensor, np.ndarray)):
        kind = type(value) if isinstance(value, (Marked, np.ndarray)) else torch.Tensor
        return kind, str(value.dtype), value.tolist()
    if isinstance(value, dict):
        return type(value), {key: values_in(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, deque, set)):
        return type(value), [values_in(item) for item in value]
    if isinstance(value, st.trees.Record):
        return value.type_name.rpartition(".")[2], {key: values_in(item) for key, item in value.fields.items()}
    if isinstance(value, (Mode, Unregistered)):
        fields = {"name": value.name, "value": value.value} if isinstance(value, Mode) else vars(value)
        return type(value).__name__, {key: values_in(item) for key, item in fields.items()}
    return (type(value), values_in(vars(value))) if isinstance(value, (Namespace, Holder, Registered)) else value
