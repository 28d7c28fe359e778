"""Step 3 of a save: whether ranks' common states agree, and which one is stored where they don't."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ... import layouts
from ...codec import decode_tree, encode_tree
from ...errors import IntegrityError, error_text
from ...mapping import LocalNonpersistentObject, ShardedBase
from ...trees import United, deepest, is_hollow, misfits, partition, unite, united
from ...world import agree, gather
from .._consistency import check_common
from ._start import SaveCall, compared


def common_to_store(call: SaveCall, tree: Any, common: Any, hashes: Sequence[str | None]) -> tuple[Any, United]:
    """Return the common tree that is stored where ranks' differ: their union, if that is asked for; two all-gathers.

    With it, of which dicts ranks have keys of their own.

    Args:
        call: the call of `save`.
        tree: this rank's, with shards.
        common: this rank's, with holes.
        hashes: of what is compared of each rank's, by rank.

    Raises:
        IntegrityError: it isn't asked for, or ranks have different values under the same keys, or shards and values.
    """
    # Whole states travel only in this case, and of those that are the same only one.
    first = [hashes.index(hashed) for hashed in hashes]
    as_union, allow_pickle = call.options.common == "union", call.options.allow_pickle

    def encoded() -> bytes:
        if first[call.world.rank] != call.world.rank:
            return b""
        # Encoded, not pickled: ranks may hold instances of classes that others can't import.
        return encode_tree(common if as_union else compared(call, common), allow_pickle=allow_pickle)

    sent = gather(call.world, "save: compare common states", encoded)

    def checked() -> tuple[Any, United]:
        commons = {rank: decode_tree(sent[rank], allow_pickle=allow_pickle) for rank in sorted(set(first))}
        if not as_union:
            check_common([commons[rank] for rank in first])
            return common, {}
        # This rank's own values win: what was decoded has records where these have instances of classes.
        union, _ = unite({0: common, 1: _united(commons, first, call.world.rank, tree)})
        return union, united(list(commons.values()))

    return agree(call.world, "save: check common states", checked)


def _united(commons: Mapping[int, Any], first: Sequence[int], own_rank: int, tree: Any) -> Any:
    """Return the union of all ranks' common trees, of dicts by key.

    Args:
        commons: common trees with holes, each once, by the first rank that has it.
        first: by rank, the first one that has the same.
        own_rank: this rank.
        tree: this rank's, with shards.

    Raises:
        IntegrityError: ranks have different values under one key, or another one has a value where this one has
            shards; names every path, the ranks and all values.
    """
    union, conflicts = unite(commons)
    by_path = {
        path: {rank: held[like] for rank, like in enumerate(first) if like in held} for path, held in conflicts.items()
    }
    if not by_path:
        # A load into this rank's own tree must fit what is stored: its shards have no place where a value stands.
        shards, _ = partition(tree, lambda leaf: isinstance(leaf, ShardedBase | LocalNonpersistentObject))
        for path in misfits(union, shards):
            by_path[path] = {own_rank: deepest(shards, path)[0]}
            for rank, like in enumerate(first):
                value, depth = deepest(commons[like], path)
                if rank != own_rank and depth == len(path) and not is_hollow(value):
                    by_path[path][rank] = value
    if by_path:
        found = [(path, problem) for path, by_rank in by_path.items() for problem in layouts.common_problems(by_rank)]
        lines = [str(replace(problem, key=(*path, *problem.key))) for path, problem in found]
        fix = (
            "Give each rank's value a key of its own, or wrap it in a ShardedObject. Make a list whose entries differ "
            "a dict by what they belong to, as StateDictOptions(flatten_optimizer_state_dict=True) does of an "
            "optimizer's groups."
        )
        what = "save: no union of the ranks' common states, since they differ under the same keys"
        raise IntegrityError(error_text(what, offenders=lines, fix=fix))
    return union
