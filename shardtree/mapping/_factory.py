"""ShardedTensorFactory: a tensor that is stored in another form, with the pair of functions between the two."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ..errors import MetadataError
from ..geometry import flat_range, refuse
from ._aliases import FactoryBuildFn, FactoryMergeFn, ReplicaId
from ._base import ShardedBase, check_key, leaf_name, normalise
from ._replica import replica


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ShardedTensorFactory(ShardedBase):
    """A tensor that is stored in another form: `build_fn` gives the tree of shards, `merge_fn` undoes it.

    Args:
        key: the tensor's name.
        data: the tensor as the model holds it.
        build_fn: (key, data, replica_id, flattened_range) -> tree of shards.
        merge_fn: the same tree with loaded tensors -> the tensor.
        replica_id: see ShardedTensor.
        flattened_range: where `data` is flat, the slice of the flattened tensor that it is.

    Raises:
        MetadataError: a field isn't of its kind.

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
        """Raise MetadataError where a function can't be called."""
        for field in ("build_fn", "merge_fn"):
            function = getattr(self, field)
            if not callable(function):
                fix = "Pass build_fn, then merge_fn."
                refuse(leaf_name(self), field, type(function).__name__, "a function", fix, error=MetadataError)

    def build(self) -> Any:
        """Return the tree of shards that stands for the tensor."""
        return self.build_fn(self.key, self.data, self.replica_id, self.flattened_range)

    def without_data(self) -> ShardedTensorFactory:
        """Return the same factory with None as its data."""
        return replace(self, data=None)
