"""Where a tensor's bytes come from, box by box: as data, and as a table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from ...errors import KeyMismatch, error_text, shorten
from ...geometry import box_slices
from ...layouts import ShardColumns, TensorKind, place_text
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
    """

    rank: int
    from_rank: int
    box: tuple[slice, ...]
    nbytes: int
    hop: int


@dataclass(frozen=True, slots=True)
class Provenance:
    """Where each box of one tensor comes from, on every rank. Its text is a table.

    Attributes:
        key: the tensor's.
        kind: its dtype and global shape, afterwards.
        origins: by rank, then box.
        cast_from: its dtype before, where that is another.
    """

    key: str
    kind: TensorKind
    origins: tuple[Origin, ...]
    cast_from: torch.dtype | None = None

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
        heading, *lines = table_lines([("rank", "gets", "bytes", "from"), *map(_row, self.origins)])
        cast = f", {cast_text(self.cast_from, self.kind.dtype)}" if self.cast_from else ""
        told = f"{self.key!r} {self.kind}: {moved} move, {kept} stay{cast}"
        return "\n".join([told, heading, *shorten(lines, _SHOWN)])


def _row(one: Origin) -> tuple[str, str, str, str]:
    whom = "itself" if one.rank == one.from_rank else f"rank {one.from_rank}"
    return str(one.rank), place_text(one.box), size_text(one.nbytes), whom + (" (passed on)" if one.hop else "")


def tensor_origins(
    target: ShardColumns, transfers: Transfers, key: str, casts: Mapping[str, tuple[torch.dtype, torch.dtype]]
) -> Provenance:
    """Return where the bytes of one tensor come from.

    Args:
        target: the shards of all ranks after.
        transfers: what goes where.
        key: the tensor's.
        casts: the dtypes before and after, by key, of tensors that are cast.

    Raises:
        KeyMismatch: no shard of the target is of that tensor.
    """
    if key not in target.keys:
        near = near_names([key], target.keys)
        fix = f"Did you mean {near[key]!r}?" if near else "Ask for one of the keys of plan.target."
        raise KeyMismatch(error_text(f"explain: no tensor {key!r} in the target", fix=fix))
    number = target.keys.index(key)
    kind = target.kinds[number]
    rows = np.flatnonzero(transfers.key == number)
    rows = rows[np.lexsort((*transfers.offset[rows].T[::-1], transfers.to_rank[rows]))]
    boxes = zip(transfers.offset[rows], transfers.shape[rows], strict=True)
    columns = (getattr(transfers, name)[rows].tolist() for name in ("to_rank", "from_rank", "nbytes", "hop"))
    return Provenance(
        key,
        kind,
        tuple(
            Origin(rank, sender, box_slices(offset, shape, len(kind.global_shape)), nbytes, hop)
            for (offset, shape), rank, sender, nbytes, hop in zip(boxes, *columns, strict=True)
        ),
        casts[key][0] if key in casts else None,
    )
