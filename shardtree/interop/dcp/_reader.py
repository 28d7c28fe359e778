"""`CheckpointReader`, through which DCP's load reads any checkpoint."""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch.distributed.checkpoint import StorageReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from ...core.mapping import ShardedBase, ShardedObject, ShardedTensor
from ...errors import (
    CheckpointingException,
    MetadataError,
    TreeError,
    TreePath,
    UnsafeFile,
    UnsupportedValue,
    error_text,
)
from ...inspection import open_checkpoint
from ...shell.checkpoint import is_checkpoint, load
from ...shell.storage import Directory
from ...shell.table import Checkpoint, LoadOptions, Strategies
from ...shell.world import one_process
from ._planned import Box, done, flattened, named, refuse_other_boxes


@dataclass(frozen=True, eq=False)
class _Contents:
    """Contents of a checkpoint, by the names under which DCP asks for them.

    Attributes:
        checkpoint: The open checkpoint; None until it is opened.
        shards: Stored tensors and objects, without data.
        values: Plain values of the common state, flattened as DCP flattens a state.
        paths: Path of each plain value in the common state.
    """

    checkpoint: Checkpoint | None = None
    shards: Mapping[str, ShardedBase] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)
    paths: Mapping[str, TreePath] = field(default_factory=dict)


class CheckpointReader(StorageReader):
    """A ``storage_reader`` for `dcp.load` that reads any checkpoint that shardtree can open, of any format.

    Each rank reads its own boxes by one plan, as `load` does, straight into the tensors of the state. Shardtree's own
    reader decodes stored values, and pickled ones only with ``allow_pickle``: DCP's planner unpickles only bytes that
    this reader has made. Stored dtypes are converted to the target's, as by DCP.

    Args:
        checkpoint_dir: The checkpoint's folder, URL or `Storage`; the ``checkpoint_id`` of `dcp.load` replaces it.
        rename: Function from a stored key to its name in the state; by default they are the same.
        plain: Patterns of stored keys whose values may be converted without their stored scales, as in `load`.
        strategies: The dispatch table; None for the process's.
        options: Options of the read.

    Raises:
        MetadataError: `rename` isn't a function.
        CheckpointingException: Inside the `CheckpointException` of `dcp.load`: an error of `open_checkpoint` or `load`,
            or UnsupportedValue if a rank's part consists of several boxes, where DCP assumes one.

    Examples:
        >>> import tempfile, warnings, torch.distributed.checkpoint as dcp, shardtree as st
        >>> folder = tempfile.mkdtemp()
        >>> st.save({"w": st.ShardedTensor.from_rank_offsets("w", torch.arange(4.0)), "step": 7}, folder)
        >>> state = {"w": torch.zeros(4), "step": 0}
        >>> with warnings.catch_warnings(action="ignore"):  # DCP warns that this is one process
        ...     dcp.load(state, storage_reader=CheckpointReader(folder), no_dist=True)
        >>> state
        {'w': tensor([0., 1., 2., 3.]), 'step': 7}

    References:
        torch.distributed.checkpoint.StorageReader, torch 2.13.
    """

    def __init__(
        self,
        checkpoint_dir: Directory | None = None,
        *,
        rename: Callable[[str], str] = str,
        plain: Sequence[str] = (),
        strategies: Strategies | None = None,
        options: LoadOptions | None = None,
    ) -> None:
        if not callable(rename):
            heading, found = "CheckpointReader: rename is not a function", type(rename).__name__
            raise MetadataError(error_text(heading, found=found, expected="a function from a stored key to a name"))
        self.checkpoint_dir = checkpoint_dir
        self.rename = rename
        self.plain = plain
        self.strategies = strategies
        self.options = options
        self._contents = _Contents()
        self._error: CheckpointingException | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Read from the checkpoint `checkpoint_id` from now on; None keeps the present one."""
        if checkpoint_id is not None:
            self.checkpoint_dir = checkpoint_id

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether the path is that of a checkpoint that shardtree can open."""
        return is_checkpoint(checkpoint_id)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return DCP's metadata of all stored values; each tensor is one chunk, however it was saved."""
        self._contents, self._error = _Contents(), None
        try:
            self._contents = self._open()
        except CheckpointingException as error:
            # DCP takes any error here for missing global metadata, and hides the error's class in a text.
            self._error = error
        contents = self._contents
        entries = {name: _entry(value) for name, value in {**contents.values, **contents.shards}.items()}
        paths: dict[str, TreePath] = {name: (name,) for name in contents.shards}
        return Metadata(entries, planner_data={**paths, **contents.paths})

    def _open(self) -> _Contents:
        tree = open_checkpoint(named(self.checkpoint_dir), strategies=self.strategies, options=self.options)
        shards = {self.rename(_stored_name(name, shard)): shard for name, shard in tree.metadata.items()}
        try:
            common = tree.common()
        except (UnsafeFile, UnsupportedValue) as error:
            heading = "dcp.load: the common state cannot be read; only tensors and sharded objects can be loaded"
            warnings.warn(error_text(heading, found=error), stacklevel=2)
            common = {}
        values, paths = flattened(common)
        values, paths = ({self.rename(name): item for name, item in items.items()} for items in (values, paths))
        count = len(tree.metadata) + len(values)
        if count > len({**shards, **values}):
            fix = "Pass rename=, a function that gives each stored key a different name."
            twice = sorted(shards.keys() & values.keys())
            raise TreeError(error_text("dcp.load: two stored values get the same name", offenders=twice, fix=fix))
        return _Contents(tree.checkpoint, shards, values, paths)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Raise the error that `read_metadata` caught, if any."""
        if self._error is not None:
            raise self._error

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan unchanged: `read_data` plans the reads."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans unchanged: no rank reads for another one."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read all items of a rank's plan together, and hand them to the planner; return a future that is done."""
        tensors = {number: item for number, item in enumerate(plan.items) if item.type is LoadItemType.TENSOR}
        refuse_other_boxes("dcp.load", planner, [(item.dest_index.fqn, _read_box(item)) for item in tensors.values()])
        # A planner that transforms tensors returns new memory at each call, so that each tensor is resolved once.
        memories = {number: planner.resolve_tensor(item).detach() for number, item in tensors.items()}
        target = {number: self._target(item, memories.get(number)) for number, item in enumerate(plan.items)}
        loaded = self._load({number: leaf for number, leaf in target.items() if leaf is not None})
        for number, item in enumerate(plan.items):
            value = loaded[number] if number in loaded else self._contents.values[item.storage_index.fqn]
            if number not in memories:
                planner.load_bytes(item, _archive(value))
                continue
            if number not in loaded:  # a tensor of the common state, which is whole
                offsets, lengths = _read_box(item)
                value = value[tuple(slice(start, start + count) for start, count in zip(offsets, lengths, strict=True))]
                memories[number].copy_(value)
            planner.commit_tensor(item, memories[number])
        return done(None)

    def _target(self, item: ReadItem, memory: torch.Tensor | None) -> ShardedBase | None:
        """Return the shard or object by which `load` reads an item of DCP's plan; None for a value of the common state.

        A shard's data is `memory`, which DCP's planner gave for the item.
        """
        shard = self._contents.shards.get(item.storage_index.fqn)
        if not isinstance(shard, ShardedTensor) or memory is None:
            return shard
        offset, shape = _read_box(item)
        return ShardedTensor(shard.key, memory, memory.dtype, shape, shard.global_shape, offset, None)

    def _load(self, target: Mapping[int, ShardedBase]) -> dict[int, Any]:
        loaded: dict[int, Any] = load(
            target,
            self._contents.checkpoint or named(self.checkpoint_dir),
            # The common state was read with the metadata, and its names aren't those of this target.
            common_strategy=lambda checkpoint: {},
            validate_access_integrity=False,
            world=one_process(),
            donate=True,
            cast=True,
            plain=self.plain,
            strategies=self.strategies,
            options=self.options,
        )
        return loaded


def _stored_name(name: str, shard: ShardedBase) -> str:
    """Return the name of a stored value for DCP: its key, or the unique key of an object in an array of several."""
    alone = not isinstance(shard, ShardedObject) or prod(shard.global_shape) == 1
    return shard.key if alone else name


def _entry(value: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    if not isinstance(value, (ShardedTensor, torch.Tensor)):
        return BytesStorageMetadata()
    size = torch.Size(value.global_shape if isinstance(value, ShardedTensor) else value.shape)
    chunk = ChunkStorageMetadata(torch.Size([0] * len(size)), size)
    return TensorStorageMetadata(TensorProperties(dtype=value.dtype), size, [chunk])


def _archive(value: Any) -> io.BytesIO:
    """Return a value as a torch.save archive, which DCP's planner unpickles. That is safe: the bytes are made here."""
    archive = io.BytesIO()
    torch.save(value, archive)
    archive.seek(0)
    return archive


def _read_box(item: ReadItem) -> Box:
    return tuple(item.storage_offsets), tuple(item.lengths)
