"""Omissions of a load: values of the target that aren't stored, and stored values that the result can't hold.

Some strict modes leave out values that aren't stored. A dict of the result then lacks such values. A list, tuple or
instance of a class needs a value at each index or field, so it keeps the target's own value instead. A dict inside such
a container also keeps its own values if nothing is loaded into it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

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
    HOLE,
    build_factories,
    factory_of,
    join,
    leaves_with_paths,
    left_out,
    map_shards,
    nodes_at,
    refuse_too_deep,
    restrict,
)
from ....errors import KeyMismatch, TreePath, error_text, render_path
from .._consistency import unions_of
from ._plain import refuse_other_keys, unfilled_paths
from ._stored import Stored
from ._strict import LEAVING_OUT, LOGGING, StrictHandling, logger
from ._targets import Target, take_apart

_SHARDED = (ShardedTensor, ShardedObject)

# Before the join, shards that aren't stored are removed from the target.


def leave_out(target: Target, tree: Any, unexpected: set[str], mode: StrictHandling) -> Target:
    """Return the target without shards that aren't stored.

    In a mode that leaves out such shards, the result has `Target.own`: the target's own values, for the places where a
    list, tuple or instance of a class needs a value and none is stored.

    Args:
        target: A rank's target, split into leaves.
        tree: The same target as a tree.
        unexpected: Requested keys that are not stored; empty if the mode does not use them.
        mode: The strict mode.

    Raises:
        KeyMismatch: Only some of a factory's shards are stored, so that it can't be merged.
    """
    stored_part = _without_unexpected(target, tree, unexpected) if unexpected else target
    return replace(stored_part, own=own_values(tree, unexpected)) if mode in LEAVING_OUT else stored_part


def _without_unexpected(target: Target, tree: Any, unexpected: set[str]) -> Target:
    lacking = ((path, leaf, keys_of(leaf) & unexpected) for path, leaf in leaves_with_paths(tree))
    partly = [
        f"{leaf.key!r} at {render_path(path)} lacks {', '.join(map(repr, sorted(keys)))}"
        for path, leaf, keys in lacking
        if keys and keys < keys_of(leaf)
    ]
    if partly:
        fix = "Leave these factories out of the target, or let them build only shards that are stored."
        raise KeyMismatch(error_text("load: only some of a factory's shards are stored", offenders=partly, fix=fix))
    return take_apart(
        map_shards(lambda leaf: HOLE if keys_of(leaf) and keys_of(leaf) <= unexpected else leaf, tree),
        donate=target.donate,
    )


def keys_of(leaf: Any) -> set[str]:
    """Return the keys that a leaf requests; a factory requests the keys of the shards that it builds.

    Examples:
        >>> keys_of(ShardedTensor.from_rank_offsets("w", torch.ones(2))), keys_of(3)
        ({'w'}, set())
    """
    if (factory := factory_of(leaf)) is not None:
        built, _ = build_factories(factory, is_target=True)
        return {shard.key for _, shard in leaves_with_paths(built) if isinstance(shard, _SHARDED)}
    return {leaf.key} if isinstance(leaf, _SHARDED) else set()


def own_values(tree: Any, unexpected: Set[str]) -> dict[TreePath, Any]:
    """Return the values of a target that may stay in the result, by path: plain values, and data of unstored shards.

    Args:
        tree: A rank's target.
        unexpected: Requested keys that aren't stored.

    Examples:
        >>> from shardtree.mapping import ShardedTensor
        >>> tree = [ShardedTensor.from_rank_offsets(key, torch.ones(1)) for key in ("w", "new")]
        >>> own_values([*tree, 0.9], {"new"})
        {(1,): tensor([1.]), (2,): 0.9}
    """
    values = {}
    for path, leaf in leaves_with_paths(tree):
        if not isinstance(leaf, ShardedBase):
            values[path] = HOLE if isinstance(leaf, LocalNonpersistentObject) else leaf
        elif unexpected and (keys := keys_of(leaf)) and keys <= unexpected:
            values[path] = HOLE if leaf.data is None else leaf.data
    return {path: value for path, value in values.items() if _is_value(value)}


def _is_value(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return has_elements(value) and not lacks_memory(value)
    return value is not HOLE and not isinstance(value, LazyTensor)


def kept_paths(common: Any, tree: Any, own: Mapping[TreePath, Any]) -> list[TreePath]:
    """Return the paths at which the result of a load has the target's own value, since nothing is stored there.

    Args:
        common: The stored common tree.
        tree: The result: the join of common tree and target.
        own: The target's values by path, from `own_values`.

    Examples:
        >>> kept_paths([HOLE, 0.5], ["w", 0.5, 0.9], {(1,): 0.5, (2,): 0.9})
        [(2,)]
    """
    nodes, stored = nodes_at(tree, own), nodes_at(common, own)
    return [
        path for path, value in own.items() if path in nodes and nodes[path] is value and stored.get(path, HOLE) is HOLE
    ]


# A trial of the join before a tensor is read, and its omissions.


@dataclass(frozen=True, slots=True)
class Omissions:
    """The omissions of a load.

    Attributes:
        left_out: Paths of stored plain values that can't be returned, since containers around them lack shards.
        unfilled: Paths of the target's plain tensors for which nothing is stored.
        kept: Paths of the target's own values that are in the result, since nothing is stored for them.
        union_paths: Paths of all plain values in the stored common state, if that state is a union: the save united the
            common states of several ranks, and each rank loads a part of it. Otherwise empty.
        unasked_bits: Flags of the values in `union_paths` that this rank doesn't load, one bit each, as packed by
            `numpy.packbits`. They are a single bytes object in a tuple; () if the stored state isn't a union.
    """

    left_out: tuple[str, ...] = ()
    unfilled: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    union_paths: tuple[TreePath, ...] = ()
    unasked_bits: tuple[bytes, ...] = ()

    @property
    def shared(self) -> tuple[tuple[str, ...], tuple[str, ...], tuple[bytes, ...]]:
        """The fields that are sent to the other ranks: `unfilled`, `kept` and `unasked_bits`."""
        return self.unfilled, self.kept, self.unasked_bits

    def unasked_paths(self, all_bits: Sequence[bytes]) -> tuple[str, ...]:
        """Return those of `union_paths` that no rank loads.

        Args:
            all_bits: The bytes objects in the `unasked_bits` of all ranks.
        """
        if len(set(map(len, all_bits))) != 1:  # nothing was united, or a caller's function loads different states
            return ()
        of_all = np.bitwise_and.reduce([np.frombuffer(bits, dtype=np.uint8) for bits in all_bits])
        numbers = np.flatnonzero(np.unpackbits(of_all, count=len(self.union_paths)))
        return tuple(render_path(self.union_paths[number]) for number in numbers)


def join_common(stored: Stored, target: Target, rest: Target, mode: StrictHandling) -> tuple[Any, Omissions]:
    """Return the part of the common state that a rank loads, and the omissions of the load; no tensor is read.

    Args:
        stored: The checkpoint's contents.
        target: The rank's target.
        rest: The same target without the shards that aren't stored.
        mode: The strict mode.

    Raises:
        TreeError: The target doesn't fit the common state.
        KeyMismatch: There are `left_out` or `unfilled` values (see `Omissions`), and the mode is RAISE_ALL. Or a plain
            tensor seems to be stored under a key that isn't its path, in a mode that leaves nothing out.
        CorruptCheckpoint, UnsafeFile: The common state can't be read.
    """
    whole, unions = stored.common(rest.types), unions_of(stored.checkpoint.fields)
    if not unions:
        return whole, check_join(stored, whole, rest, mode)
    common = restrict(whole, target.rebuild(target.leaves), unions)
    omissions = check_join(stored, common, rest, mode)
    values, absent = left_out(whole, HOLE), {*left_out(whole, common)}
    # Flags are packed into bits, since thousands of ranks may each lack the values of thousands of parameters.
    bits = np.packbits([path in absent for path in values]).tobytes()
    return common, replace(omissions, union_paths=values, unasked_bits=(bits,))


def check_join(stored: Stored, common: Any, target: Target, mode: StrictHandling) -> Omissions:
    """Return the omissions of a load, found by joining the common tree with the target before any tensor is read.

    `Omissions` lists them by kind. The final join, with the loaded values, has the same ones.

    Raises:
        TreeError: The target doesn't fit the common state.
        KeyMismatch: The mode refuses an omission; see `join_common`.
    """
    # An optimizer's state in tuples, or a list with shards beside values, can't be returned without its shards: it is
    # left out, so that a partial load can succeed.
    own_place = (*_SHARDED, LocalNonpersistentObject)
    leaves = [leaf if isinstance(leaf, own_place) else HOLE for leaf in target.leaves]
    tree = join_leaves(common, target, leaves)
    lacking = unfilled_paths(target, tree) if target.plain else []
    if lacking and mode not in LEAVING_OUT:
        refuse_other_keys(lacking, common, stored.keys)
    kept = kept_paths(common, tree, target.own) if target.own else []
    absent, empty, own = (tuple(map(render_path, paths)) for paths in (left_out(common, tree), lacking, kept))
    refuse_omissions(mode, STORED_VALUES, absent)
    refuse_omissions(mode, TARGET_TENSORS, empty)
    return Omissions(absent, empty, own)


def join_leaves(common: Any, target: Target, leaves: Sequence[Any]) -> Any:
    """Join the stored common tree with a target's tree of new leaves, and return the joined tree.

    Args:
        common: The stored common tree.
        target: The target.
        leaves: A value, or a hole, for each leaf of the target.

    Raises:
        TreeError: The two don't fit together.
    """
    tree = target.rebuild(leaves)
    with refuse_too_deep("load"):
        return join(common, tree, target.own)


# Headings of errors and log messages about omissions.

STORED_VALUES = (
    "load: stored values are left out: shards beside them in a list, tuple or record are not requested, or the "
    "target's class lacks these fields"
)
TARGET_TENSORS = "load: tensors of the target, or values with tensors, are not stored, so the result lacks them"
RANK_VALUES = "load: stored values that only some ranks had are left out: no rank's target has their keys"
KEPT_VALUES = (
    "load: nothing is stored at these paths, and a list, tuple or class needs a value: the target's own is kept"
)
_FIXES = {
    STORED_VALUES: (
        "Put these shards in the target, or pass a strict mode that logs, returns or ignores what is not loaded."
    ),
    TARGET_TENSORS: (
        "Leave them out of the target, put them in a `LocalNonpersistentObject`, or pass another strict mode."
    ),
    RANK_VALUES: "Put these keys in a rank's target, or pass another strict mode.",
}
"""Fixes by heading."""


def refuse_omissions(strict: StrictHandling, what: str, paths: Sequence[str]) -> None:
    """Raise if a load leaves out values and its strict mode is RAISE_ALL.

    Args:
        strict: The strict mode.
        what: Heading of the error, a constant of this module: `STORED_VALUES`, `TARGET_TENSORS` or `RANK_VALUES`.
        paths: Paths of the omitted values or tensors.

    Raises:
        KeyMismatch: There are paths, and the mode is RAISE_ALL.
    """
    if strict is StrictHandling.RAISE_ALL and paths:
        raise KeyMismatch(error_text(what, offenders=paths, fix=_FIXES[what]))


def log_omissions(what: str, paths: Sequence[str]) -> None:
    """Log the paths of omitted values under a heading, if there are any."""
    if paths:
        logger.warning("\n  ".join([what, *map(error_text, paths)]))


def log_of_ranks(mode: StrictHandling, unfilled: Iterable[str], kept: Iterable[str], unasked: Sequence[str]) -> None:
    """Log the omissions of all ranks.

    Args:
        mode: The strict mode. In IGNORE_ALL, `kept` isn't logged. Only LOG_UNEXPECTED and LOG_ALL log `unasked`.
        unfilled: Paths of the ranks' plain tensors for which nothing is stored; duplicates are logged once.
        kept: Paths of the ranks' own values in the results; duplicates are logged once.
        unasked: Paths of the values in the stored union of common states that no rank loads.
    """
    log_omissions(TARGET_TENSORS, list(dict.fromkeys(unfilled)))
    log_omissions(KEPT_VALUES, [] if mode is StrictHandling.IGNORE_ALL else list(dict.fromkeys(kept)))
    log_omissions(RANK_VALUES, unasked if mode in LOGGING else ())
