"""`CheckpointWriter`, through which DCP's save saves by shardtree."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.distributed.checkpoint import StorageWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from ...core.mapping import ShardedTensor
from ...errors import TreePath, WorldError, error_text
from ...shell.checkpoint import Choice, save
from ...shell.storage import Directory
from ...shell.table import SaveOptions, Strategies
from ...shell.world import World, agree, distributed, one_process
from ._planned import Box, done, flattened, named, refuse_other_boxes


class CheckpointWriter(StorageWriter):
    """A ``storage_writer`` for `dcp.save` and `dcp.async_save` that saves by shardtree, in any format that it writes.

    DCP's planner decides which rank writes what. Ranks then save together, as in `save`: all or nothing, with hashes,
    and with errors on every rank. `write_data` commits the checkpoint, since DCP calls `finish` on one rank alone:
    until the commit the old checkpoint is there, and once `write_data` has returned on any rank, the new one.

    Args:
        checkpoint_dir: The checkpoint's folder, URL or `Storage`; the ``checkpoint_id`` of `dcp.save` replaces it.
        backend: The format, as `sharded_strategy` of `save`; the native one by default.
        process_group: The process group that is passed to `dcp.save`, if there is one.
        overwrite: Whether an existing checkpoint may be replaced.
        strategies: The dispatch table; None for the process's.
        options: Options of the save.

    Raises:
        CheckpointingException: Inside the `CheckpointException` of `dcp.save`: an error of `save`, or WorldError for
            ranks of another process group or for ``use_collectives=False``.

    Examples:
        >>> import tempfile, warnings, torch.distributed.checkpoint as dcp, shardtree as st
        >>> folder = tempfile.mkdtemp()
        >>> state = {"model": {"w": torch.arange(4.0)}, "groups": [{"lr": 0.1}]}
        >>> with warnings.catch_warnings(action="ignore"):  # DCP warns that this is one process
        ...     _ = dcp.save(state, storage_writer=CheckpointWriter(folder), no_dist=True)
        >>> st.open_checkpoint(folder)["model.w"].data.read(), st.load_common_state_dict(folder)
        (tensor([0., 1., 2., 3.]), {'groups': [{'lr': 0.1}]})
        >>> st.verify(folder)
        ()

    References:
        torch.distributed.checkpoint.StorageWriter, torch 2.13.
    """

    def __init__(
        self,
        checkpoint_dir: Directory | None = None,
        *,
        backend: Choice = None,
        process_group: Any = None,
        overwrite: bool = False,
        strategies: Strategies | None = None,
        options: SaveOptions | None = None,
    ) -> None:
        self.checkpoint_dir = checkpoint_dir
        self.backend = backend
        self.process_group = process_group
        self.overwrite = overwrite
        self.strategies = strategies
        self.options = options

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Save to the path or URL `checkpoint_id` from now on; None keeps the present one."""
        if checkpoint_id is not None:
            self.checkpoint_dir = checkpoint_id

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether a checkpoint id is a path or a URL."""
        return isinstance(checkpoint_id, (str, os.PathLike))

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Refuse a save without collectives.

        Raises:
            WorldError: ``use_collectives=False``.
        """
        if not kwargs.get("use_collectives", True):
            fix = "Leave use_collectives out: ranks commit one checkpoint together."
            raise WorldError(error_text("dcp.save: unsupported use_collectives=False", fix=fix))

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan unchanged: the save lays out the files."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Return the plans with the number of ranks added, by which `write_data` recognises a ``no_dist`` save."""
        return [replace(plan, storage_data=len(plans)) for plan in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Save and commit the checkpoint together with the other ranks; return a future that is done."""
        world = self._world(plan.storage_data)
        shards, archives = agree(world, "dcp.save: resolve", partial(_resolved, plan, planner))
        gathered = world.gather(archives, {})
        common = agree(world, "dcp.save: plain values", partial(_common, world, gathered))
        save(
            {**common, **shards},
            named(self.checkpoint_dir),
            self.backend,
            # Rank 0 has all ranks' plain values, the other ranks have none.
            preprocess_common_before_consistancy_check=_nothing,
            world=world,
            overwrite=self.overwrite,
            strategies=self.strategies,
            options=self.options,
        )
        return done([WriteResult(item.index, item.tensor_storage_size() or 0, None) for item in plan.items])

    def _world(self, ranks: Any) -> World:
        if ranks == 1:
            return one_process()
        size = torch.distributed.get_world_size(self.process_group)
        if size != ranks:
            heading, fix = (
                "dcp.save: the writer has another process group than the save",
                "Pass the save's process_group= to the writer too.",
            )
            raise WorldError(error_text(heading, found=f"{size} ranks", expected=f"{ranks} ranks", fix=fix))
        # A separate gloo group is used, since asynchronous saves run in a thread beside other calls.
        return distributed(self.process_group, purpose="dcp")

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Do nothing: the ranks have committed the checkpoint together, with its own metadata."""


_Archives = dict[str, tuple[TreePath, bytes]]
"""Plain values by name, each with its path, as DCP's planner encodes them."""


def _nothing(common: Any) -> dict[str, Any]:
    return {}


def _resolved(plan: SavePlan, planner: Any) -> tuple[dict[str, list[ShardedTensor]], _Archives]:
    """Return the shards and the encoded plain values in a rank's plan, both by name, with data from DCP's planner."""
    tensors = [item for item in plan.items if item.type is not WriteItemType.BYTE_IO]
    refuse_other_boxes("dcp.save", planner, [(item.index.fqn, _write_box(item)) for item in tensors])
    shards: dict[str, list[ShardedTensor]] = {}
    for item in tensors:
        name, data, description = item.index.fqn, planner.resolve_data(item).detach(), item.tensor_data
        offset, shape = _write_box(item)
        whole = tuple(description.size)  # type: ignore[union-attr]
        shards.setdefault(name, []).append(ShardedTensor(name, data, data.dtype, shape, whole, offset, None))
    paths = plan.planner_data if isinstance(plan.planner_data, Mapping) else {}
    values = {item.index.fqn: item for item in plan.items if item.type is WriteItemType.BYTE_IO}
    return shards, {
        name: (tuple(paths.get(name, (name,))), planner.resolve_data(item).getvalue()) for name, item in values.items()
    }


def _write_box(item: WriteItem) -> Box:
    chunk = item.tensor_data.chunk  # type: ignore[union-attr]
    return tuple(chunk.offsets), tuple(chunk.sizes)


def _common(world: World, gathered: Sequence[_Archives]) -> dict[str, Any]:
    """Return the common state with all ranks' plain values on rank 0, an empty dict on the other ranks.

    DCP names each value by its flattened path, such as ``"optimizer.groups.0"``. The values under one top-level key are
    nested again by their paths if DCP would flatten the result to the same names. Otherwise they are stored flat, by
    name. That happens to a list that also holds tensors, since DCP doesn't flatten a list without tensors.
    """
    if world.rank != 0:
        return {}
    # Unpickling is safe: ranks of this job made the bytes from their own values, and they never were in a file.
    pairs = {
        name: (path, torch.load(io.BytesIO(data), map_location="cpu", weights_only=False))
        for archives in gathered
        for name, (path, data) in archives.items()
    }
    places: dict[Any, dict[str, Any]] = {}
    for name, (path, _) in pairs.items():
        places.setdefault(path[0], {})[name] = path
    common: dict[str, Any] = {}
    for names in places.values():
        inside = _nested({path: pairs[name][1] for name, path in names.items()})
        as_before = flattened(inside)[1] == names
        common |= inside if as_before else {name: pairs[name][1] for name in names}
    return common


def _nested(values: Mapping[TreePath, Any]) -> Any:
    """Return values as nested dicts and lists, given their paths; list positions without a value become None."""
    if () in values:
        return values[()]
    children: dict[Any, dict[TreePath, Any]] = {}
    for (entry, *inner), value in values.items():
        children.setdefault(entry, {})[tuple(inner)] = value
    nested = {entry: _nested(below) for entry, below in children.items()}
    if all(isinstance(entry, int) for entry in nested):
        return [nested.get(position) for position in range(max(nested) + 1)]
    return nested
