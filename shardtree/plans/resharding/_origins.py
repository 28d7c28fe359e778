"""Where a tensor's bytes come from, box by box: as data, and as a table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ...errors import KeyMismatch, error_text, shorten
from ...geometry import box_slices
from ...layouts import ShardColumns, TensorKind, place_text
from ...mapping import ShardedTensor, ShardedTensorFactory
from ...trees import leaves_with_paths, path_key
from .._near import near_names
from .._tables import size_text, table_lines
from ._summary import cast_text
from ._transfers import Transfers

_SHOWN = 40


@dataclass(frozen=True, slots=True)
class Origin:
    """A box of a tensor that a rank gets, and from whom.

    Attributes:
        rank: who gets it.
        from_rank: who has it before; the same, where it stays.
        box: in the global tensor, as slices.
        nbytes: its bytes.
        hop: 0 where it comes from a shard of the source, 1 or more where from a target shard that was filled before.
        key: the tensor's.
    """

    rank: int
    from_rank: int
    box: tuple[slice, ...]
    nbytes: int
    hop: int
    key: str


@dataclass(frozen=True, slots=True)
class Provenance:
    """Where each box of a tensor comes from, on every rank. Its text is a table.

    Attributes:
        name: under which it was asked for: the tensor's key, or where the target's trees hold it.
        kinds: dtype and global shape afterwards by key, of the tensor, or of all that a factory of that name builds.
        origins: by key, rank, then box.
        casts: the dtypes before and after, by key, where they differ.
    """

    name: str
    kinds: Mapping[str, TensorKind]
    origins: tuple[Origin, ...]
    casts: Mapping[str, tuple[torch.dtype, torch.dtype]] = field(default_factory=dict)

    @property
    def bytes_moved(self) -> int:
        """How many of its bytes go from one rank to another."""
        return sum(one.nbytes for one in self.origins if one.rank != one.from_rank)

    @property
    def bytes_kept(self) -> int:
        """How many of its bytes stay on their rank."""
        return sum(one.nbytes for one in self.origins if one.rank == one.from_rank)

    def __str__(self) -> str:
        moved, kept = size_text(self.bytes_moved), size_text(self.bytes_kept)
        stored = ", ".join(f"{key!r} {kind}" for key, kind in self.kinds.items())
        of = stored if self.name in self.kinds else f"{self.name!r}, which is {stored}"
        rows = [("rank", "gets", "bytes", "from"), *map(_row, self.origins)]
        if len(self.kinds) > 1:
            rows = [(*row, key) for row, key in zip(rows, ["of", *(one.key for one in self.origins)], strict=True)]
        heading, *lines = table_lines(rows)
        casts = "".join(f", {text}" for text in dict.fromkeys(cast_text(*dtypes) for dtypes in self.casts.values()))
        return "\n".join([f"{of}: {moved} move, {kept} stay{casts}", heading, *shorten(lines, _SHOWN)])


def _row(one: Origin) -> tuple[str, ...]:
    whom = "itself" if one.rank == one.from_rank else f"rank {one.from_rank}"
    return str(one.rank), place_text(one.box), size_text(one.nbytes), whom + (" (passed on)" if one.hop else "")


def names_of_tensors(trees: Iterable[tuple[Any, Any]]) -> dict[str, tuple[str, ...]]:
    """Return the keys of tensors by the other names that trees have for them: their places, and factories' keys.

    Args:
        trees: each rank's tree, with what `apply_factories` gave of it.

    Examples:
        >>> import torch
        >>> tree = {"model": {"up": ShardedTensor.from_rank_offsets("w", torch.zeros(2))}}
        >>> names_of_tensors([(tree, tree)])
        {'model.up': ('w',)}
    """
    names: dict[str, dict[str, None]] = {}
    for tree, applied in trees:
        held = leaves_with_paths(tree)
        factories = {path: leaf.key for path, leaf in held if isinstance(leaf, ShardedTensorFactory)}
        depths = sorted(set(map(len, factories)))
        for path, leaf in leaves_with_paths(applied):
            if not isinstance(leaf, ShardedTensor):
                continue
            # What a factory builds has the factory's place, and its key.
            place = next((path[:depth] for depth in depths if path[:depth] in factories), path)
            for name in {path_key(place), factories.get(place, leaf.key)} - {leaf.key}:
                names.setdefault(name, {})[leaf.key] = None
    return {name: tuple(keys) for name, keys in names.items()}


def tensor_origins(
    target: ShardColumns,
    transfers: Transfers,
    name: str,
    names: Mapping[str, tuple[str, ...]],
    casts: Mapping[str, tuple[torch.dtype, torch.dtype]],
) -> Provenance:
    """Return where the bytes of one tensor come from, or of all that are stored for one name.

    Args:
        target: the shards of all ranks after.
        transfers: what goes where.
        name: the tensor's key, or else one of `names`.
        names: keys by other names, as `names_of_tensors` gives them.
        casts: the dtypes before and after, by key, of tensors that are cast.

    Raises:
        KeyMismatch: no shard of the target is of that tensor.
    """
    keys = (name,) if name in target.keys else names.get(name)
    if keys is None:
        near = near_names([name], [*target.keys, *names])
        fix = f"Did you mean {near[name]!r}?" if near else "Ask for one of the keys of plan.target."
        raise KeyMismatch(error_text(f"explain: no tensor {name!r} in the target", fix=fix))
    kinds = {key: target.kinds[target.keys.index(key)] for key in keys}
    origins = tuple(one for key in keys for one in _origins(target, transfers, key))
    return Provenance(name, kinds, origins, {key: casts[key] for key in keys if key in casts})


def _origins(target: ShardColumns, transfers: Transfers, key: str) -> Iterable[Origin]:
    number = target.keys.index(key)
    rows = np.flatnonzero(transfers.key == number)
    rows = rows[np.lexsort((*transfers.offset[rows].T[::-1], transfers.to_rank[rows]))]
    boxes = zip(transfers.offset[rows], transfers.shape[rows], strict=True)
    columns = (getattr(transfers, name)[rows].tolist() for name in ("to_rank", "from_rank", "nbytes", "hop"))
    axes = len(target.kinds[number].global_shape)
    for (offset, shape), rank, sender, nbytes, hop in zip(boxes, *columns, strict=True):
        yield Origin(rank, sender, box_slices(offset, shape, axes), nbytes, hop, key)
