"""Two checkpoints compared, of any formats: what only one has, and where values differ, in bounded memory."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from io import BytesIO
from math import prod
from typing import Any

from ..._ambient import shielded
from ..._deferred import notebook_html
from ...errors import shorten
from ...layouts import TensorKind
from ...mapping import LocalNonpersistentObject, ShardedBase, ShardedObject, ShardedTensor
from ...plans import size_text
from ...storage import Directory
from ...strategies import LoadOptions, Strategies
from ...trees import Difference, Record, diff, map_shards
from .._differences import ValueDifference
from .._dispatch import given_options
from ..opened import open_checkpoint
from ._values import BoxReader, value_differences

MOST_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class KindDifference:
    """How a tensor differs before any element is looked at.

    Attributes:
        key: the tensor's.
        left: dtype and global shape on the left.
        right: on the right.
    """

    key: str
    left: TensorKind
    right: TensorKind

    def __str__(self) -> str:
        return f"{self.key!r}: {self.left} and {self.right}"


@dataclass(frozen=True, slots=True, repr=False)
class CheckpointDifference:
    """Where two checkpoints differ; true where they do.

    Attributes:
        only_left: keys of tensors and unique keys of objects that only the left one has.
        only_right: that only the right one has.
        kinds: tensors of another dtype or global shape.
        values: tensors with other elements.
        objects: unique key → where an object differs.
        common: where the common states differ.
        nbytes: bytes of tensors that were compared, of each.
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
    max_bytes_in_flight: int = MOST_BYTES,
    strategies: Strategies | None = None,
    options: LoadOptions | None = None,
) -> CheckpointDifference:
    """Return where two checkpoints differ, whatever formats they are in and however they are cut; not collective.

    Equal means bit for bit: NaN equals the same NaN, 0.0 isn't -0.0. Tensors are read piece by piece.

    Args:
        left: where one checkpoint is.
        right: where the other one is.
        max_bytes_in_flight: about how much memory the comparison of tensors may take.
        strategies: the dispatch table; None for the process's.
        options: how both are read; `progress` is called with the bytes of each that were compared since the last call.

    Raises:
        NotACheckpoint: one of them isn't there.
        UnsafeFile: one holds pickled values, and `allow_pickle` isn't given.

    Examples:
        >>> import tempfile, torch, shardtree as st
        >>> def saved(values):
        ...     folder = tempfile.mkdtemp()
        ...     st.save({"w": st.ShardedTensor.from_rank_offsets("w", torch.tensor(values)), "step": 7}, folder)
        ...     return folder
        >>> found = compare(saved([1.0, 2.0]), saved([1.0, 2.5]))
        >>> [str(each) for each in found.values], bool(found.common)
        (["'w': 1 of 2 elements differ, by at most 0.5; the first at (1,): 2.0 and 2.5"], False)
    """
    options = given_options("compare", options, LoadOptions)
    # Progress counts what is compared, not what is read for it: a format may read more, or twice.
    quiet = replace(options, progress=LoadOptions().progress)
    mine, theirs = (open_checkpoint(each, strategies=strategies, options=quiet) for each in (left, right))
    both = [key for key in mine if key in theirs and type(mine.metadata[key]) is type(theirs.metadata[key])]
    known = set(both)
    found = ((key, mine.metadata[key], theirs.metadata[key]) for key in both)
    kinds = [unlike for key, *pair in found if (unlike := _kind_difference(key, *pair))]
    # Elements of another dtype or shape aren't compared: the kinds already say that the tensors differ.
    unlike_keys = {each.key for each in kinds}
    alike = [shard for key in both if key not in unlike_keys and isinstance(shard := mine.metadata[key], ShardedTensor)]
    left_reader, right_reader = BoxReader(mine), BoxReader(theirs)
    pairs = ((shard.key, left_reader.whole(shard.key), right_reader.whole(shard.key)) for shard in alike)
    values = value_differences(pairs, left_reader, right_reader, max_bytes_in_flight, options.progress)
    differences = tuple(difference for difference in values if difference is not None)
    items = [key for key in both if isinstance(mine.metadata[key], ShardedObject)]
    objects = {key: plain_difference(mine[key].data, theirs[key].data) for key in items}
    return CheckpointDifference(
        tuple(key for key in mine if key not in known),
        tuple(key for key in theirs if key not in known),
        tuple(kinds),
        differences,
        {key: found for key, found in objects.items() if found},
        plain_difference(mine.common(), theirs.common()),
        sum(prod(shard.global_shape) * shard.dtype.itemsize for shard in alike),
    )


def _kind_difference(key: str, left: ShardedBase, right: ShardedBase) -> KindDifference | None:
    if not isinstance(left, ShardedTensor) or not isinstance(right, ShardedTensor):
        return None
    mine, theirs = (TensorKind(shard.dtype, shard.global_shape, 0) for shard in (left, right))
    return None if mine == theirs else KindDifference(key, mine, theirs)


def plain_difference(left: Any, right: Any) -> Difference:
    """Return where two trees of plain values differ, entering records and other values with fields.

    Examples:
        >>> plain_difference({"args": Namespace(lr=0.1, seed=1)}, {"args": Namespace(lr=0.1, seed=2)}).mismatch
        (('args', 'seed'),)
    """
    return diff(_as_fields(left), _as_fields(right))


def _as_fields(tree: Any) -> Any:
    return map_shards(_as_fields_leaf, tree)


def _as_fields_leaf(leaf: Any) -> Any:
    """Return a value as dicts of its fields; its kind is the entry "", a name that no field has."""
    # A class that isn't imported comes back as a Record: only so do two checkpoints compare alike in every program.
    if isinstance(leaf, Record):
        return {"": leaf.type_name, **_as_fields(dict(leaf.fields))}
    if isinstance(leaf, Namespace):
        return {"": "Namespace", **_as_fields(vars(leaf))}
    if isinstance(leaf, BytesIO):
        return {"": "BytesIO", "bytes": leaf.getvalue(), "position": leaf.tell()}
    if is_dataclass(leaf) and not isinstance(leaf, (type, ShardedBase, LocalNonpersistentObject)):
        return {
            "": type(leaf).__qualname__,
            **{each.name: _as_fields(getattr(leaf, each.name)) for each in fields(leaf)},
        }
    return leaf
