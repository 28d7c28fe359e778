"""DTensors as a strategy draws them: every rank's, made in one process, since none of this communicates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from hypothesis import strategies as some
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool]


@dataclass(frozen=True)
class Case:
    """A tensor and how it is distributed.

    Attributes:
        whole: the global tensor.
        ranks: the mesh, as a tensor of ranks.
        names: of its axes; None for none.
        placements: one for each axis.
    """

    whole: torch.Tensor
    ranks: torch.Tensor
    names: tuple[str, ...] | None
    placements: tuple[Placement, ...]

    def mesh(self, rank: int) -> DeviceMesh:
        return DeviceMesh("cpu", self.ranks, mesh_dim_names=self.names, _init_backend=False, _rank=rank)

    def dtensor(self, rank: int, placements: Sequence[Placement] | None = None) -> DTensor:
        """Return what torch makes of the tensor on one rank."""
        chosen = self.placements if placements is None else placements
        return distribute_tensor(self.whole, self.mesh(rank), chosen, src_data_rank=None)

    def dtensors(self) -> dict[int, DTensor]:
        return {rank: self.dtensor(rank) for rank in sorted(self.ranks.flatten().tolist())}


def placements_for(axes: int) -> some.SearchStrategy[Placement]:
    if not axes:
        return some.just(Replicate())
    dims = some.integers(0, axes - 1)
    strided = some.builds(lambda dim, factor: _StridedShard(dim, split_factor=factor), dims, some.integers(2, 4))
    return some.just(Replicate()) | dims.map(Shard) | strided


def numbered(shape: Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    few = torch.arange(prod(shape)) % (3 if dtype is torch.bool else 251)
    return few.reshape(tuple(shape)).to(dtype)


@some.composite
def cases(draw: some.DrawFn, most_axes: int = 3) -> Case:
    shape = draw(some.lists(some.integers(0, 9), max_size=most_axes))
    sizes = draw(some.lists(some.integers(1, 4), min_size=1, max_size=2))
    ranks = draw(some.permutations(range(prod(sizes))))
    names = draw(some.sampled_from([None, ("dp", "tp")[: len(sizes)]]))
    placements = tuple(draw(placements_for(len(shape))) for _ in sizes)
    whole = numbered(shape, draw(some.sampled_from(DTYPES)))
    return Case(whole, torch.tensor(ranks).view(sizes), names, placements)


def as_fsdp2(case: Case, rank: int) -> torch.Tensor:
    """Return what FSDP2 holds of a tensor whose rows tensor parallelism cut first; the mesh's axes are (dp, tp)."""
    (dp, tp), (first, second) = case.ranks.shape, (case.ranks == rank).nonzero()[0].tolist()
    return chunk(chunk(case.whole, tp, second), dp, first)


def chunk(tensor: torch.Tensor, count: int, number: int) -> torch.Tensor:
    pieces = tensor.chunk(count)
    return pieces[number] if number < len(pieces) else tensor[:0]
