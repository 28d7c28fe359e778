"""DCP's default planners on the layout of many ranks, in one process and without a process group."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

Tree = dict[str, Any]


class PlacedTensor(torch.Tensor):
    """A tensor that answers DCP as a DTensor does, and knows its place: it needn't be computed from a mesh."""

    whole: torch.Size
    box: ChunkStorageMetadata
    properties: TensorProperties

    def size(self, *_: Any) -> Any:
        """Return the global shape, as a DTensor does."""
        return self.whole

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        data = TensorWriteData(chunk=self.box, properties=self.properties, size=self.whole)
        return [WriteItem(index=MetadataIndex(fqn, self.box.offsets), type=WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [self.box]


def placed_tensor(
    whole: tuple[int, ...], offset: tuple[int, ...], shape: tuple[int, ...], dtype: torch.dtype
) -> PlacedTensor:
    """Return a tensor that says that it is a box of a larger one."""
    made: PlacedTensor = torch.empty(0, dtype=dtype).as_subclass(PlacedTensor)
    made.whole = torch.Size(whole)
    made.box = ChunkStorageMetadata(torch.Size(offset), torch.Size(shape))
    made.properties = TensorProperties(dtype)
    return made


def save_planner(tree: Tree, rank: int, *, caching: bool = False) -> DefaultSavePlanner:
    """Return a rank's planner, as a save sets it up; with plans kept by rank, since here all ranks share a process."""
    planner = DefaultSavePlanner(enable_plan_caching=caching)
    planner.set_up_planner(tree, None, rank == 0)
    planner._cached_plans_key = f"rank {rank}"
    return planner


def global_save_plan(planner: DefaultSavePlanner, plans: Sequence[SavePlan]) -> tuple[list[SavePlan], Metadata]:
    """Return what the coordinator tells the ranks, and the metadata that is stored."""
    return planner.create_global_plan(list(plans))


def finished(planners: Iterable[DefaultSavePlanner], plans: Iterable[SavePlan]) -> list[SavePlan]:
    """Return each rank's final plan."""
    return [planner.finish_plan(plan) for planner, plan in zip(planners, plans, strict=True)]


def load_plan(tree: Tree, metadata: Metadata, rank: int) -> LoadPlan:
    """Return what a rank reads. The global plan is the list of these: there DCP has nothing to do."""
    planner = DefaultLoadPlanner()
    planner.set_up_planner(tree, metadata, rank == 0)
    local = planner.create_local_plan()
    return planner.finish_plan(planner.create_global_plan([local])[0])


def forget_plans() -> None:
    """Remove all plans that planners keep for the next save."""
    for kept in ("_cached_save_plan", "_cached_final_save_plan", "_cached_all_plans", "_cached_global_plan"):
        getattr(SavePlanner, kept).clear()
    SavePlanner._cached_metadata.clear()
