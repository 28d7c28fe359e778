"""Where a rank stands in a layout, and the sums over its groups: what a parallel run needs of torch.distributed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Layout:
    """How many ranks share each tensor (tp), and how many share the batch and the optimizer's states (dp)."""

    tp: int
    dp: int

    @property
    def size(self) -> int:
        return self.tp * self.dp


@dataclass(frozen=True)
class Place:
    """One rank of a layout. Neighbours share tensors: rank = dp_rank * tp + tp_rank, as in Megatron."""

    layout: Layout
    tp_rank: int
    dp_rank: int
    tp_group: Any = None
    dp_group: Any = None

    @property
    def rank(self) -> int:
        return self.dp_rank * self.layout.tp + self.tp_rank


def joined_place(layout: Layout, rank: int) -> Place:
    """Return a rank's place, once all ranks of the default group have made the layout's groups together."""
    if layout.size == 1:
        return Place(layout, 0, 0)
    grid = torch.arange(layout.size).view(layout.dp, layout.tp)
    tp_groups = [dist.new_group(ranks) for ranks in grid.tolist()]
    dp_groups = [dist.new_group(ranks) for ranks in grid.T.tolist()]
    dp_rank, tp_rank = divmod(rank, layout.tp)
    return Place(layout, tp_rank, dp_rank, tp_groups[dp_rank], dp_groups[tp_rank])


def summed(tensor: torch.Tensor, group: Any) -> torch.Tensor:
    """Return the sum over the ranks of a group; without a group, the tensor."""
    if group is None:
        return tensor
    total = tensor.clone()
    dist.all_reduce(total, group=group)
    return total


def largest(tensor: torch.Tensor, group: Any) -> torch.Tensor:
    """Return the largest values over the ranks of a group."""
    if group is None:
        return tensor
    found = tensor.clone()
    dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
    return found


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return summed(gradient, ctx.group), None


class _Reduced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: Any) -> torch.Tensor:
        return summed(tensor, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


def copied(tensor: torch.Tensor, group: Any) -> torch.Tensor:
    """Return what all ranks have, at the entry of what each computes a part of: gradients are summed."""
    return _Copied.apply(tensor, group)  # type: ignore[no-any-return]


def reduced(tensor: torch.Tensor, group: Any) -> torch.Tensor:
    """Return the sum of the ranks' parts, which all of them have from here on: gradients pass as they are."""
    return _Reduced.apply(tensor, group)  # type: ignore[no-any-return]
