"""A module's tensors as a tree of shards, and such a tree as tensors for `torch.func.functional_call`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...core.mapping import ShardedTensor
from ...errors import KeyMismatch, error_text
from ...shell.world import current_world
from ...transforms import unbox
from ._convert import from_dtensors, to_dtensors
from ._module_names import all_tensors
from ._placed import Strided, is_dtensor


def from_module(
    module: torch.nn.Module, *, key: Callable[[str], str] = str, within: Any = None, strided: Strided = None
) -> dict[str, Any]:
    """Return a module's parameters and persistent buffers as shards by name, which share the module's memory.

    DTensors become shards as by `from_dtensors`. A plain tensor is taken to be whole on every rank, and rank 0's is its
    main replica. A tensor with several names (tied weights) appears once, under its first name. `module_tensors` is the
    inverse; a saved result is loaded by `load_module` too.

    Args:
        module: Any module, also one cut by FSDP2 or tensor parallelism. It isn't changed.
        key: A function from names to the shards' keys; by default they are the same.
        within: The DeviceMesh whose ranks all hold this module, as for `from_dtensors`; by default the ranks of
            torch.distributed's default group, or this process alone.
        strided: The meaning of a `_StridedShard`, as for `from_dtensors`.

    Raises:
        UnsupportedValue: A DTensor is `Partial`.
        ShapeError: A local tensor doesn't match its placements, or a parameter has no shape yet.
        TreeError: Two names have the same key.

    Examples:
        >>> tree = from_module(torch.nn.Linear(3, 2))
        >>> {name: shard.global_shape for name, shard in tree.items()}
        {'weight': (2, 3), 'bias': (2,)}

    References:
        flax.nnx.split.
    """
    tensors = _tensors_once(module)
    replicated = None if within is None else lambda *_: True
    tree = from_dtensors(tensors, key=lambda path: key(path[0]), within=within, strided=strided, replicated=replicated)
    replica = current_world().rank
    return {
        name: ShardedTensor.from_rank_offsets(key(name), leaf.detach(), replica_id=replica)
        if isinstance(leaf, torch.Tensor)
        else leaf
        for name, leaf in tree.items()
    }


def _tensors_once(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    names = {id(tensor): name for name, tensor in reversed([*all_tensors(module)])}
    return {name: tensor for name, tensor in all_tensors(module) if names[id(tensor)] == name}


def module_tensors(tree: Any, module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return a tree of shards as tensors by name, DTensors where the module has DTensors; nothing is copied.

    `torch.func.functional_call(module, module_tensors(tree, module), inputs)` runs the module on the tree. The module
    keeps its own tensors.

    Args:
        tree: Result of `from_module`, of tree functions on it, or of a `load` with it as target: shards or tensors by
            the module's names.
        module: Module whose DTensors give meshes and placements, and whose parameters decide what requires a gradient.

    Raises:
        KeyMismatch: The tree has no tensor for some of the names; each is named.
        ShapeError: A tensor doesn't have the shape of this rank's part of a DTensor.

    Examples:
        >>> from torch.func import functional_call
        >>> import shardtree as st
        >>> linear, ones = torch.nn.Linear(3, 2), torch.ones(1, 3)
        >>> doubled = st.map_data(lambda tensor: tensor * 2, from_module(linear))
        >>> torch.allclose(functional_call(linear, module_tensors(doubled, linear), ones), 2 * linear(ones))
        True

    References:
        flax.nnx.merge.
    """
    originals = _tensors_once(module)
    dtensors = {name: tensor for name, tensor in originals.items() if is_dtensor(tensor)}
    tensors: dict[str, Any] = unbox(to_dtensors(dict(tree), like=dtensors))
    missing = [repr(name) for name in originals if not isinstance(tensors.get(name), torch.Tensor)]
    if missing:
        fix = "Pass what from_module(module) returns; if it has no data, pass what load returns for it."
        raise KeyMismatch(error_text("module_tensors: no tensor for these names", offenders=missing, fix=fix))
    return {name: tensor if name in dtensors else _as_leaf(tensor, originals[name]) for name, tensor in tensors.items()}


def _as_leaf(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a tensor that requires a gradient if the module's tensor `like` does, and if its dtype can have one.

    A tensor that doesn't require a gradient yet is detached, so that it is a leaf.
    """
    if tensor.requires_grad or not like.requires_grad or not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor
    return tensor.detach().requires_grad_()
