"""What an index says is stored, as a mapping by name, whose values are made when they are asked for."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, ItemsView, Iterable, Iterator, Mapping, Sequence, Set, ValuesView
from dataclasses import dataclass, field
from itertools import chain
from typing import TypeVar

from ....core.layouts import TensorKind
from ....core.mapping import ShardedObject, ShardedTensor
from ....core.plans import LoadPlan, ReadCost
from ....errors import plural
from ._columns import Index, whole_shard, whole_shards

Value = TypeVar("Value")


class PairsMapping(Mapping[str, Value]):
    """A mapping that makes many values together, which is about ten times faster than each by its key."""

    __slots__ = ()

    @abstractmethod
    def pairs(self) -> Iterator[tuple[str, Value]]:
        """Yield each key with its value, in order."""

    def items(self) -> ItemsView[str, Value]:
        """Return all keys with their values, made a few at a time."""
        return PairItems(self)

    def values(self) -> ValuesView[Value]:
        """Return all values, made likewise."""
        return PairValues(self)


class PairItems(ItemsView[str, Value]):
    __slots__ = ()
    _mapping: PairsMapping[Value]

    def __iter__(self) -> Iterator[tuple[str, Value]]:
        return self._mapping.pairs()


class PairValues(ValuesView[Value]):
    __slots__ = ()
    _mapping: PairsMapping[Value]

    def __iter__(self) -> Iterator[Value]:
        return (value for _, value in self._mapping.pairs())


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class IndexMetadata(PairsMapping[ShardedTensor | ShardedObject]):
    """Stored tensors by key and objects by unique key, whole and without data; made when asked for.

    Attributes:
        index: where they lie, as loads are planned.
        on_files: the index with files as they are named in the folder, where `index` has a virtual one; None where it
            hasn't.
        untaken: why something that is stored can't be loaded and isn't listed, by its key or name.
        refused: returns that of some keys, where it depends on them.
        uncompared: returns those of some keys, of an optimizer's states, whose masters won't be compared with weights
            by this load, though they could be.
        cost: returns what a load reads, of shards in their stored dtypes, and of a plan of their bytes on the index;
            None where that is what the plan says.
        gaps: Reasons that elements of a tensor have no values, by its key, where some aren't stored.
        files: returns the least length of each file that must be there; None where the index has these.
    """

    index: Index
    on_files: Callable[[], Index] | None = None
    untaken: Mapping[str, str] = field(default_factory=dict)
    refused: Callable[[Set[str]], Mapping[str, str]] | None = None
    uncompared: Callable[[Set[str]], Sequence[str]] = lambda _: ()
    cost: Callable[[Sequence[ShardedTensor], LoadPlan], ReadCost] | None = None
    gaps: Mapping[str, str] = field(default_factory=dict)
    files: Callable[[], Mapping[str, int]] | None = None

    @property
    def shown(self) -> Index:
        """The index to show people: which chunk lies in which file."""
        return self.index if self.on_files is None else self.on_files()

    def needed_files(self) -> Mapping[str, int]:
        """Return the least length of each file that must be there, by name."""
        if self.files is not None:
            return self.files()
        index = self.shown
        return dict(zip(index.file_names(), index.file_length.tolist(), strict=True))

    def __repr__(self) -> str:
        tensors, objects = plural(self.index.key_axes.size, "tensor"), plural(self.index.object_length.size, "object")
        return f"IndexMetadata({tensors}, {objects})"

    def __getitem__(self, key: str) -> ShardedTensor | ShardedObject:
        """Return the tensor of a key, or the object of a unique key."""
        index = self.index
        (number,) = index.find_keys([key])
        if number >= 0:
            return whole_shard(index, number, key)
        (number,) = index.find_objects([key])
        if number < 0:
            raise KeyError(key)
        return ShardedObject.empty_from_unique_key(key)

    def __contains__(self, key: object) -> bool:
        """Return whether a tensor has that key, or an object that unique key."""
        index = self.index
        # By bisection in the columns: making a shard to see whether it exists would take much longer.
        return isinstance(key, str) and any(find([key])[0] >= 0 for find in (index.find_keys, index.find_objects))

    def __iter__(self) -> Iterator[str]:
        """Return the tensors' keys, sorted, then the objects' unique keys, sorted."""
        yield from self.index.keys()
        yield from self.index.object_names()

    def __len__(self) -> int:
        """Return how many tensors and objects there are."""
        return self.index.key_axes.size + self.index.object_file.size

    def pairs(self) -> Iterator[tuple[str, ShardedTensor | ShardedObject]]:
        """Yield each name with its tensor or object, in order."""
        names = self.index.object_names()
        tensors = ((shard.key, shard) for shard in whole_shards(self.index))
        return chain(tensors, ((name, ShardedObject.empty_from_unique_key(name)) for name in names))

    def kinds(self, keys: Sequence[str]) -> dict[str, TensorKind]:
        """Return the kind of each tensor, by key, of those that are stored."""
        numbers = self.index.find_keys(keys)
        number_of = {key: number for key, number in zip(keys, numbers, strict=True) if number >= 0}
        return dict(zip(number_of, self.index.kinds(list(number_of.values())), strict=True))

    def shard_keys(self) -> set[str]:
        """Return the keys of all tensors and objects."""
        return {*self.index.keys(), *self.object_keys()}

    def object_keys(self) -> set[str]:
        """Return the keys of all objects."""
        return {_key_of(name) for name in self.index.object_names()}

    def objects(self, keys: Collection[str]) -> list[ShardedObject]:
        """Return all cells of the arrays of objects with the given keys."""
        names = self.index.object_names()
        return [ShardedObject.empty_from_unique_key(name) for name in names if _key_of(name) in keys]


@dataclass(frozen=True, slots=True, eq=False)
class DeferredMetadata(Mapping[str, ShardedTensor | ShardedObject]):
    """Stored tensors and objects, some of which have other names that only reading finds out; put off until needed.

    Attributes:
        stored: all of them, under the names in the files.
        whole: reads, and returns them with the names that were found out in place of the stored ones.
    """

    stored: IndexMetadata
    whole: Callable[[], IndexMetadata]

    def __getitem__(self, key: str) -> ShardedTensor | ShardedObject:
        """Return the tensor of a key, or the object of a unique key, by either name."""
        return self.of([key])[key]

    def __contains__(self, key: object) -> bool:
        """Return whether something has that name."""
        return key in self.stored or key in self.whole()

    def __iter__(self) -> Iterator[str]:
        """Return all names that were found out, and the stored ones of the rest."""
        return iter(self.whole())

    def __len__(self) -> int:
        """Return how many tensors and objects there are, each once."""
        return len(self.whole())

    def of(self, names: Iterable[str]) -> IndexMetadata:
        """Return metadata that has some names; nothing is read if all of them are stored ones."""
        return self.stored if all(name in self.stored for name in names) else self.whole()


def stored_keys(metadata: Mapping[str, ShardedTensor | ShardedObject]) -> set[str]:
    """Return the keys of the tensors and objects in a checkpoint's metadata."""
    if isinstance(metadata, IndexMetadata):
        return metadata.shard_keys()
    return {shard.key for shard in metadata.values()}


def stored_kinds(metadata: Mapping[str, ShardedTensor | ShardedObject], keys: Sequence[str]) -> dict[str, TensorKind]:
    """Return what each tensor is, by key, of those that are in a checkpoint's metadata."""
    if isinstance(metadata, IndexMetadata):
        return metadata.kinds(keys)
    shards = {key: metadata[key] for key in keys if key in metadata}
    return {
        key: TensorKind(shard.dtype, shard.global_shape, 0)
        for key, shard in shards.items()
        if isinstance(shard, ShardedTensor)
    }


def untaken_of(metadata: object) -> Mapping[str, str]:
    """Return why something that is stored isn't in a checkpoint's metadata, by its key or name."""
    if isinstance(metadata, DeferredMetadata):
        metadata = metadata.stored
    return metadata.untaken if isinstance(metadata, IndexMetadata) else {}


def reasoned(untaken: Mapping[str, str], name: str) -> str:
    """Return a name in quotes, and why what it names isn't taken, where that is known.

    Examples:
        >>> reasoned({"text": "torch has no such dtype"}, "text"), reasoned({}, "w")
        ("'text': torch has no such dtype", "'w'")
    """
    return f"{name!r}: {untaken[name]}" if name in untaken else repr(name)


def _key_of(unique_key: str) -> str:
    return unique_key.rpartition("/shard_")[0]


def stored_fingerprints(metadata: object) -> dict[str, int]:
    """Return the fingerprints in a checkpoint's metadata, by key; {} if the save stored none."""
    if not isinstance(metadata, IndexMetadata) or metadata.index.x_fingerprint is None:
        return {}
    index = metadata.index
    return dict(zip(index.keys(), metadata.index.x_fingerprint.tolist(), strict=True))
