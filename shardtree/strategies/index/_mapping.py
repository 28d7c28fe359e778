"""What is in a checkpoint, as a mapping whose values are made when asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ...mapping import ShardedObject, ShardedTensor
from ._columns import Index
from ._rows import whole_shard
from ._texts import find_texts, texts


@dataclass(frozen=True, slots=True, eq=False)
class IndexMetadata(Mapping[str, ShardedTensor | ShardedObject]):
    """Stored tensors by key and objects by unique key, whole and without data, so that a million open at once."""

    index: Index

    def __getitem__(self, key: str) -> ShardedTensor | ShardedObject:
        """Return the tensor of a key, or the object of a unique key."""
        index = self.index
        (number,) = find_texts(index.key_text, index.key_start, [key])
        if number >= 0:
            return whole_shard(index, number, key)
        (number,) = find_texts(index.object_text, index.object_start, [key])
        if number < 0:
            raise KeyError(key)
        return ShardedObject.empty_from_unique_key(key)

    def __iter__(self) -> Iterator[str]:
        """Return the tensors' keys, sorted, then the objects' unique keys, sorted."""
        yield from texts(self.index.key_text, self.index.key_start)
        yield from texts(self.index.object_text, self.index.object_start)

    def __len__(self) -> int:
        """Return how many tensors and objects there are."""
        return self.index.key_axes.size + self.index.object_file.size
