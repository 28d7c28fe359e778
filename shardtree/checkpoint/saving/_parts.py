"""Step 1 of a save: a sharded tree is taken apart into shards, objects, and a common tree with holes. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..._ambient import collector_paused
from ...errors import CheckpointingException, ShapeError, TreeError, TreePath, UnsupportedValue, error_text, render_path
from ...lazy import LazyTensor
from ...mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
from ...mapping.memory import has_elements, lacks_memory
from ...strategies import misfit
from ...trees import (
    United,
    apply_factories,
    check_is_tree,
    common_with_holes,
    leaves_with_paths,
    refuse_hidden,
    refuse_too_deep,
    refuse_without_elements,
)
from .._open import CONTENT_METADATA


@dataclass(frozen=True, slots=True, eq=False)
class TreeParts:
    """A tree, taken apart for saving.

    Attributes:
        tensors: the tensor shards, factories applied.
        objects: the sharded objects.
        common: everything else, with holes where shards and nonpersistent objects were.
        united: where it is the union of ranks' dicts that have keys of their own.
    """

    tensors: tuple[ShardedTensor, ...]
    objects: tuple[ShardedObject, ...]
    common: Any
    united: United = field(default_factory=dict)


@collector_paused()
def take_apart(tree: Any, content_metadata: Mapping[str, Any] | None = None) -> TreeParts:
    """Return a tree taken apart for saving.

    Raises:
        TreeError: the tree is no dict, list or tuple, or already has the content metadata's key.
        CheckpointingException: a shard has no data.
        UnsupportedValue: a shard's data is no dense tensor, or a shard is hidden in a value that isn't entered.
        ShapeError: a shard's data was changed since, or replaced by something of another dtype or shape.
    """
    check_is_tree("save", tree)
    with refuse_too_deep("save"):
        built = with_content_metadata(tree, content_metadata)
        leaves = leaves_with_paths(built)
        if any(issubclass(kind, ShardedTensorFactory) for kind in {type(leaf) for _, leaf in leaves}):
            built = apply_factories(built)
            leaves = leaves_with_paths(built)
    rest = [pair for pair in leaves if type(pair[1]) is not ShardedTensor]
    # Tree maps don't enter these values, so a shard inside one would be missed.
    refuse_hidden("save", rest)
    refuse_without_elements("save", rest)
    tensors = tuple((path, leaf) for path, leaf in leaves if isinstance(leaf, ShardedTensor))
    # The quick test first: with thousands of small tensors, a close look at each would be most of the step's time.
    _check_data([pair for pair in tensors if not _is_as_described(pair[1])])
    objects = tuple(leaf for _, leaf in rest if isinstance(leaf, ShardedObject))
    return TreeParts(tuple(shard for _, shard in tensors), objects, common_with_holes(built))


def take_apart_for_later(tree: Any, content_metadata: Mapping[str, Any] | None = None) -> TreeParts:
    """Return `take_apart(tree, content_metadata)` with a common state that the caller's changes don't reach.

    Raises:
        UnsupportedValue: as `take_apart`; or a value of the common state can't be copied.
    """
    parts = take_apart(tree, content_metadata)
    return replace(parts, common=_copied(parts.common))


def _copied(common: Any) -> Any:
    leaves = leaves_with_paths(common)
    # Tensors aren't left to deepcopy: it refuses those with a gradient graph, and copies a view's whole storage.
    memo = {id(leaf): leaf.detach().clone() for _, leaf in leaves if type(leaf) is torch.Tensor}
    try:
        return deepcopy(common, memo)
    except Exception as error:
        offenders = [f"{render_path(path)}: {type(leaf).__name__}" for path, leaf in leaves if not _is_copyable(leaf)]
        what = "save: values that can't be copied, so that an asynchronous save can't keep them as they are now"
        raise UnsupportedValue(
            error_text(what, offenders=offenders, fix="Leave them out, or save synchronously.")
        ) from error


def _is_copyable(value: Any) -> bool:
    try:
        deepcopy(value)
    except Exception:
        return False
    return True


def with_content_metadata(tree: Any, content_metadata: Mapping[str, Any] | None) -> Any:
    """Return the tree with the caller's description of its content beside its entries.

    Raises:
        TreeError: the tree isn't a dict, or has such an entry already.

    Examples:
        >>> with_content_metadata({"step": 1}, {"optimizer": "adam"})
        {'step': 1, 'content_metadata': {'optimizer': 'adam'}}
    """
    if content_metadata is None:
        return tree
    if not isinstance(tree, dict) or CONTENT_METADATA in tree:
        found = "an entry of that name" if isinstance(tree, dict) else type(tree).__name__
        raise TreeError(
            error_text(f"save: can't add {CONTENT_METADATA!r} to the tree", found=found, expected="a dict without it")
        )
    return {**tree, CONTENT_METADATA: content_metadata}


def _is_as_described(shard: ShardedTensor) -> bool:
    """Return whether data is, at a glance, a dense tensor as its shard says; data that isn't gets a closer look."""
    data = shard.data
    return (
        type(data) in (torch.Tensor, torch.nn.Parameter)
        and data.layout is torch.strided
        and not data.is_nested
        and not data.is_meta
        and not misfit(shard)
    )


def _check_data(tensors: Sequence[tuple[TreePath, ShardedTensor]]) -> None:
    """Raise where a shard has no data, or none that can be saved.

    Raises:
        CheckpointingException, UnsupportedValue, ShapeError: as `take_apart`.
    """
    # A tensor keeps its shape when its storage is freed.
    freed = ", whose storage is freed"
    empty = [
        f"{shard.key!r} at {render_path(path)}{freed * lacks_memory(shard.data)}"
        for path, shard in tensors
        if not _has_data(shard)
    ]
    if empty:
        raise CheckpointingException(
            error_text("save: shards without data", offenders=empty, fix="Give each its tensor.")
        )
    others = [f"{shard.key!r} at {render_path(path)}: {kind}" for path, shard in tensors if (kind := _kind(shard.data))]
    if others:
        fix = "Save .to_dense() of it, or its parts as tensors of their own."
        raise UnsupportedValue(error_text("save: data that isn't a dense tensor", offenders=others, fix=fix))
    changed = [f"{render_path(path)}: {found}" for path, shard in tensors if (found := misfit(shard))]
    if changed:
        fix = "Change a dtype with `cast`, a shape with `map_shards`, and make shards of a tensor after it was changed."
        raise ShapeError(error_text("save: data that isn't what its shard says", offenders=changed, fix=fix))


def _has_data(shard: ShardedTensor) -> bool:
    data = shard.data
    if isinstance(data, torch.Tensor):
        return has_elements(data) and not lacks_memory(data)
    return hasattr(data, "dtype")


def _kind(data: Any) -> str:
    """Return what data is, if it is neither a dense tensor nor a lazy one; else nothing."""
    if isinstance(data, torch.Tensor):
        return "" if data.layout is torch.strided and not data.is_nested else f"{data.layout} tensor"
    return "" if isinstance(data, LazyTensor) else type(data).__name__
