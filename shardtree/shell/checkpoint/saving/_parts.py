"""Step 1 of a save: a sharded tree is split into shards, objects, and a common tree with holes. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch

from ....core import layouts
from ....core.ambient import collector_paused
from ....core.codec import decode_tree, encode_tree
from ....core.lazy import LazyTensor
from ....core.mapping import (
    LocalNonpersistentObject,
    ShardedBase,
    ShardedObject,
    ShardedTensor,
    has_elements,
    lacks_memory,
)
from ....core.trees import (
    apply_factories,
    check_is_tree,
    common_with_holes,
    comparable,
    deepest,
    has_factories,
    is_hollow,
    leaves_with_paths,
    misfits,
    partition,
    refuse_hidden,
    refuse_too_deep,
    refuse_without_elements,
    refuse_wrappers,
    unite,
    united,
    unwrap,
    without_holes,
)
from ....errors import (
    CheckpointingException,
    IntegrityError,
    MetadataError,
    ShapeError,
    TreeError,
    TreePath,
    UnsupportedValue,
    error_text,
    render_path,
)
from ...table import misfit
from ...world import agree, gather
from .._consistency import check_common
from .._open import CONTENT_METADATA
from ._values import Save, TreeParts


@collector_paused()
def take_apart(tree: Any, content_metadata: Mapping[str, Any] | None = None) -> TreeParts:
    """Split a tree into its shards, its objects, and the common tree, which has holes in place of both.

    Args:
        tree: The tree to save. Factories in it build their shards.
        content_metadata: Metadata of the caller, which is added to the common tree; None adds nothing.

    Raises:
        TreeError: the tree isn't a dict, list or tuple, or already has the content metadata's key.
        CheckpointingException: a shard has no data.
        UnsupportedValue: a shard's data isn't a dense tensor, or a shard lies inside a value that tree maps do not
            enter.
        ShapeError: a shard's data has another dtype or shape than the shard, since it was changed or replaced.
    """
    check_is_tree("save", tree)
    with refuse_too_deep("save"):
        tree = with_content_metadata(tree, content_metadata)
        leaves = leaves_with_paths(tree)
        if has_factories(leaves):
            tree = apply_factories(unwrap(tree))
            leaves = leaves_with_paths(tree)
    others = [pair for pair in leaves if type(pair[1]) is not ShardedTensor]
    # Tree maps don't enter these values, so a shard inside one would be missed.
    refuse_hidden("save", others)
    refuse_without_elements("save", others)
    refuse_wrappers("save", leaves)
    tensors = tuple((path, leaf) for path, leaf in leaves if isinstance(leaf, ShardedTensor))
    # A quick test comes first: with thousands of small tensors, the full checks would take most of the step's time.
    _check_data([pair for pair in tensors if not _is_as_described(pair[1])])
    objects = tuple(leaf for _, leaf in others if isinstance(leaf, ShardedObject))
    return TreeParts(tuple(shard for _, shard in tensors), objects, common_with_holes(tree))


def take_apart_for_later(tree: Any, content_metadata: Mapping[str, Any] | None = None) -> TreeParts:
    """Return `take_apart(tree, content_metadata)` with a deep copy of the common state.

    Raises:
        UnsupportedValue: `take_apart` raises it, or a value of the common state can't be copied.
    """
    parts = take_apart(tree, content_metadata)
    return replace(parts, common=_common_copy(parts.common))


def _common_copy(common: Any) -> Any:
    leaves = leaves_with_paths(common)
    # Tensors are copied here, since deepcopy refuses tensors with a gradient graph, and copies a view's whole storage.
    memo = {id(leaf): leaf.detach().clone() for _, leaf in leaves if type(leaf) is torch.Tensor}
    try:
        return deepcopy(common, memo)
    except Exception as error:
        offenders = [f"{render_path(path)}: {type(leaf).__name__}" for path, leaf in leaves if not _is_copyable(leaf)]
        heading = "save: values cannot be copied, so an asynchronous save cannot keep their present state"
        raise UnsupportedValue(
            error_text(heading, offenders=offenders, fix="Leave them out, or save synchronously.")
        ) from error


def _is_copyable(value: Any) -> bool:
    try:
        deepcopy(value)
    except Exception:
        return False
    return True


def with_content_metadata(tree: Any, content_metadata: Mapping[str, Any] | None) -> Any:
    """Return the tree with the caller's content metadata as an additional entry.

    Raises:
        TreeError: the tree isn't a dict, or already has an entry of that name.

    Examples:
        >>> with_content_metadata({"step": 1}, {"optimizer": "adam"})
        {'step': 1, 'content_metadata': {'optimizer': 'adam'}}
    """
    if content_metadata is None:
        return tree
    if not isinstance(tree, dict) or CONTENT_METADATA in tree:
        obstacle = "a dict that has this key" if isinstance(tree, dict) else type(tree).__name__
        raise TreeError(
            error_text(
                f"save: cannot add {CONTENT_METADATA!r} to the tree", found=obstacle, expected="a dict without this key"
            )
        )
    return {**tree, CONTENT_METADATA: content_metadata}


def _is_as_described(shard: ShardedTensor) -> bool:
    """Return whether data is surely a dense tensor that fits its shard; this quick test may reject data that fits."""
    data = shard.data
    return (
        type(data) in (torch.Tensor, torch.nn.Parameter)
        and data.layout is torch.strided
        and not data.is_nested
        and not data.is_meta
        and not misfit(shard)
    )


def _check_data(tensors: Sequence[tuple[TreePath, ShardedTensor]]) -> None:
    """Raise if a shard has no data, or data that can't be saved.

    Raises:
        CheckpointingException, UnsupportedValue, ShapeError: as `take_apart`.
    """
    # A tensor whose storage was freed still has its shape.
    suffix = ", whose storage is freed"
    empty = [
        f"{shard.key!r} at {render_path(path)}{suffix * lacks_memory(shard.data)}"
        for path, shard in tensors
        if not _has_data(shard)
    ]
    if empty:
        raise CheckpointingException(
            error_text("save: shards without data", offenders=empty, fix="Set the data of each shard.")
        )
    others = [f"{shard.key!r} at {render_path(path)}: {kind}" for path, shard in tensors if (kind := _kind(shard.data))]
    if others:
        fix = "Save tensor.to_dense(), or save the tensor's components as separate tensors."
        raise UnsupportedValue(error_text("save: data of shards is not a dense tensor", offenders=others, fix=fix))
    problems = [f"{render_path(path)}: {difference}" for path, shard in tensors if (difference := misfit(shard))]
    if problems:
        fix = "Change a dtype with `cast` and a shape with `map_shards`, or make a new shard of the changed tensor."
        raise ShapeError(error_text("save: data does not fit the shard's dtype or shape", offenders=problems, fix=fix))


def _has_data(shard: ShardedTensor) -> bool:
    data = shard.data
    if isinstance(data, torch.Tensor):
        return has_elements(data) and not lacks_memory(data)
    return hasattr(data, "dtype")


def _kind(data: Any) -> str:
    """Return a description of data that is neither a dense nor a lazy tensor; empty for a dense or lazy tensor."""
    if isinstance(data, torch.Tensor):
        return "" if data.layout is torch.strided and not data.is_nested else f"{data.layout} tensor"
    return "" if isinstance(data, LazyTensor) else type(data).__name__


# Common states: permitted differences between ranks, and the state that is stored if ranks differ.


def check_union(save: Save) -> None:
    """Raise if `SaveOptions.common` is invalid, or requests a union of common states that ranks don't compare whole.

    Raises:
        MetadataError: the value is unknown. Or it is "union", but ``validate_access_integrity=False`` turns the
            comparison off, or the caller passed a function that may leave out values before the comparison.
    """
    common = save.options.common
    if common not in ("same", "union"):
        heading = "save: unknown value of SaveOptions.common"
        raise MetadataError(error_text(heading, found=repr(common), expected="'same' or 'union'"))
    if common == "union" and (save.common_view is not None or not save.validate):
        fix = "Do not pass validate_access_integrity=False or preprocess_common_before_consistancy_check=."
        raise MetadataError(error_text("save: common='union' needs a comparison of the whole common states", fix=fix))


def common_part(save: Save, common: Any) -> Any:
    """Return the part of a rank's common tree that ranks compare with each other; None if they compare nothing.

    The caller's `preprocess_common_before_consistancy_check` function is applied if there is one.
    """
    if not save.validate:
        return None
    # `comparable` drops empty containers, since a list of shards is empty on a rank that holds none of them. Holes in
    # dicts are ignored too, since ranks may hold different shards.
    common = comparable(common)
    return common if save.common_view is None else without_holes(save.common_view(common))


def common_to_store(save: Save, tree: Any, hashes: Sequence[str | None]) -> TreeParts:
    """Compare the ranks' common states, whose hashes differ, and return this rank's parts of the tree to save.

    If the options request a union, the common state in these parts is the union of all ranks' states. This takes two
    all-gathers.

    Args:
        save: The save.
        tree: This rank's tree, with shards.
        hashes: Hash of each rank's `common_part`, by rank.

    Raises:
        IntegrityError: common states differ and no union is requested; or, for a union, ranks have different values
            under one key, or one has a value where another has a shard.
    """
    # Whole states are sent only if their hashes differ, and equal states only once.
    first, common = [hashes.index(value) for value in hashes], save.parts.common
    as_union, allow_pickle = save.options.common == "union", save.options.allow_pickle

    def encode() -> bytes:
        if first[save.world.rank] != save.world.rank:
            return b""
        # States are encoded rather than pickled, since ranks may hold instances of classes that others can't import.
        return encode_tree(common if as_union else common_part(save, common), allow_pickle=allow_pickle)

    states = gather(save.world, "save: compare common states", encode)

    def choose() -> TreeParts:
        commons = {rank: decode_tree(states[rank], allow_pickle=allow_pickle) for rank in sorted(set(first))}
        if not as_union:
            check_common([commons[rank] for rank in first])
            return save.parts
        # This rank's own values take precedence, since decoded ones are records instead of instances of classes.
        union, _ = unite({0: common, 1: _union(commons, first, save.world.rank, tree)})
        return replace(save.parts, common=union, unions=united(list(commons.values())))

    return agree(save.world, "save: check common states", choose)


def _union(commons: Mapping[int, Any], first: Sequence[int], own_rank: int, tree: Any) -> Any:
    """Return the union of all ranks' common trees: each dict has the keys that any rank has in it.

    Args:
        commons: Distinct common trees, with holes. Ranks with equal trees share one, whose key is the first such rank.
        first: Key in `commons` of each rank's tree, by rank.
        own_rank: This rank.
        tree: This rank's tree, with shards.

    Raises:
        IntegrityError: ranks have different values under one key, or another rank has a value where this one has
            shards; the error names every path, the ranks and all values.
    """
    union, conflicts = unite(commons)
    by_path = {
        path: {rank: values[like] for rank, like in enumerate(first) if like in values}
        for path, values in conflicts.items()
    }
    if not by_path:
        # A later load into this rank's tree must fit the union, so no value may be where the tree has shards.
        shards, _ = partition(tree, lambda leaf: isinstance(leaf, ShardedBase | LocalNonpersistentObject))
        for path in misfits(union, shards):
            by_path[path] = {own_rank: deepest(shards, path)[0]}
            for rank, like in enumerate(first):
                value, depth = deepest(commons[like], path)
                if rank != own_rank and depth == len(path) and not is_hollow(value):
                    by_path[path][rank] = value
    if by_path:
        pairs = [(path, problem) for path, by_rank in by_path.items() for problem in layouts.common_problems(by_rank)]
        lines = [str(replace(problem, key=(*path, *problem.key))) for path, problem in pairs]
        fix = (
            "Give each rank's value its own key, or wrap it in a ShardedObject. Turn a list whose entries differ into "
            "a dict with keys that identify them, as StateDictOptions(flatten_optimizer_state_dict=True) does for an "
            "optimizer's groups."
        )
        heading = "save: the ranks' common states cannot be united, since they differ under the same keys"
        raise IntegrityError(error_text(heading, offenders=lines, fix=fix))
    return union
