"""Base class of leaves, and all leaves except ShardedTensor: objects, local objects and factories."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from typing import Any, NoReturn, TypeAlias

import torch

from ...errors import MetadataError, UnsupportedValue, error_text
from ..deferred import notebook_html
from ..geometry import flat_range, integer64, integers, refuse
from ._functions import same_value

# Type aliases, as in Megatron-Core.

StateDict: TypeAlias = dict[str, Any]
"""A tree of dicts, lists and tuples with any leaves."""
CommonStateDict: TypeAlias = dict[str, Any]
"""A tree with the same values on every rank."""
ShardedStateDict: TypeAlias = dict[str, Any]
"""A tree with shards, objects, factories and plain values as leaves."""
ReplicaId: TypeAlias = int | tuple[int, ...]
"""The number of a replica of a shard: an int, or a tuple of ints; the main replica has only zeros."""
FactoryBuildFn: TypeAlias = Callable[[str, Any, ReplicaId, slice | None], Any]
"""A function from key, data, replica_id and flattened_range to a tree of shards."""
FactoryMergeFn: TypeAlias = Callable[[Any], Any]
"""A function from the loaded tree, in the structure of the built one, to one tensor."""
RankOffset: TypeAlias = tuple[int, int, int]


# Replica ids determine which of several equal copies of a shard is the main replica.


def is_main_replica(replica_id: ReplicaId) -> bool:
    """Return whether a replica id is the main replica's: 0, or a sequence of zeros.

    Raises:
        MetadataError: `replica_id` is neither an int nor a sequence of ints.

    Examples:
        >>> is_main_replica(0), is_main_replica((0, 0)), is_main_replica((0, 1))
        (True, True, False)
    """
    if type(replica_id) is int:
        return replica_id == 0
    ids = replica("is_main_replica", "replica_id", replica_id)
    return ids == 0 if isinstance(ids, int) else not any(ids)


def replica(subject: str, field: str, value: Any) -> ReplicaId:
    """Return a replica id as an int or a tuple of ints; anything else raises MetadataError.

    Args:
        subject: Name of the leaf or function, for the error.
        field: Name of the field, for the error.
        value: The replica id that was passed.
    """
    # Bools are accepted as numbers: replica ids are often the result of comparing ranks.
    many = isinstance(value, Iterable) and not hasattr(value, "__index__")  # a tensor of one number is iterable too
    ids = [int(item) if isinstance(item, bool) else item for item in (value if many else (value,))]
    return integers(subject, field, ids) if many else integer64(subject, field, ids[0])


# The base class. No class outside of this package derives from it.


def refuse_subclass(derived: type) -> NoReturn:
    """Raise UnsupportedValue for a class that derives from a leaf's class, such as ShardedTensor.

    Leaves are recognised by their class, and the fields of that class are stored. A derived class would silently lose
    the fields that it adds, and tree functions would silently skip a new kind of leaf.

    Args:
        derived: The class that is being defined.

    Raises:
        UnsupportedValue: Always.
    """
    found = f"class {derived.__qualname__}({', '.join(base.__name__ for base in derived.__bases__)})"
    fix = "Use the shardtree class itself. Keep added fields in a dict beside the instance; write methods as functions."
    # A class without a module, such as one made by `eval`, has no `__module__`.
    heading = f"{getattr(derived, '__module__', 'no module')}: a base class is shardtree's and cannot be subclassed"
    raise UnsupportedValue(error_text(heading, found=found, fix=fix))


class ShardedBase(ABC):
    """Base class of sharded leaves, which have a key, data and a replica id; it defines equality and repr.

    Leaves are equal if they have the same kind, equal metadata and the same data object; elements are never compared or
    printed. Functions in the metadata are equal if they run the same code with equal captured values. The kinds are
    ShardedTensor, ShardedObject and ShardedTensorFactory. Classes outside of shardtree can't derive from these or from
    ShardedBase.
    """

    __slots__ = ()

    key: str
    data: Any
    replica_id: ReplicaId

    def __init_subclass__(cls) -> None:
        # The module identifies our classes; a set of classes couldn't, since a dataclass with slots is made twice.
        if cls.__module__.rpartition(".")[0] != __package__:
            refuse_subclass(cls)

    @abstractmethod
    def validate_metadata_integrity(self) -> None:
        """Raise MetadataError or ShapeError if a field contradicts another."""

    @abstractmethod
    def without_data(self) -> ShardedBase:
        """Return the same leaf with None as its data."""

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        # Comparing elements would read lazy tensors, and wait for accelerators.
        if self.data is not other.data:
            return False
        own, others = metadata_of(self), metadata_of(other)
        # `==` comes first: it is several times as fast, and only functions need `same_value`.
        return own == others or all(own[name] == others[name] or same_value(own[name], others[name]) for name in own)

    def __hash__(self) -> int:
        # Other fields are left out because slices and some callables aren't hashable.
        return hash((type(self), self.key, self.replica_id, getattr(self, "global_offset", None), id(self.data)))

    def _repr_html_(self) -> str:
        return notebook_html(self)

    def __repr__(self) -> str:
        fields = [f"{name}={value!r}" for name, (value, default) in metadata_of(self).items() if value != default]
        fields.insert(1, f"data={describe(self.data)}")
        return f"{type(self).__name__}({', '.join(fields)})"


def leaf_name(leaf: ShardedBase) -> str:
    """Return a leaf's class name and key, for error texts."""
    return f"{type(leaf).__name__} {leaf.key!r}"


def metadata_of(leaf: Any) -> dict[str, tuple[Any, Any]]:
    """Return a dict from the name of each field except `data` to the field's (value, default value)."""
    return {field.name: (getattr(leaf, field.name), field.default) for field in fields(leaf) if field.name != "data"}


def describe(value: object) -> str:
    """Return a short text for a value: its type, and a tensor's dtype, shape and device, never its elements."""
    if value is None:
        return "None"
    dtype, shape = getattr(value, "dtype", None), getattr(value, "shape", None)
    if dtype is None or shape is None:
        return f"<{type(value).__name__}>"
    kind = f"{str(dtype).removeprefix('torch.')} {tuple(shape)}"
    return f"<{kind} {value.device}>" if isinstance(value, torch.Tensor) else f"<{type(value).__name__} {kind}>"


def normalise(leaf: ShardedBase, function: Callable[[str, str, Any], object], *names: str) -> None:
    """Normalise fields of a frozen leaf during its construction.

    Args:
        leaf: Leaf that is being constructed.
        function: Function from (leaf name, field name, value) to the field's new value.
        names: Names of the fields.
    """
    for name in names:
        object.__setattr__(leaf, name, function(leaf_name(leaf), name, getattr(leaf, name)))


def check_key(leaf: ShardedBase) -> None:
    """Raise MetadataError unless a leaf's key is a string that is not empty and that UTF-8 can encode."""
    key: Any = leaf.key
    if not isinstance(key, str) or not key:
        found, fix = repr(key) if isinstance(key, str) else type(key).__name__, "Name the global tensor or object."
        refuse(type(leaf).__name__, "key", found, "a string that is not empty", fix, error=MetadataError)
    try:
        # Formats store keys as UTF-8, which has no lone surrogates.
        key.encode()
    except UnicodeEncodeError:
        fix = "Remove lone surrogates."
        refuse(leaf_name(leaf), "key", ascii(key), "text that UTF-8 can encode", fix, error=MetadataError)


# ShardedObject: one cell of a global array of Python objects.

# The pattern is greedy, so that a key may itself contain "/shard_": the last one counts.
_OBJECT_KEY = re.compile(r"(?P<key>.+)/shard_(?P<offset>[0-9.]*)_(?P<shape>[-0-9.]*)", re.DOTALL)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ShardedObject(ShardedBase):
    """One cell of a global array of Python objects, such as one rank's generator state.

    Unlike a tensor, the array must be loaded in the global shape in which it was saved.

    Args:
        key: The array's name.
        data: The object in this cell.
        global_shape: The array's shape in cells; its last size is -1 if unknown.
        global_offset: The cell's index in the array.
        replica_id: Number of the replica, as in ShardedTensor.

    Raises:
        MetadataError: The index lies outside of the shape.

    Examples:
        >>> ShardedObject("rng", {"seed": 1}, (2, 4), (1, 3)).unique_key
        'rng/shard_1.3_2.4'
    """

    key: str
    data: Any
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    replica_id: ReplicaId = 0

    def __post_init__(self) -> None:
        check_key(self)
        normalise(self, integers, "global_shape", "global_offset")
        normalise(self, replica, "replica_id")
        self.validate_metadata_integrity()

    def validate_metadata_integrity(self) -> None:
        """Raise MetadataError if the cell lies outside of the array."""
        shape, offset = self.global_shape, self.global_offset
        if len(shape) != len(offset):
            expected, fix = f"{len(shape)} indices, for global_shape {shape}", "Pass one for each axis."
            refuse(leaf_name(self), "global_offset", offset, expected, fix, error=MetadataError)
        last = len(shape) - 1
        inside = (
            0 <= index < size or (size == -1 and axis == last and index >= 0)
            for axis, (index, size) in enumerate(zip(offset, shape, strict=True))
        )
        if not all(inside):
            expected, fix = f"an index into global_shape {shape}", "Count cells from 0."
            refuse(leaf_name(self), "global_offset", offset, expected, fix, error=MetadataError)

    def without_data(self) -> ShardedObject:
        """Return the same object with None as its data."""
        return replace(self, data=None)

    @property
    def unique_key(self) -> str:
        """The array's key, the object's index in the array, and the array's shape: `<key>/shard_<offset>_<shape>`."""
        return f"{self.key}/shard_{'.'.join(map(str, self.global_offset))}_{'.'.join(map(str, self.global_shape))}"

    @classmethod
    def empty_from_unique_key(cls, unique_key: str, replica_id: ReplicaId = 0) -> ShardedObject:
        """Return the ShardedObject that a unique key describes, with None as its data.

        Old checkpoints omit the shape's last size; it becomes -1.

        Raises:
            MetadataError: The key does not have the form `<key>/shard_<offset>_<shape>`.

        Examples:
            >>> ShardedObject.empty_from_unique_key("a/b_c/shard_1.3_2.4")
            ShardedObject(key='a/b_c', data=None, global_shape=(2, 4), global_offset=(1, 3))
            >>> ShardedObject.empty_from_unique_key("rng/shard_1.3_2").global_shape
            (2, -1)
        """
        parts = _OBJECT_KEY.fullmatch(unique_key)
        try:
            key, *numbers = parts.groups() if parts else ()
            offset, shape = (tuple(map(int, text.split("."))) if text else () for text in numbers)
        except ValueError:
            expected, fix = "'<key>/shard_<offset>_<shape>', as in 'rng/shard_1.3_2.4'", "Pass a `unique_key`."
            refuse(cls.__name__, "unique key", repr(unique_key), expected, fix, error=MetadataError)
        # A shape with one axis less than the offset comes from an old checkpoint.
        return cls(key, None, (*shape, -1) if len(shape) + 1 == len(offset) else shape, offset, replica_id)


# LocalNonpersistentObject: a value that stays on its rank.


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class LocalNonpersistentObject:
    """A local value that a checkpoint doesn't store: a save leaves it out, and a load returns it unwrapped.

    Examples:
        >>> LocalNonpersistentObject({"step": 3}).unwrap()
        {'step': 3}
    """

    obj: Any

    def __init_subclass__(cls) -> None:
        refuse_subclass(cls)

    def __eq__(self, other: object) -> bool:
        return self.obj is other.obj if isinstance(other, LocalNonpersistentObject) else NotImplemented

    def __hash__(self) -> int:
        return hash((LocalNonpersistentObject, id(self.obj)))

    def __repr__(self) -> str:
        return f"LocalNonpersistentObject({describe(self.obj)})"

    def unwrap(self) -> Any:
        """Return the wrapped value."""
        return self.obj


# ShardedTensorFactory: a tensor with another form in the checkpoint.


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ShardedTensorFactory(ShardedBase):
    """A tensor with another form in the checkpoint: `build_fn` makes the stored shards, `merge_fn` the tensor.

    Args:
        key: The tensor's name.
        data: The model's tensor.
        build_fn: Function from (key, data, replica_id, flattened_range) to the tree of shards.
        merge_fn: Inverse function: from the same tree, with loaded tensors instead of shards, to the model's tensor.
        replica_id: Number of the replica, as in ShardedTensor.
        flattened_range: Slice of the flattened tensor that flat `data` holds; None if `data` is not flat.

    Raises:
        MetadataError: A field has a value of the wrong type.

    Examples:
        >>> import torch
        >>> from shardtree.mapping import ShardedTensor
        >>> def build(key, data, replica_id, flattened_range):
        ...     return {"t": ShardedTensor.from_rank_offsets(key, data.T, replica_id=replica_id)}
        >>> factory = ShardedTensorFactory("w", torch.zeros(2, 3), build, lambda tree: tree["t"].T)
        >>> factory.build()["t"].global_shape
        (3, 2)
    """

    key: str
    data: Any
    build_fn: FactoryBuildFn
    merge_fn: FactoryMergeFn
    replica_id: ReplicaId = 0
    flattened_range: slice | None = None

    def __post_init__(self) -> None:
        check_key(self)
        normalise(self, replica, "replica_id")
        normalise(self, lambda subject, _, value: flat_range(subject, value), "flattened_range")
        self.validate_metadata_integrity()

    def validate_metadata_integrity(self) -> None:
        """Raise MetadataError if `build_fn` or `merge_fn` is not callable."""
        for field in ("build_fn", "merge_fn"):
            function = getattr(self, field)
            if not callable(function):
                fix = "Pass build_fn, then merge_fn."
                refuse(leaf_name(self), field, type(function).__name__, "a function", fix, error=MetadataError)

    def build(self) -> Any:
        """Return the tree of shards to store, as `build_fn` makes it from the tensor."""
        return self.build_fn(self.key, self.data, self.replica_id, self.flattened_range)

    def without_data(self) -> ShardedTensorFactory:
        """Return the same factory with None as its data."""
        return replace(self, data=None)
