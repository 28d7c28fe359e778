"""Lightning's checkpoints by shardtree: strategies for sharded models, and a `CheckpointIO` for whole models.

Unlike most modules of this package, this one imports its library, Lightning, at once: its classes derive from
Lightning's. The rest of the package doesn't import this module.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Set
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from ..core.mapping import ShardedTensor
from ..core.trees import flatten_with_paths, path_key
from ..errors import KeyMismatch, MetadataError, TreeError, UnsupportedValue, error_text
from ..inspection import load_tensors_metadata
from ..shell.checkpoint import is_checkpoint, load, save
from ..shell.storage import is_folder, is_link, storage_at
from ..shell.table import LoadOptions, SaveOptions
from ..shell.world import current_world, one_process
from .dtensor import from_dtensors, to_dtensors

try:
    from lightning.fabric.plugins import TorchCheckpointIO
    from lightning.fabric.strategies import ModelParallelStrategy as FabricModelParallelStrategy
    from lightning.pytorch.strategies import ModelParallelStrategy
except ImportError as missing:
    raise ImportError(f"{missing}: shardtree's plug needs Lightning 2.6: pip install lightning") from missing

__all__ = ["ShardtreeFabricStrategy", "ShardtreeIO", "ShardtreeStrategy"]

_WEIGHTS = "state_dict"
Backend = str | tuple[str, int] | None
Place = str | PathLike[str]


class ShardtreeIO(TorchCheckpointIO):  # type: ignore[misc]
    """A `CheckpointIO` for strategies under which rank 0 saves: `Trainer(strategy="ddp", plugins=[ShardtreeIO()])`.

    The tensors of modules' state dicts are stored one by one, with keys such as "state_dict.weight", and all other data
    as plain values in the common state. Files that Lightning itself saved load as before.

    Args:
        backend: The format to save in; shardtree's default if None.
        save_options: Options of every save. A value that can't be stored is an error that names it, unless
            ``allow_pickle`` is set.
        load_options: Options of every load. Pickled values are read if Lightning's `weights_only` is False; if that
            isn't given, ``allow_pickle`` decides.

    Examples:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> io = ShardtreeIO(save_options=SaveOptions(durable=False))
        >>> io.save_checkpoint({"epoch": 3, "state_dict": {"weight": torch.ones(2)}}, f"{folder}/last.ckpt")
        >>> io.load_checkpoint(f"{folder}/last.ckpt")
        {'epoch': 3, 'state_dict': {'weight': tensor([1., 1.])}}
        >>> io.remove_checkpoint(f"{folder}/last.ckpt")

    References:
        lightning.fabric.plugins.CheckpointIO, lightning 2.6.6.
    """

    def __init__(
        self,
        backend: Backend = None,
        *,
        save_options: SaveOptions | None = None,
        load_options: LoadOptions | None = None,
    ) -> None:
        super().__init__()
        self.backend, self.save_options, self.load_options = backend, save_options, load_options

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Place, storage_options: Any = None) -> None:
        """Save a checkpoint in this process alone; an existing one is replaced once the new one is complete."""
        _refuse(storage_options=storage_options)
        tree = {name: _as_shards(name, value) for name, value in checkpoint.items()}
        save(tree, path, self.backend, world=one_process(), overwrite=True, options=self.save_options)

    def load_checkpoint(
        self, path: Place, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Return the checkpoint, read by this process alone, with tensors on the CPU or the device `map_location`."""
        if not is_checkpoint(path, world=one_process()):
            located = {} if map_location is None else {"map_location": map_location}
            only = _weights_only(self.load_options, weights_only)
            loaded: dict[str, Any] = super().load_checkpoint(path, weights_only=only, **located)
            return loaded
        if not isinstance(map_location, str | torch.device | None):
            heading = "load_checkpoint: map_location of a shardtree checkpoint is not a device"
            raise MetadataError(error_text(heading, found=type(map_location).__name__, expected="a device, or None"))
        options, target = _reading(self.load_options, weights_only), defaultdict[str, dict[str, Any]](dict)
        for key, shard in load_tensors_metadata(path, world=one_process(), options=options).items():
            name, _, inner = key.partition(".")
            target[name][inner] = shard
        tree: dict[str, Any] = load(dict(target), path, world=one_process(), device=map_location, options=options)
        return tree

    def remove_checkpoint(self, path: Place) -> None:
        """Remove a checkpoint, beginning with the file that identifies it: a killed removal leaves no broken one."""
        place = str(path) if "://" in str(path) else str(Path(path).absolute())
        parent, _, name = place.rstrip("/").rpartition("/")
        storage = storage_at(parent or "/")
        if is_link(storage, name):  # ModelCheckpoint(save_last="link") links a checkpoint; the link alone is removed
            storage.remove(name)
            return
        if is_folder(storage, name):
            for deciding in ("metadata.json", ".metadata"):
                storage.remove(f"{name}/{deciding}")
        super().remove_checkpoint(path)


class ShardtreeStrategy(ModelParallelStrategy):  # type: ignore[misc]
    """Lightning's strategy for FSDP2 and tensor parallelism, with shardtree's checkpoints: `Trainer(strategy=...)`.

    Every rank saves its shards of the module and the optimizers, and loads them on any number of ranks. Everything
    else, such as loops, callbacks and hyperparameters, is stored as rank 0 has it, as by Lightning. Folders and files
    that Lightning itself saved load too.

    Args:
        data_parallel_size: Number of ranks that FSDP2 shards over; "auto" is the number of nodes.
        tensor_parallel_size: Number of ranks of tensor parallelism; "auto" is the number of devices of a node.
        backend: The format to save in; shardtree's default if None.
        save_options: Options of every save; see `ShardtreeIO`.
        load_options: Options of every load; see `ShardtreeIO`.
        others: Further arguments of Lightning's class: `process_group_backend`, `timeout`.

    References:
        lightning.pytorch.strategies.ModelParallelStrategy, lightning 2.6.6.
    """

    def __init__(
        self,
        data_parallel_size: Any = "auto",
        tensor_parallel_size: Any = "auto",
        *,
        backend: Backend = None,
        save_options: SaveOptions | None = None,
        load_options: LoadOptions | None = None,
        **others: Any,
    ) -> None:
        super().__init__(data_parallel_size, tensor_parallel_size, save_distributed_checkpoint=True, **others)
        self.checkpoint_io = ShardtreeIO(backend, save_options=save_options, load_options=load_options)
        self.backend, self.save_options, self.load_options = backend, save_options, load_options

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Place, storage_options: Any = None) -> None:
        """Save a checkpoint, on all ranks together; an existing one is replaced once the new one is complete."""
        _refuse(storage_options=storage_options)
        values = {name: value for name, value in checkpoint.items() if name not in (_WEIGHTS, "optimizer_states")}
        states = {_WEIGHTS: checkpoint[_WEIGHTS]}
        states |= {f"optimizer_{i}": state for i, state in enumerate(checkpoint.get("optimizer_states", ()))}
        tree, path = _joined(states, self.broadcast(values)), self.broadcast(filepath)
        save(tree, path, self.backend, overwrite=True, options=self.save_options)

    def load_checkpoint(self, checkpoint_path: Place, weights_only: bool | None = None) -> dict[str, Any]:
        """Load the module and the optimizers in place, on all ranks together, and return everything else."""
        path = self.broadcast(checkpoint_path)
        if not is_checkpoint(path):
            loaded: dict[str, Any] = super().load_checkpoint(path, _weights_only(self.load_options, weights_only))
            return loaded
        objects = {_WEIGHTS: self.model}
        objects |= {f"optimizer_{i}": optimizer for i, optimizer in enumerate(self.optimizers)}
        options = _reading(self.load_options, weights_only)
        return _load_into(objects, path, options, strict=self.lightning_module.strict_loading)


class ShardtreeFabricStrategy(FabricModelParallelStrategy):  # type: ignore[misc]
    """Fabric's strategy for FSDP2 and tensor parallelism, with shardtree's checkpoints: `Fabric(strategy=...)`.

    In `fabric.save(path, state)` every rank saves its shards of the module and the optimizers in the state, and rank
    0 everything else. Objects with `state_dict` and `load_state_dict` are saved and loaded by these methods.

    Args:
        parallelize_fn: A function of the module and the device mesh that returns the module, parallelized.
        data_parallel_size: Number of ranks that FSDP2 shards over; "auto" is the number of nodes.
        tensor_parallel_size: Number of ranks of tensor parallelism; "auto" is the number of devices of a node.
        backend: The format to save in; shardtree's default if None.
        save_options: Options of every save; see `ShardtreeIO`.
        load_options: Options of every load; see `ShardtreeIO`.
        others: Further arguments of Lightning's class: `process_group_backend`, `timeout`.

    References:
        lightning.fabric.strategies.ModelParallelStrategy, lightning 2.6.6.
    """

    def __init__(
        self,
        parallelize_fn: Any,
        data_parallel_size: Any = "auto",
        tensor_parallel_size: Any = "auto",
        *,
        backend: Backend = None,
        save_options: SaveOptions | None = None,
        load_options: LoadOptions | None = None,
        **others: Any,
    ) -> None:
        sizes = data_parallel_size, tensor_parallel_size
        super().__init__(parallelize_fn, *sizes, save_distributed_checkpoint=True, **others)
        self.backend, self.save_options, self.load_options = backend, save_options, load_options

    def save_checkpoint(
        self, path: Place, state: Mapping[str, Any], storage_options: Any = None, filter: Any = None
    ) -> None:
        """Save a state, on all ranks together; an existing checkpoint is replaced once the new one is complete."""
        _refuse(storage_options=storage_options, filter=filter)
        states = _states_of(state)
        values = {
            name: value.state_dict() if hasattr(value, "state_dict") else value
            for name, value in state.items()
            if name not in states
        }
        tree, path = _joined(states, self.broadcast(values)), self.broadcast(path)
        save(tree, path, self.backend, overwrite=True, options=self.save_options)

    def load_checkpoint(
        self, path: Place, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a state in place, on all ranks together, and return the checkpoint's other values."""
        path = self.broadcast(path)
        if not isinstance(state, dict) or not is_checkpoint(path):
            only = _weights_only(self.load_options, weights_only)
            loaded: dict[str, Any] = super().load_checkpoint(path, state, strict, only)
            return loaded
        states = _states_of(state)
        objects = {name: state[name] for name in states}
        values = _load_into(objects, path, _reading(self.load_options, weights_only), strict=strict)
        names = state.keys() - states.keys()
        if strict and names - values.keys():
            _refuse_keys(f"load_checkpoint: values of the state that {path} lacks", names - values.keys())
        for name in names & values.keys():
            if hasattr(state[name], "load_state_dict"):
                state[name].load_state_dict(values.pop(name))
            else:
                state[name] = values.pop(name)
        return values


# What the classes share.


def _refuse(**arguments: Any) -> None:
    offenders = [f"{name}=" for name, value in arguments.items() if value is not None]
    if offenders:
        heading, fix = "save_checkpoint: unsupported arguments", "Leave them out; options of saves go to save_options=."
        raise UnsupportedValue(error_text(heading, offenders=offenders, fix=fix))


def _reading(options: LoadOptions | None, weights_only: bool | None) -> LoadOptions:
    """Return the options of a load; Lightning's `weights_only`, if given, sets `allow_pickle` to its opposite."""
    options = options or LoadOptions()
    return options if weights_only is None else replace(options, allow_pickle=not weights_only)


def _weights_only(options: LoadOptions | None, weights_only: bool | None) -> bool:
    """Return the `weights_only` for a load of Lightning's own files: the caller's, or the opposite of `allow_pickle`.

    It is never None, since Lightning would then unpickle any file from a URL.
    """
    return not _reading(options, weights_only).allow_pickle


def _as_shards(name: str, value: Any) -> Any:
    """Return a state dict with its tensors as shards, whose keys begin with `name`; other values are unchanged."""
    named = isinstance(value, Mapping) and all(isinstance(key, str) for key in value)
    if "." in name or not named or not any(isinstance(item, torch.Tensor) for item in value.values()):
        return value  # a load takes the name before a key's first dot for the state dict's
    return {
        key: ShardedTensor.from_rank_offsets(f"{name}.{key}", item) if isinstance(item, torch.Tensor) else item
        for key, item in value.items()
    }


def _shards_of(states: Mapping[str, Any]) -> Any:
    """Return state dicts with this rank's shards in place of their tensors.

    A plain tensor, such as a buffer or a parameter that isn't cut, counts as a replica on every rank. If its values
    differ between ranks, as running statistics do, those of rank 0 are stored, as by torch.distributed.checkpoint.
    """
    rank = current_world().rank
    pairs, rebuild = flatten_with_paths(from_dtensors(states, strided="fsdp2"))
    return rebuild(
        [
            ShardedTensor.from_rank_offsets(path_key(path), leaf.detach(), replica_id=rank)
            if isinstance(leaf, torch.Tensor)
            else leaf
            for path, leaf in pairs
        ]
    )


def _joined(states: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    if states.keys() & values.keys():
        offenders = sorted(states.keys() & values.keys())
        heading, fix = (
            "save_checkpoint: values have the names under which the optimizers' states are stored",
            "Store these values under other names.",
        )
        raise TreeError(error_text(heading, offenders=offenders, fix=fix))
    return {**values, **_shards_of(states)}


def _module_in(objects: Mapping[str, Any]) -> str:
    names = [name for name, value in objects.items() if isinstance(value, torch.nn.Module)]
    if len(names) != 1:
        heading = "the state for Lightning must contain exactly one module, which has the parameters of all optimizers"
        fix = "Save each module in a checkpoint of its own, or one module that holds all."
        raise TreeError(error_text(heading, found=names, expected="one module", fix=fix))
    return names[0]


def _states_of(objects: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state dicts of a module and its optimizers, by their names in `objects`.

    Raises:
        TreeError: `objects` doesn't contain exactly one module.
    """
    module = objects[_module_in(objects)]
    states = dict[str, Any]()
    for name, value in objects.items():
        if value is module:
            states[name] = get_model_state_dict(module)
        elif isinstance(value, torch.optim.Optimizer):
            states[name] = get_optimizer_state_dict(module, value)
    return states


def _load_into(objects: Mapping[str, Any], path: Place, options: LoadOptions, *, strict: bool) -> dict[str, Any]:
    """Load a module and its optimizers in place, and return everything else that the checkpoint has."""
    target, name = _states_of(objects), _module_in(objects)
    stored = {key for key in load_tensors_metadata(path, options=options) if key.startswith(f"{name}.")}
    missing = stored - {f"{name}.{key}" for key in target[name]}
    if strict and missing:
        _refuse_keys(f"load_checkpoint: tensors in {path} that the module lacks", missing)
    if not strict:
        target[name] = {key: value for key, value in target[name].items() if f"{name}.{key}" in stored}
    # The load is in place, so that memory holds no second copy of the states.
    loaded = to_dtensors(load(_shards_of(target), path, donate=True, options=options), like=target)
    module = objects[name]
    set_model_state_dict(module, loaded[name], options=StateDictOptions(strict=strict))
    for optimizer in target.keys() - {name}:
        set_optimizer_state_dict(module, objects[optimizer], loaded[optimizer])
    return {key: value for key, value in loaded.items() if key not in target}


def _refuse_keys(what: str, keys: Set[str]) -> NoReturn:
    error = KeyMismatch(error_text(what, offenders=sorted(keys), fix="Set strict to False to leave them out."))
    error.missing = tuple(sorted(keys))
    raise error
