"""A rank's state of a training job, by key: weights, buffers, optimizer states, settings, and everything else."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeAlias

import torch

from ..core.mapping import ShardedTensor, ShardedTensorFactory
from ..core.trees import apply_factories, leaves_with_paths, path_key
from ..interop.dtensor import from_dtensors
from ._bits import shards_of
from ._law_resume import WEIGHT, Place, Reading
from ._law_resume_updates import nudge

Shards: TypeAlias = Callable[[Any], Mapping[str, ShardedTensor]]
"""Function from a job to the shards that describe its plain tensors, by name of the parameter or buffer."""

_PLAIN = (torch.Tensor, bool, int, float, complex, str, bytes, ShardedTensor)


def read_job(job: Any, shards: Shards | None = None) -> Reading:
    """Return a copy of one rank's state of a training job: its values by key and state name.

    Args:
        job: A mapping, a sequence or an object whose members are modules, optimizers, generators, objects with a
            ``state_dict``, and plain values.
        shards: Function from the job to a mapping from names to shards. It has the name of each parameter and buffer
            that is a plain tensor with only this rank's part. DTensors describe themselves.

    Examples:
        >>> model = torch.nn.Linear(2, 1)
        >>> job = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "step": 3}
        >>> values = read_job(job).values
        >>> values["weight", "weight"].shape, values["bias", "group['lr']"], values["step", "value"]
        (torch.Size([1, 2]), 0.1, 3)
    """
    members = _members(job)
    parts = {} if shards is None else dict(shards(job))
    modules = {name: member for name, member in members.items() if isinstance(member, torch.nn.Module)}
    names: dict[int, list[str]] = {}
    rows: list[tuple[Place, Any]] = []
    for member, module in modules.items():
        prefix = f"{member}." if len(modules) > 1 else ""
        tensors: list[tuple[str, torch.Tensor, str]] = []
        tensors += [(prefix + name, tensor, WEIGHT) for name, tensor in module.named_parameters(remove_duplicate=False)]
        tensors += [(prefix + name, tensor, "buffer") for name, tensor in module.named_buffers(remove_duplicate=False)]
        for name, tensor, state in tensors:
            names.setdefault(id(tensor), []).append(name)
            rows.append(((_key(name, parts), state), _held(tensor, parts.get(name))))
    for member, value in members.items():
        if isinstance(value, torch.optim.Optimizer):
            rows += _optimizer_rows(member, value, names, parts)
        elif not isinstance(value, torch.nn.Module):
            rows += _other_rows(member, value)
    ties = (tuple(sorted(_key(name, parts) for name in same)) for same in names.values() if len(same) > 1)
    return Reading(dict(rows), frozenset(ties))


def nudge_job(job: Any, seed: int) -> None:
    """Change the last bits of all parameters of a job in place, in the same way on all ranks.

    Examples:
        >>> model = torch.nn.Linear(1, 1)
        >>> before = model.weight.item()
        >>> nudge_job([model], 1)
        >>> model.weight.item() == before, abs(model.weight.item() - before) < 1e-6
        (False, True)
    """
    for member in _members(job).values():
        for parameter in member.parameters() if isinstance(member, torch.nn.Module) else ():
            local = parameter.detach()
            nudge(local.to_local() if hasattr(local, "to_local") else local, seed)


def _members(job: Any) -> dict[str, Any]:
    if isinstance(job, Mapping):
        return {str(name): member for name, member in job.items()}
    if isinstance(job, (list, tuple)):
        return {str(number): member for number, member in enumerate(job)}
    if is_dataclass(job):
        return {field.name: getattr(job, field.name) for field in fields(job)}
    return dict(vars(job))


def _key(name: str, parts: Mapping[str, ShardedTensor]) -> str:
    return parts[name].key if name in parts else name


def _held(tensor: torch.Tensor, shard: ShardedTensor | None) -> Any:
    """Return a copy of a rank's tensor: a tuple of shards if the rank has only a part, otherwise a whole tensor.

    Args:
        tensor: DTensor or plain tensor: a parameter, a buffer, or a state of one.
        shard: Shard that describes the parameter or buffer; None for a whole tensor or a DTensor.
    """
    if hasattr(tensor, "to_local"):
        leaves = shards_of(apply_factories(from_dtensors({"tensor": tensor.detach()}, strided="fsdp2"))).values()
        return tuple(replace(leaf, data=leaf.data.detach().cpu().clone()) for leaf in leaves)
    copy = tensor.detach().cpu().clone()
    if shard is None:
        return copy
    return (_like(shard, copy),) if _fits(shard, copy) else copy


def _fits(shard: ShardedTensor, state: torch.Tensor) -> bool:
    """Return whether a state has the shape of its parameter's local shard; some of its axes may have length 1."""
    sizes = shard.local_shape
    return (
        bool(state.ndim)
        and len(sizes) == state.ndim
        and all(size in (1, local) for size, local in zip(state.shape, sizes, strict=True))
    )


def _like(shard: ShardedTensor, state: torch.Tensor) -> ShardedTensor:
    """Return a state as a shard with its parameter's cuts; an axis that has length 1 only in the state is not cut."""
    whole = [local == size for local, size in zip(state.shape, shard.local_shape, strict=True)]
    shape = tuple(size if along else 1 for size, along in zip(shard.global_shape, whole, strict=True))
    offset = tuple(place if along else 0 for place, along in zip(shard.global_offset, whole, strict=True))
    return ShardedTensor(shard.key, state, state.dtype, tuple(state.shape), shape, offset, None)


def _optimizer_rows(
    member: str, optimizer: torch.optim.Optimizer, names: Mapping[int, list[str]], parts: Mapping[str, ShardedTensor]
) -> Iterator[tuple[Place, Any]]:
    for number, group in enumerate(optimizer.param_groups):
        settings = {name: value for name, value in group.items() if name not in ("params", "param_names")}
        for index, parameter in enumerate(group["params"]):
            name = names.get(id(parameter), [f"{member}.{number}.{index}"])[0]
            key = _key(name, parts)
            for setting, value in settings.items():
                yield (key, f"group[{setting!r}]"), _plain(value)
            for state, value in optimizer.state.get(parameter, {}).items():
                is_tensor = isinstance(value, torch.Tensor)
                yield (key, str(state)), _held(value, parts.get(name)) if is_tensor else _plain(value)


def _other_rows(member: str, value: Any) -> Iterator[tuple[Place, Any]]:
    """Yield (place, value) pairs of a member that is no module or optimizer; a place is a pair (key, state name)."""
    if isinstance(value, torch.Generator):
        yield (member, "generator"), value.get_state()
        return
    tree = value.state_dict() if callable(getattr(value, "state_dict", None)) else value
    for path, leaf in leaves_with_paths(tree):
        if isinstance(leaf, (ShardedTensor, ShardedTensorFactory)):
            cut = shards_of(apply_factories({"": leaf})).values()
            copies = [replace(shard, data=shard.data.detach().cpu().clone()) for shard in cut]
            yield (copies[0].key, path_key(path) or "value"), tuple(copies)
        elif isinstance(leaf, _PLAIN):
            place = (member, path_key(path) or "value")
            yield place, _held(leaf, None) if isinstance(leaf, torch.Tensor) else leaf


def _plain(value: Any) -> Any:
    """Return a setting for comparison: lists become tuples, since formats may load them as such; tensors are copied."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    return tuple(map(_plain, value)) if isinstance(value, (list, tuple)) else value
