"""Targets of a load: splitting a target into leaves, memory for its tensors, and the loaded tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Final

import torch

from ....core import trees
from ....core.ambient import collector_paused
from ....core.codec import is_plain_memory
from ....core.layouts import TensorKind
from ....core.lazy import as_integers
from ....core.mapping import ShardedObject, ShardedTensor, given_tensor, lacks_memory
from ....core.mapping.memory import (
    check_no_aliases,
    check_unchanged,
    check_writable,
    fill_once,
    overwrite,
    refuse_read_only,
    tied,
)
from ....errors import CheckpointingException, MetadataError, TreePath, error_text
from ...storage import copies_of, empty_tensor

CPU: Final = torch.device("cpu")

Kinds = Mapping[str, TensorKind]
"""The stored kinds of the tensors that a target requests, by key."""


def usable_device(device: str | torch.device | None) -> torch.device:
    """Return the device for tensors that have no memory in the target, after checking that the machine has it.

    None means the CPU.

    Raises:
        MetadataError: This machine lacks the device, or it is the meta device, which has no memory.

    Examples:
        >>> usable_device(None), usable_device("cpu")
        (device(type='cpu'), device(type='cpu'))
    """
    if device is None:
        return CPU
    fix = "Pass the name of a device with memory, such as 'cpu' or 'cuda:0'; None means the CPU."
    try:
        place = torch.device(device)
        torch.empty(1, device=place)  # torch has no function that tells for any device whether the machine has it
    # torch raises RuntimeError, AssertionError (without CUDA), NotImplementedError or TypeError.
    except Exception as error:
        reason = (str(error).splitlines() or [""])[0]
        raise MetadataError(error_text(f"load: device {device!r} is unusable", found=reason, fix=fix)) from error
    if place.type == "meta":
        raise MetadataError(error_text("load: the meta device has no memory", found=device, fix=fix))
    return place


def with_memory(
    shard: ShardedTensor, tensor: torch.Tensor | None, *, donate: bool, on_device: torch.device | None = None
) -> ShardedTensor:
    """Return a shard with contiguous memory to fill, on the CPU or another device.

    The memory is the target's own tensor only if it is donated and fits. If a shape mismatch is allowed, the memory
    is initialised with the target's elements, or zeros, since not all of it may be filled.

    Args:
        shard: The target's shard, which `check_tensors` has accepted.
        tensor: The target's own tensor, from `given_tensor(shard)`; None if it has no memory.
        donate: Whether that tensor may be filled in place.
        on_device: The device to fill directly, which must be the device of `tensor` if there is one; None for the CPU.
    """
    if donate and tensor is not None and (on_device is not None or is_plain_memory(tensor)):
        return trees.with_data(shard, tensor.detach()) if tensor.requires_grad else shard
    if on_device is not None:
        return trees.with_data(shard, new_memory(shard.key, shard.data_shape, shard.dtype, on_device))
    if not shard.allow_shape_mismatch:
        return trees.with_data(shard, new_memory(shard.key, shard.data_shape, shard.dtype))
    if tensor is None:
        memory = new_memory(shard.key, shard.data_shape, shard.dtype)
        as_integers(memory).zero_()
        return trees.with_data(shard, memory)
    copy = as_integers(tensor).to("cpu", copy=True, memory_format=torch.contiguous_format)
    return trees.with_data(shard, copy.view(shard.dtype))


def with_memories(
    shards: Sequence[ShardedTensor],
    *,
    donate: bool,
    device: torch.device = CPU,
    is_staged: Callable[[ShardedTensor], bool] = lambda _: False,
) -> list[ShardedTensor]:
    """Return each shard with memory to fill.

    The result of a shard belongs on the device of its tensor, or on `device` if it has no memory in the target. The
    memory returned here is on that device if the reader can fill it there part by part. Otherwise it is on the CPU, and
    `deliver_all` copies it to the device.

    Args:
        shards: The target's shards.
        donate: Whether the load may fill these tensors in place.
        device: The device of tensors that have no memory in the target.
        is_staged: Function that returns whether a shard may be filled on its device part by part, without a whole copy
            in host memory.

    Raises:
        ShapeError: `check_tensors` refuses a tensor.
    """
    pairs = [(shard, given_tensor(shard)) for shard in shards]
    in_place = check_tensors(pairs, donate=donate)
    # The stored values of tied weights are compared before they go into the shared memory.
    apart = {number for group in tied(pairs) for number in group} if donate else set()
    memories = []
    for number, (shard, tensor) in enumerate(pairs):
        if number in apart and tensor is not None:
            memories.append(with_memory(shard, tensor, donate=False))
            continue
        if number in in_place:
            memories.append(shard)
            continue
        place = device if tensor is None else tensor.device
        # Reads in parts fill all of the memory, so a shard that may keep the target's elements is read as a whole.
        staged = copies_of(place) is not None and not shard.allow_shape_mismatch
        if staged and donate and tensor is not None:
            staged = tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
        staged = staged and is_staged(shard)
        memories.append(with_memory(shard, tensor, donate=donate, on_device=place if staged else None))
    return memories


def check_tensors(pairs: Sequence[tuple[ShardedTensor, torch.Tensor | None]], *, donate: bool) -> set[int]:
    """Check shards before memory is allocated; return the indices of those whose tensor the read can fill directly.

    Args:
        pairs: The target's shards with their tensors; None for a shard without memory.
        donate: Whether the load may fill these tensors in place.

    Raises:
        ShapeError: A tensor was changed since its shard was built, elements of donated tensors share memory, or a
            donated tensor is in read-only memory.

    Examples:
        >>> shard = ShardedTensor.from_rank_offsets("w", torch.zeros(2))
        >>> check_tensors([(shard, shard.data)], donate=True), check_tensors([(shard, shard.data)], donate=False)
        ({0}, set())
    """
    in_place = set[int]()
    for number, (shard, tensor) in enumerate(pairs):
        if tensor is None:
            continue
        if donate and _is_memory(shard, tensor):
            in_place.add(number)  # such a tensor passes both checks
        elif donate or shard.allow_shape_mismatch:
            check_unchanged("load", shard, tensor)
            if donate:
                check_writable("load", shard, tensor)
    if donate:
        donated = [(shard, tensor) for shard, tensor in pairs if tensor is not None]
        # If two shards were aliases, the second would silently overwrite the first.
        check_no_aliases("load", donated)
        refuse_read_only("load", ((shard.key, tensor) for shard, tensor in donated))
    return in_place


def _is_memory(shard: ShardedTensor, tensor: torch.Tensor) -> bool:
    """Return whether a donated tensor can surely be filled as it is; this quick test may reject tensors that can."""
    unchanged = tensor.dtype is shard.dtype and tensor.shape == shard.data_shape and tensor.layout is torch.strided
    return unchanged and not tensor.requires_grad and is_plain_memory(tensor) and not lacks_memory(tensor)


def new_memory(key: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str = CPU) -> torch.Tensor:
    """Return a new, uninitialised tensor to fill; the key is only for the error.

    Raises:
        CheckpointingException: There is not enough memory, for example because of an absurd shape in a damaged file.
    """
    try:
        return empty_tensor(size=shape, dtype=dtype, device=device)  # torch parses a named size faster
    except NotImplementedError:  # deterministic algorithms fill new memory, which torch can't do for some dtypes
        return trees.empty_data(shape, dtype, device)
    except RuntimeError as error:
        # torch raises a plain RuntimeError when it is out of memory on the CPU.
        raise CheckpointingException(error_text(f"load: no memory for {key!r}: {shape} {dtype} on {device}")) from error


def deliver_all(
    shards: Sequence[ShardedTensor], memories: Sequence[ShardedTensor], *, donate: bool, device: torch.device = CPU
) -> list[torch.Tensor]:
    """Return each shard's result on the target's device: the donated tensor, or the filled memory.

    Args:
        shards: The target's shards.
        memories: The same shards with their filled memory.
        donate: Whether the target's tensors are filled in place and returned.
        device: The device of tensors that have no memory in the target.

    Raises:
        ShapeError: The stored values of tied weights differ.
    """
    once = {}
    if donate:
        pairs = [(shard, given_tensor(shard)) for shard in shards]
        once = fill_once("load", pairs, [memory.data for memory in memories])
    results = []
    for number, (shard, memory) in enumerate(zip(shards, memories, strict=True)):
        if number in once:
            results.append(once[number])
            continue
        data = memory.data
        tensor = data if memory is shard else given_tensor(shard)
        if tensor is None or not donate:
            results.append(data.to(device if tensor is None else tensor.device))
            continue
        if data is tensor or data.data_ptr() == tensor.data_ptr():
            # The bytes were written without torch, so autograd must be told that tensors saved for backward changed.
            torch.autograd.graph.increment_version(tensor)
        else:
            overwrite(tensor, data)
        results.append(tensor)
    return results


# A target taken apart: the shards that it requests, and the functions that put a tree together again.


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """The target of a load, split into leaves, with functions that build the tree again.

    Attributes:
        leaves: The leaves of the tree after factories have built their shards.
        tensors: The tensor shards among the leaves.
        objects: The sharded objects among the leaves.
        rebuild: Function from new leaves to a tree of the same structure.
        merge: Function from the tree of loaded values to the result, in which factories have merged their values.
        types: The namedtuple classes in the tree.
        plain: Path of each leaf that is a plain tensor or a value with tensors inside, by the leaf's index.
        donate: Whether the target's tensors may be filled in place.
        own: Values of the target, by path, for items of lists, tuples and class instances: if an item isn't stored, the
            result has this value. None if the strict mode leaves nothing out.
    """

    leaves: tuple[Any, ...]
    tensors: tuple[ShardedTensor, ...]
    objects: tuple[ShardedObject, ...]
    rebuild: Callable[[Sequence[Any]], Any]
    merge: Callable[[Any], Any]
    types: tuple[type, ...]
    plain: Mapping[int, TreePath]
    donate: bool = False
    own: Mapping[TreePath, Any] | None = None

    @property
    def keys(self) -> set[str]:
        """The keys of the requested shards and objects."""
        return {leaf.key for leaf in (*self.tensors, *self.objects)}

    @property
    def plain_keys(self) -> set[str]:
        """The plain tensors' paths as keys: each requests the stored tensor of that key, if there is one."""
        return set(map(trees.path_key, self.plain.values()))

    def keys_among(self, checkpoint_keys: Set[str]) -> set[str]:
        """Return all requested keys; keys of plain tensors count only if they are stored."""
        return self.keys | (self.plain_keys & checkpoint_keys)


@collector_paused()
def take_apart(tree: Any, *, donate: bool = False) -> Target:
    """Split a target into its leaves: build the shards of factories, and find shards, objects and plain tensors.

    Args:
        tree: The target.
        donate: Whether its tensors, also those that factories hold, may be filled in place.

    Raises:
        TreeError: The target isn't a tree, or is too deep.
        UnsupportedValue: A shard lies inside a value that tree maps do not enter.
        ShapeError: A tensor of a donated factory shares memory with others, or can't be written.
    """
    trees.check_is_tree("load", tree)
    with trees.refuse_too_deep("load"):
        merge: Callable[[Any], Any] = _as_it_is
        pairs, rebuild = trees.flatten_with_paths(tree)
        if trees.has_factories(pairs):
            if donate:
                refuse_read_only("load", trees.held_tensors(tree))
            merge_one = trees.merge_into_held("load", tree) if donate else trees.merge_anew
            tree, merge = trees.build_factories(trees.unwrap(tree), merge_one, is_target=True)
            pairs, rebuild = trees.flatten_with_paths(tree)
        types = trees.namedtuple_types(tree)
    others = [pair for pair in pairs if type(pair[1]) is not ShardedTensor]
    trees.refuse_hidden("load", others)
    trees.refuse_wrappers("load", pairs)
    leaves = tuple([leaf for _, leaf in pairs])
    tensors = tuple([leaf for leaf in leaves if isinstance(leaf, ShardedTensor)])
    objects = tuple([leaf for _, leaf in others if isinstance(leaf, ShardedObject)])
    # Values that tree maps don't enter, such as objects with a tensor in an attribute, can't be filled: they count as
    # plain tensors.
    plain = dict[int, TreePath]()
    if any(trees.is_plain_tensor(leaf) for _, leaf in others):
        plain = {number: path for number, (path, leaf) in enumerate(pairs) if trees.is_plain_tensor(leaf)}
    return Target(leaves, tensors, objects, rebuild, merge, types, plain, donate)


def _as_it_is(tree: Any) -> Any:
    return tree
