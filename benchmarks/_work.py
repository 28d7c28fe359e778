"""What is saved and loaded: a rank's share of the tensors, and warm memory to load into."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """One rank's part of the job.

    Attributes:
        rank: of this process.
        ranks: how many processes there are.
        folder: where contenders put their files; all ranks see it.
        rows: this rank's row shard of each tensor, (rows / ranks, columns).
        targets: memory like `rows`.
        columns: memory for this rank's column shard of each tensor, (rows, columns / ranks).
    """

    rank: int
    ranks: int
    folder: Path
    rows: Tensors
    targets: Tensors
    columns: Tensors

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors of all ranks."""
        return self.ranks * sum(tensor.nbytes for tensor in self.rows.values())


def work(rank: int, ranks: int, folder: Path, *, size: int, tensors: int) -> Work:
    """Return a rank's work, every page of it touched.

    Args:
        rank: of this process.
        ranks: how many processes there are.
        folder: where contenders put their files.
        size: of all tensors together, in bytes; about kept.
        tensors: how many there are, by turns float32 and bfloat16, equally many bytes each.
    """
    return _work(rank, ranks, folder, [size // tensors] * tensors)


def mixed_work(rank: int, ranks: int, folder: Path, *, size: int, tensors: int) -> Work:
    """Return a rank's work of tensors of 1 KiB to `size` bytes each, all sizes alike; the rest as in `work`."""
    sizes = [1024 + number * 2654435761 % max(1, size - 1023) for number in range(tensors)]
    return _work(rank, ranks, folder, sizes)


def _work(rank: int, ranks: int, folder: Path, sizes: list[int]) -> Work:
    shapes = {f"layers.{number}.weight": _shape(size, _dtype(number), ranks) for number, size in enumerate(sizes)}
    kinds = {name: (_dtype(number), *shape) for number, (name, shape) in enumerate(shapes.items())}
    return Work(
        rank=rank,
        ranks=ranks,
        folder=folder,
        rows={name: _random(dtype, rows // ranks, columns, rank) for name, (dtype, rows, columns) in kinds.items()},
        targets={
            name: torch.zeros(rows // ranks, columns, dtype=dtype) for name, (dtype, rows, columns) in kinds.items()
        },
        columns={
            name: torch.zeros(rows, columns // ranks, dtype=dtype) for name, (dtype, rows, columns) in kinds.items()
        },
    )


def column_shard(mine: Work, rows: Tensors) -> Tensors:
    """Return this rank's columns of a piece of some rows, as views."""
    return {name: tensor.chunk(mine.ranks, 1)[mine.rank] for name, tensor in rows.items()}


def _dtype(number: int) -> torch.dtype:
    return torch.bfloat16 if number % 2 else torch.float32


def _shape(size: int, dtype: torch.dtype, ranks: int) -> tuple[int, int]:
    """Return (rows, columns), both multiples of the number of ranks, of about `size` bytes."""
    elements = max(1, size // dtype.itemsize)
    columns = min(2048, 1 << (elements.bit_length() // 2)) // ranks * ranks or ranks
    return max(1, elements // columns // ranks) * ranks, columns


def _random(dtype: torch.dtype, rows: int, columns: int, rank: int) -> torch.Tensor:
    """Return numbers of chance: what repeats itself would be compressed by who does that."""
    return torch.rand(rows, columns, generator=torch.Generator().manual_seed(rank)).to(dtype)
