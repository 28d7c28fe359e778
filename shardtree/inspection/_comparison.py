"""A comparison of two checkpoints, of any formats, in bounded memory: keys of only one, and differing values."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial
from io import BytesIO
from math import prod
from threading import Lock
from typing import Any, ClassVar

import torch

from ..core import limits
from ..core.ambient import shielded
from ..core.deferred import notebook_html
from ..core.layouts import TensorKind
from ..core.lazy import LazyTensor, stored
from ..core.mapping import LocalNonpersistentObject, ShardedBase, ShardedObject, ShardedTensor, box_of
from ..core.offences import offence_text
from ..core.plans import grouped
from ..core.trees import Difference, Record, diff, map_shards
from ..errors import shorten, size_text
from ..shell.checkpoint import given_options, sharded_backend, strategy_of
from ..shell.checkpoint.loading import new_memory
from ..shell.storage import Directory, HostMemory, can
from ..shell.table import (
    LoadOptions,
    Strategies,
    StrategyAction,
    check_unreplaced,
    traits_of,
    unless_replaced,
)
from ._differences import ValueDifference, value_difference
from ._opened import OpenCheckpoint, open_checkpoint

# Reads of boxes of a checkpoint's tensors; announced small tensors are read together.

TensorBox = tuple[str, tuple[int, ...], tuple[int, ...]]
"""Key of a tensor, and offset and shape of a box of it."""

_GROUP_BYTES = 4 * 1024 * 1024  # fits the processor's cache, together with the results of comparing
_DECODED_GROUP_BYTES = 8 * _GROUP_BYTES
_REMOTE_GROUP_BYTES = 32 * _GROUP_BYTES


def _is_remote(reader: BoxReader) -> bool:
    """Return whether each read is a request to a remote storage."""
    return can(reader.tree.checkpoint.storage).read_range is not None


def group_bytes(reader: BoxReader) -> int:
    """Return the number of bytes that one read plan should cover.

    It is larger if each read is a request to a remote storage, or if the format always decodes whole chunks.
    """
    if _is_remote(reader):
        return _REMOTE_GROUP_BYTES
    tree = reader.tree
    traits = traits_of(*sharded_backend(tree.checkpoint.fields), tree.strategies)
    return _DECODED_GROUP_BYTES if traits.cuts_chunks == "never" else _GROUP_BYTES


_LEAST_LENT, _MOST_LENT = 1024 * 1024, 256 * 1024 * 1024  # allocators keep smaller blocks themselves; larger are rare


@dataclass(slots=True, eq=False)
class BoxReader:
    """A reader of boxes of a checkpoint's tensors, which plans many small reads at a time.

    Planning takes longer than a small read, and so does checking whether the checkpoint was replaced. Callers announce
    tensors by `expect`, and call `check` once before they use the elements of several reads.

    Attributes:
        tree: Checkpoint to read.
        key_class: Class of the checkpoint's keys, to distinguish its tensors from lazy tensors of other checkpoints.
        memory: Reused memory for large boxes: new memory for each would cost about as much as reading the box.
    """

    tree: OpenCheckpoint
    key_class: type[str] = str
    memory: HostMemory = field(default_factory=HostMemory)
    _lock: Lock = field(default_factory=Lock)
    _group_of: dict[TensorBox, tuple[TensorBox, ...]] = field(default_factory=dict)
    _read_ahead: dict[TensorBox, torch.Tensor] = field(default_factory=dict)
    _newest: Any = None

    def expect(self, tensors: Iterable[Any]) -> None:
        """Announce the tensors that will be read next. They replace those announced before; nothing is read yet."""
        most = group_bytes(self) // (8 if _is_remote(self) else 32)  # larger tensors gain nothing from a common plan
        fetches = (fetch for each in tensors if isinstance(each, LazyTensor) for fetch in each.fetches)
        small = dict.fromkeys(fetch for fetch in fetches if fetch.nbytes <= most and self._has(fetch.name))
        with self._lock:
            self._group_of.clear()
            self._read_ahead.clear()
            for group in grouped(small, lambda fetch: fetch.nbytes, group_bytes(self)):
                boxes = tuple((str(fetch.name), fetch.offset, fetch.shape) for fetch in group)
                self._group_of.update(dict.fromkeys(boxes, boxes))

    def _has(self, name: str) -> bool:
        return isinstance(name, self.key_class) and name in self.tree.metadata

    def read(self, key: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
        """Return a box's elements, in memory that belongs to the caller."""
        # A box that is requested twice is read twice, since results aren't kept after they are returned.
        box = (str(key), offset, shape)
        with self._lock:  # a format may write several files at a time
            group = self._group_of.get(box)
            if group is not None:
                for member, data in zip(group, self._read(group), strict=True):
                    self._read_ahead[member] = data
                    del self._group_of[member]
            tensor = self._read_ahead.pop(box, None)
        return self._read([box])[0] if tensor is None else tensor

    def _read(self, boxes: Sequence[TensorBox]) -> list[torch.Tensor]:
        """Return the elements of boxes, read by one plan. Each box must have elements, and lie inside its tensor."""
        shards = [self._target(*box) for box in boxes]
        checkpoint = self.tree.checkpoint
        backend = sharded_backend(checkpoint.fields)
        load_sharded = strategy_of(StrategyAction.LOAD_SHARDED, None, backend, self.tree.strategies)
        with unless_replaced(checkpoint):
            load_sharded(checkpoint, shards)
        return [shard.data for shard in shards]

    def check(self) -> None:
        """Raise CheckpointReplaced if another save has replaced the checkpoint since it was opened."""
        check_unreplaced(self.tree.checkpoint)

    def _target(self, key: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> ShardedTensor:
        if self._newest is None or self._newest.key != key:
            self._newest = self.tree.metadata[key]  # the next box is mostly of the same tensor
        shard = self._newest
        nbytes = prod(shape) * shard.dtype.itemsize
        if _LEAST_LENT <= nbytes <= _MOST_LENT:
            data = self.memory.lend(nbytes).view(shard.dtype).view(shape)
        else:
            data = new_memory(key, shape, shard.dtype)
        return box_of(key, data, shard.dtype, shard.global_shape, offset, shape)

    def whole(self, key: str) -> LazyTensor:
        """Return a tensor whose elements are read through this reader."""
        shard: Any = self.tree.metadata[key]
        return stored(partial(self.read, key), shard.global_shape, shard.dtype, name=key)


Pair = tuple[str, Any, Any]
"""Key of a tensor, and the two tensors to compare, lazy or in memory."""


def value_differences(
    pairs: Iterable[Pair], left: BoxReader, right: BoxReader, most_bytes: int, progress: Callable[[int], None]
) -> Iterator[ValueDifference | None]:
    """Yield the difference of each pair of tensors, None if they are equal, reading piece by piece.

    Args:
        pairs: Pairs to compare; the tensors of a pair have the same dtype and shape.
        left: Reader of the left tensors.
        right: Reader of the right tensors.
        most_bytes: Approximate bound of the memory.
        progress: Callback with the number of bytes compared on each side since its last call.
    """
    most_together = min(most_bytes, max(group_bytes(left), group_bytes(right)))
    for group in grouped(pairs, lambda pair: int(pair[1].nbytes), most_together):
        # Small tensors are read together: planning each read by itself would take longer than the reads.
        left.expect(mine for _, mine, _ in group)
        right.expect(theirs for *_, theirs in group)
        differences = [value_difference(*pair, most_bytes, progress) for pair in group]
        left.check()
        right.check()
        yield from differences


@dataclass(frozen=True, slots=True)
class KindDifference:
    """A tensor that has different dtypes or global shapes in two checkpoints, so that elements aren't compared.

    Attributes:
        key: Key of the tensor.
        left: Dtype and global shape on the left.
        right: Dtype and global shape on the right.
    """

    where: ClassVar[str] = ""
    fix: ClassVar[str] = ""

    key: str
    left: TensorKind
    right: TensorKind

    __str__ = offence_text

    @property
    def what(self) -> str:
        """The left and right dtypes and shapes."""
        return f"{self.left} and {self.right}"


@dataclass(frozen=True, slots=True, repr=False)
class CheckpointDifference:
    """The differences of two checkpoints; true if there are any.

    Attributes:
        only_left: Keys of tensors and unique keys of objects that only the left checkpoint has.
        only_right: Keys and unique keys that only the right checkpoint has.
        kinds: Tensors with different dtypes or global shapes.
        values: Tensors with different elements.
        objects: Differences of objects, by unique key.
        common: Differences of the common states.
        nbytes: Number of bytes of tensors that were compared on each side.
    """

    only_left: tuple[str, ...] = ()
    only_right: tuple[str, ...] = ()
    kinds: tuple[KindDifference, ...] = ()
    values: tuple[ValueDifference, ...] = ()
    objects: Mapping[str, Difference] = field(default_factory=dict)
    common: Difference = field(default_factory=Difference)
    nbytes: int = 0

    def __str__(self) -> str:
        sides = (("only in the left one", self.only_left), ("only in the right one", self.only_right))
        lines = [f"{name}: {', '.join(shorten(map(repr, keys)))}" for name, keys in sides if keys]
        lines += shorten([*map(str, self.kinds), *map(str, self.values), *(f"{key!r} differs" for key in self.objects)])
        lines += ["the common states differ"] if self.common else []
        return "\n".join(lines) if self else f"equal, bit for bit: {size_text(self.nbytes)} of tensors compared"

    def __repr__(self) -> str:
        counts = (len(self.only_left), len(self.only_right), len(self.kinds) + len(self.values), len(self.objects))
        names = ("only left", "only right", "differing tensors", "differing objects")
        return f"CheckpointDifference({', '.join(f'{n} {name}' for n, name in zip(counts, names, strict=True))})"

    def _repr_html_(self) -> str:
        return notebook_html(self)

    def __bool__(self) -> bool:
        lists = (self.only_left, self.only_right, self.kinds, self.values, self.objects, self.common)
        return any(map(bool, lists))


@shielded
def compare(
    left: Directory,
    right: Directory,
    *,
    max_bytes_in_flight: int = limits.COMPARED_BYTES,
    strategies: Strategies | None = None,
    options: LoadOptions | None = None,
) -> CheckpointDifference:
    """Return the differences of two checkpoints, of any formats and layouts; not collective.

    Equal means bit for bit: NaN equals the same NaN, 0.0 isn't -0.0. Tensors are read piece by piece.

    Args:
        left: Path, URL or storage of one checkpoint.
        right: Path, URL or storage of the other checkpoint.
        max_bytes_in_flight: Approximate bound of the memory for comparing tensors.
        strategies: Dispatch table; None for the process's.
        options: Options for reading both checkpoints; `progress` is called with the number of bytes compared on each
            side since its last call.

    Raises:
        NotACheckpoint: One of the checkpoints doesn't exist.
        UnsafeFile: One of the checkpoints holds pickled values, and `allow_pickle` isn't given.

    Examples:
        >>> import tempfile, torch, shardtree as st
        >>> def saved(values):
        ...     folder = tempfile.mkdtemp()
        ...     st.save({"w": st.ShardedTensor.from_rank_offsets("w", torch.tensor(values)), "step": 7}, folder)
        ...     return folder
        >>> difference = compare(saved([1.0, 2.0]), saved([1.0, 2.5]))
        >>> [str(each) for each in difference.values], bool(difference.common)
        (["'w': 1 of 2 elements differ, by at most 0.5; the first at (1,): 2.0 and 2.5"], False)
    """
    options = given_options("compare", options, LoadOptions)
    # Progress counts compared bytes, not bytes read for that: a format may read more, or twice.
    quiet = replace(options, progress=LoadOptions().progress)
    mine, theirs = (open_checkpoint(source, strategies=strategies, options=quiet) for source in (left, right))
    both = [key for key in mine if key in theirs and type(mine.metadata[key]) is type(theirs.metadata[key])]
    keys_of_both = set(both)
    pairs_of_both = ((key, mine.metadata[key], theirs.metadata[key]) for key in both)
    kinds = [unlike for key, *pair in pairs_of_both if (unlike := _kind_difference(key, *pair))]
    # Tensors of different dtypes or shapes are excluded: the kinds already show that they differ.
    unlike_keys = {source.key for source in kinds}
    alike = [shard for key in both if key not in unlike_keys and isinstance(shard := mine.metadata[key], ShardedTensor)]
    left_reader, right_reader = BoxReader(mine), BoxReader(theirs)
    pairs = ((shard.key, left_reader.whole(shard.key), right_reader.whole(shard.key)) for shard in alike)
    values = value_differences(pairs, left_reader, right_reader, max_bytes_in_flight, options.progress)
    differences = tuple(difference for difference in values if difference is not None)
    items = [key for key in both if isinstance(mine.metadata[key], ShardedObject)]
    objects = {key: plain_difference(mine[key].data, theirs[key].data) for key in items}
    return CheckpointDifference(
        tuple(key for key in mine if key not in keys_of_both),
        tuple(key for key in theirs if key not in keys_of_both),
        tuple(kinds),
        differences,
        {key: difference for key, difference in objects.items() if difference},
        plain_difference(mine.common(), theirs.common()),
        sum(prod(shard.global_shape) * shard.dtype.itemsize for shard in alike),
    )


def _kind_difference(key: str, left: ShardedBase, right: ShardedBase) -> KindDifference | None:
    if not isinstance(left, ShardedTensor) or not isinstance(right, ShardedTensor):
        return None
    mine, theirs = (TensorKind(shard.dtype, shard.global_shape, 0) for shard in (left, right))
    return None if mine == theirs else KindDifference(key, mine, theirs)


def plain_difference(left: Any, right: Any) -> Difference:
    """Return the differences of two trees of plain values; dataclasses, namespaces and records are compared by field.

    Examples:
        >>> plain_difference({"args": Namespace(lr=0.1, seed=1)}, {"args": Namespace(lr=0.1, seed=2)}).mismatch
        (('args', 'seed'),)
    """
    return diff(_as_fields(left), _as_fields(right))


def _as_fields(tree: Any) -> Any:
    return map_shards(_as_fields_leaf, tree)


def _as_fields_leaf(leaf: Any) -> Any:
    """Convert a record, namespace, dataclass or BytesIO to nested dicts of its fields; return other values unchanged.

    A dict's entry "" is the name of the type.
    """
    # A value whose class isn't imported is a Record. As dicts, values compare alike, whether or not the class is
    # imported.
    if isinstance(leaf, Record):
        return {"": leaf.type_name, **_as_fields(dict(leaf.fields))}
    if isinstance(leaf, Namespace):
        return {"": "Namespace", **_as_fields(vars(leaf))}
    if isinstance(leaf, BytesIO):
        return {"": "BytesIO", "bytes": leaf.getvalue(), "position": leaf.tell()}
    if is_dataclass(leaf) and not isinstance(leaf, (type, ShardedBase, LocalNonpersistentObject)):
        return {
            "": type(leaf).__qualname__,
            **{field.name: _as_fields(getattr(leaf, field.name)) for field in fields(leaf)},
        }
    return leaf
