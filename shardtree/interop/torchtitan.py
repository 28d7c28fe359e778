"""torchtitan's checkpoints by shardtree: a `CheckpointManager` that replaces torchtitan's own.

Unlike most modules of this package, this one imports its library at once, since its classes derive from the library's.
The package doesn't import it.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from ..core.mapping import ShardedTensor, ShardedTensorFactory
from ..core.trees import flatten_with_paths, leaves_with_paths
from ..errors import KeyMismatch, MetadataError, error_text
from ..meshes import Mesh
from ..series import CheckpointSeries
from ..series.policies import keep_last
from ..shell.checkpoint import AsyncCallsQueue, load
from ..shell.storage import Directory
from ..shell.table import SaveOptions
from ..shell.world import World, current_world
from .dtensor import from_dtensors, to_dtensors

try:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.stateful import Stateful
    from torchtitan.components.checkpointer import (
        DATALOADER,
        LR_SCHEDULER,
        MODEL,
        OPTIMIZER,
        BaseCheckpointManager,
        ModelWrapper,
    )
    from torchtitan.config import TORCH_DTYPE_MAP
    from torchtitan.tools import filesystem
    from torchtitan.tools.logging import logger
except ImportError as missing:
    raise ImportError(f"{missing}: shardtree's plug needs torchtitan 0.3: pip install torchtitan==0.3.0") from missing

__all__ = ["CheckpointManager"]

_ASYNC_MODES = ("disabled", "async", "async_with_pinned_mem")


class CheckpointManager(BaseCheckpointManager):  # type: ignore[misc]
    """A checkpoint manager for torchtitan's trainer: `checkpoint=CheckpointManager.Config(enable=True, ...)`.

    torchtitan's policies decide when a step is saved, in which dtype, and what a load restores. Steps are a
    `CheckpointSeries` in torchtitan's folders "step-N"; steps that its own manager has written there load as they are.

    Plain values, such as the data loader's state, are united over the ranks by key, since the data loader has a key for
    each data-parallel rank. Values that differ between ranks under one key are an error. A plain tensor, such as a
    buffer, is stored from the first rank that has its key.

    Args:
        config: The policies, with the fields of torchtitan's own `CheckpointManager.Config`, `backend` and `durable`.
        dataloader: The data loader, or None.
        model_parts: The modules of this rank's pipeline stages.
        optimizers: The container of their optimizers.
        lr_schedulers: The container of their schedulers.
        states: Dict of other values to save, by key, such as the trainer; the four above are added to it.
        sd_adapter: The conversion to and from Hugging Face's names, or None.
        base_folder: The folder that `config.folder` is relative to.

    Raises:
        MetadataError: An export to Hugging Face's format is asked for, and there is no adapter.

    References:
        torchtitan.components.checkpointer.BaseCheckpointManager, torchtitan 0.3.0.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):  # type: ignore[misc]
        """torchtitan's checkpoint policies, and the options of shardtree's saves.

        Attributes:
            async_mode: One of torchtitan's modes. Both asynchronous modes copy the state to pinned memory before
                training continues, and write it in a thread.
            backend: The format in which steps are written.
            durable: Whether a step is flushed to disk before it counts as saved, so that a power failure cannot leave
                it damaged.
        """

        async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "disabled"
        backend: str = "safetensors"
        durable: bool = True

        def __post_init__(self) -> None:
            """Check torchtitan's own fields, and `async_mode`, whose case does not matter."""
            BaseCheckpointManager.Config.__post_init__(self)
            self.async_mode = self.async_mode.lower()  # type: ignore[assignment]
            if self.async_mode not in _ASYNC_MODES:
                expected = ", ".join(map(repr, _ASYNC_MODES))
                heading = "torchtitan's CheckpointManager: unknown value of async_mode"
                raise MetadataError(error_text(heading, found=repr(self.async_mode), expected=expected))

    def __init__(
        self,
        config: Config,
        *,
        dataloader: Any,
        model_parts: list[torch.nn.Module],
        optimizers: Any,
        lr_schedulers: Any,
        states: dict[str, Any],
        sd_adapter: Any,
        base_folder: str = "",
    ) -> None:
        self.enable = config.enable
        self.save_future = None
        if not self.enable:
            return
        if sd_adapter is None and (config.last_save_in_hf or config.initial_load_in_hf):
            fix = "Set state_dict_adapter in the model's spec, or set last_save_in_hf and initial_load_in_hf to False."
            heading = "torchtitan's CheckpointManager: no adapter for Hugging Face's format"
            raise MetadataError(error_text(heading, fix=fix))
        self.config, self.sd_adapter, self.states = config, sd_adapter, states
        states |= {MODEL: ModelWrapper(model_parts), OPTIMIZER: optimizers}
        states |= {DATALOADER: dataloader, LR_SCHEDULER: lr_schedulers}
        self.queue = None if config.async_mode == "disabled" else AsyncCallsQueue()
        self.series = CheckpointSeries(
            filesystem.join(base_folder, config.folder),
            names="step-{}",
            keep=keep_last(config.keep_latest_k) if config.keep_latest_k else None,
            queue=self.queue,
        )
        # Each rank has its data loader's state under a key of its own, and so has each pipeline stage its states.
        self.options = SaveOptions(common="union", durable=config.durable)
        logger.info("Checkpoints are loaded from, and saved by shardtree to, %s", self.series.root)

    # Saves.

    @torch.no_grad()
    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        self._commit_written()
        if not self._should_save(curr_step, last_step):
            return False
        self.maybe_wait_for_saving()  # first, so that only one step's copies take memory
        config, backend = self.config, self.config.backend
        state = _state_of(self.states)
        if last_step and config.last_save_model_only:
            state = _cast(self.states[MODEL].state_dict(), TORCH_DTYPE_MAP[config.export_dtype])
            if config.last_save_in_hf:
                state, backend = self.sd_adapter.to_hf(state), "huggingface"
        shards = _shards(state)
        self.save_future = self.series.save(
            shards, curr_step, sharded_strategy=backend, options=self.options, overwrite=True
        )
        if last_step:
            self.maybe_wait_for_saving()
        return True

    def _should_save(self, step: int, last_step: bool) -> bool:
        config = self.config
        is_first = step == 1 and config.enable_first_step_checkpoint
        return not config.load_only and (last_step or is_first or step % config.interval == 0)

    def _commit_written(self) -> None:
        # torchtitan calls `save` after every step, so that a written checkpoint is committed at the next call, not only
        # at the next save, which may be hours away.
        if self.queue is not None and self.save_future is not None:
            self.queue.maybe_finalize_async_calls()
            if not self.queue.get_num_unfinalized_calls():
                self.save_future = None

    def _wait_for_saving(self) -> None:
        future, self.save_future = self.save_future, None
        if future is not None:
            future.result()

    def _maybe_wait_for_staging(self) -> None:
        """Return at once: `save` has copied the state before it returns."""

    def _close(self) -> None:
        if self.queue is not None:
            # The trainer also closes when a step has failed, perhaps on this rank alone: a commit would wait for ranks
            # that never come, and keep the launcher from restarting the job.
            self.queue.close(abort=sys.exception() is not None)

    # Loads.

    @torch.no_grad()
    def _load(self, step: int = -1) -> bool:
        newest = self.series.latest() if step == -1 else None
        number = newest.number if newest else step
        if number != -1:
            logger.info("Loading step %d from %s", number, self.series.root)
            self._restore(self.series.at(number), model_only=number == 0)
            return True
        config = self.config
        path = config.initial_load_path or (config.initial_load_in_hf and self.sd_adapter.hf_assets_path)
        if not path:
            logger.info("No checkpoint was provided, this is a fresh start.")
            return False
        logger.info("Loading the initial checkpoint from %s", path)
        if config.initial_load_in_hf:
            self._import_model(path)
        else:
            self._restore(path, model_only=config.initial_load_model_only)
        return True

    def _restore(self, folder: Directory, model_only: bool) -> None:
        """Load a checkpoint into all states that the config does not exclude, or into the model alone."""
        excluded = set() if model_only else set(self.config.exclude_from_loading)
        if unknown := sorted(excluded - self.states.keys()):
            heading, expected = (
                "torchtitan's CheckpointManager: unknown states in exclude_from_loading",
                sorted(self.states),
            )
            raise MetadataError(error_text(heading, offenders=unknown, expected=expected))
        states = {key: value for key, value in self.states.items() if key == MODEL or not model_only}
        states = {key: value for key, value in states.items() if key not in excluded}
        state = _state_of(states)
        loaded = _loaded(state, folder)
        # The load doesn't look for plain values: a missing schedule would silently begin anew.
        if missing := sorted(key for key in states if key != MODEL and state.get(key) and not loaded.get(key)):
            heading = "torchtitan's CheckpointManager: the checkpoint lacks these states"
            fix = "List them in exclude_from_loading to keep their present values, or load the model alone."
            raise KeyMismatch(error_text(heading, offenders=missing, fix=fix))
        for key, value in states.items():
            if key == MODEL:
                value.load_state_dict({name: loaded[name] for name in value.state_dict()})
            elif isinstance(value, Stateful) and key in loaded:
                value.load_state_dict(loaded[key])

    def _import_model(self, path: str) -> None:
        """Load the model from a folder in Hugging Face's format."""
        target = self.sd_adapter.to_hf(self.states[MODEL].state_dict())
        if self.config.initial_load_in_hf_quantized:
            # Its reader knows the model's scales.
            dcp.load(target, storage_reader=self.sd_adapter.get_hf_storage_reader(path, True))
        else:
            target = _loaded(target, path)
        self.states[MODEL].load_state_dict(self.sd_adapter.from_hf(target))


# States as trees of shards.


def _state_of(states: Mapping[str, Any]) -> dict[str, Any]:
    """Return the states of several objects in one dict: tensors of the model by name, and a dict for each other object.

    This is the nesting of torchtitan's own checkpoints.
    """
    present = {key: value for key, value in states.items() if value is not None and key != MODEL}
    state = {key: value.state_dict() if isinstance(value, Stateful) else value for key, value in present.items()}
    return state | (states[MODEL].state_dict() if MODEL in states else {})


def _cast(state: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Return the state with its floating-point tensors in another dtype."""
    return {
        key: value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for key, value in state.items()
    }


def _loaded(state: dict[str, Any], folder: Directory) -> dict[str, Any]:
    """Return the stored values for a state; the state's tensors are filled in place."""
    # Tensors are converted to the state's dtypes, as by torchtitan's own manager: an export may have another dtype.
    loaded: dict[str, Any] = to_dtensors(load(_shards(state), folder, donate=True, cast=True), like=state)
    return loaded


def _shards(state: Any) -> Any:
    """Return the state with all tensors as shards; collective.

    Ranks exchange their keys, since a tensor may exist on some pipeline stages only, or on several.
    """
    world = current_world(None)
    keys = frozenset(_key(path) for path, leaf in leaves_with_paths(state) if isinstance(leaf, torch.Tensor))
    keys_of = _keys_by_rank(world, keys)
    stage = [rank for rank in range(world.size) if keys_of[rank] == keys]
    # A tensor that an earlier stage has too, such as a tied embedding, has its main replica there.
    earlier = frozenset().union(*set(keys_of[: stage[0]]))

    def placed(path: tuple[Any, ...], leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            leaf = ShardedTensor.from_rank_offsets(_key(path), leaf.detach(), replica_id=stage.index(world.rank))
        is_shard = isinstance(leaf, ShardedTensor | ShardedTensorFactory)
        return replace(leaf, replica_id=1) if is_shard and leaf.key in earlier else leaf

    # DTensors' meshes don't show the stage: torchtitan's are slices of one mesh over all stages.
    within = Mesh(stage=len(stage)).on_ranks(stage)
    pairs, rebuild = flatten_with_paths(from_dtensors(state, within=within, strided="fsdp2"))
    return rebuild([placed(path, leaf) for path, leaf in pairs])


def _key(path: tuple[Any, ...]) -> str:
    return ".".join(map(str, path))


def _keys_by_rank(world: World, keys: frozenset[str]) -> list[frozenset[str]]:
    """Return every rank's keys; equal sets are sent once, since all ranks of a pipeline stage have the same keys."""
    digest = hashlib.sha256("\n".join(sorted(keys)).encode()).digest()
    digests = world.all_gather(digest)
    is_first = digests.index(digest) == world.rank
    sent = world.all_gather(keys if is_first else frozenset())
    return [sent[digests.index(other)] for other in digests]
