"""The tensors and objects that an index lists, as a mapping whose values are made on access."""

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
    """A mapping whose `items` and `values` make several values at a time, by the method `pairs`.

    For metadata, this is about ten times faster than making each value by itself.
    """

    __slots__ = ()

    @abstractmethod
    def pairs(self) -> Iterator[tuple[str, Value]]:
        """Yield (key, value) pairs in order."""

    def items(self) -> ItemsView[str, Value]:
        """Return a view of all (key, value) pairs, which makes values a few at a time."""
        return PairItems(self)

    def values(self) -> ValuesView[Value]:
        """Return a view of all values, which makes them a few at a time."""
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
    """Metadata of a checkpoint with an index: stored tensors by key and objects by unique key, without data.

    Each tensor is one shard that covers it whole. Values are made on access.

    Attributes:
        index: Index on which loads are planned.
        on_files: Function that returns an index of the folder's real files, if `index` locates chunks in virtual files;
            None if its files are real.
        untaken: Reasons why stored values aren't listed here and can't be loaded, by key, or by the name of an array or
            file that has no key.
        refused: Function that takes the shards of a load, and returns the reasons why some of them can't be loaded, by
            key; these include the reasons in `untaken`. None if there are no other reasons.
        uncompared: Function that takes the keys of a load. It returns the keys of optimizer states whose master weights
            the load doesn't compare with the model's weights, because of ``verify=None``.
        cost: Function that returns the cost of a load. It takes the shards, in their stored dtypes, and their plan on
            `index`. None if the plan alone determines the cost.
        gaps: Reasons why some elements of a tensor aren't stored, by key.
        files: Function that returns the minimum length of each file that must exist, by name; None if the index lists
            all files.
        unproven: Reasons why a tensor may be larger than the existing files show, by key.
    """

    index: Index
    on_files: Callable[[], Index] | None = None
    untaken: Mapping[str, str] = field(default_factory=dict)
    refused: Callable[[Sequence[ShardedTensor]], Mapping[str, str]] | None = None
    uncompared: Callable[[Set[str]], Sequence[str]] = lambda _: ()
    cost: Callable[[Sequence[ShardedTensor], LoadPlan], ReadCost] | None = None
    gaps: Mapping[str, str] = field(default_factory=dict)
    files: Callable[[], Mapping[str, int]] | None = None
    unproven: Mapping[str, str] = field(default_factory=dict)

    @property
    def shown(self) -> Index:
        """An index whose files are those of the folder, for display; `index` may locate chunks in virtual files."""
        return self.index if self.on_files is None else self.on_files()

    def needed_files(self) -> Mapping[str, int]:
        """Return the minimum length of each file that must exist, by name."""
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
        # Bisection in the columns is much faster than making a shard to see whether it exists.
        return isinstance(key, str) and any(find([key])[0] >= 0 for find in (index.find_keys, index.find_objects))

    def __iter__(self) -> Iterator[str]:
        """Yield the tensors' keys, sorted, then the objects' unique keys, sorted."""
        yield from self.index.keys()
        yield from self.index.object_names()

    def __len__(self) -> int:
        """Return the number of tensors and objects."""
        return self.index.key_axes.size + self.index.object_file.size

    def pairs(self) -> Iterator[tuple[str, ShardedTensor | ShardedObject]]:
        """Yield (name, tensor or object) pairs in order."""
        names = self.index.object_names()
        tensors = ((shard.key, shard) for shard in whole_shards(self.index))
        return chain(tensors, ((name, ShardedObject.empty_from_unique_key(name)) for name in names))

    def kinds(self, keys: Sequence[str]) -> dict[str, TensorKind]:
        """Return the dtype and shape of each stored tensor among the given keys, by key; other keys are left out."""
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
        """Return all objects, without data, that belong to the arrays of objects with the given keys."""
        names = self.index.object_names()
        return [ShardedObject.empty_from_unique_key(name) for name in names if _key_of(name) in keys]


@dataclass(frozen=True, slots=True, eq=False)
class DeferredMetadata(Mapping[str, ShardedTensor | ShardedObject]):
    """Metadata of a checkpoint whose tensors and objects get their final names from further reads.

    Stored names are those in the files, such as the names of an optimizer's buckets. Final names are those that users
    know, such as the names of the optimizer states in these buckets. Iteration yields final names; lookups also accept
    stored names. The reads are deferred until a final name is needed.

    Attributes:
        stored: Tensors and objects under their stored names.
        whole: Function that reads the final names, and returns tensors and objects under these.
    """

    stored: IndexMetadata
    whole: Callable[[], IndexMetadata]

    def __getitem__(self, key: str) -> ShardedTensor | ShardedObject:
        """Return the tensor or object with that name: one that users know, or one in the checkpoint's files."""
        return self.of([key])[key]

    def __contains__(self, key: object) -> bool:
        """Return whether a tensor or object has that name, either for users or in the checkpoint's files."""
        return key in self.stored or key in self.whole()

    def __iter__(self) -> Iterator[str]:
        """Return an iterator over the names that users know, rather than those in the checkpoint's files."""
        return iter(self.whole())

    def __len__(self) -> int:
        """Return the number of tensors and objects, counted by the names that users know."""
        return len(self.whole())

    def of(self, names: Iterable[str]) -> IndexMetadata:
        """Return metadata in which the given names can be looked up.

        If all are names in the checkpoint's files, the metadata lists such names, and nothing is read. Otherwise it
        lists the names that users know.
        """
        return self.stored if all(name in self.stored for name in names) else self.whole()


def stored_keys(metadata: Mapping[str, ShardedTensor | ShardedObject]) -> set[str]:
    """Return the keys of the tensors and objects in a checkpoint's metadata."""
    if isinstance(metadata, IndexMetadata):
        return metadata.shard_keys()
    return {shard.key for shard in metadata.values()}


def stored_kinds(metadata: Mapping[str, ShardedTensor | ShardedObject], keys: Sequence[str]) -> dict[str, TensorKind]:
    """Return the dtype and shape of each given key that is a tensor in a checkpoint's metadata, by key."""
    if isinstance(metadata, IndexMetadata):
        return metadata.kinds(keys)
    shards = {key: metadata[key] for key in keys if key in metadata}
    return {
        key: TensorKind(shard.dtype, shard.global_shape, 0)
        for key, shard in shards.items()
        if isinstance(shard, ShardedTensor)
    }


def untaken_of(metadata: object) -> Mapping[str, str]:
    """Return the reasons why some stored values can't be loaded, by key or name; see `IndexMetadata.untaken`."""
    if isinstance(metadata, DeferredMetadata):
        metadata = metadata.stored
    return metadata.untaken if isinstance(metadata, IndexMetadata) else {}


def reasoned(untaken: Mapping[str, str], name: str) -> str:
    """Return a name in quotes, followed by the reason in `untaken` why its value can't be loaded, if there is one.

    Examples:
        >>> reasoned({"text": "torch has no such dtype"}, "text"), reasoned({}, "w")
        ("'text': torch has no such dtype", "'w'")
    """
    return f"{name!r}: {untaken[name]}" if name in untaken else repr(name)


def _key_of(unique_key: str) -> str:
    return unique_key.rpartition("/shard_")[0]


def stored_fingerprints(metadata: object) -> dict[str, int]:
    """Return the fingerprints in a checkpoint's metadata, by key; empty if the save stored none."""
    if not isinstance(metadata, IndexMetadata) or metadata.index.x_fingerprint is None:
        return {}
    index = metadata.index
    return dict(zip(index.keys(), metadata.index.x_fingerprint.tolist(), strict=True))
