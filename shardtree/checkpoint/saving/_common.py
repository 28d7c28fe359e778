"""Step 3 of a save: whether ranks' common states agree, and which one is stored where they don't."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ... import layouts
from ...codec import decode_tree, encode_tree
from ...errors import IntegrityError, error_text
from ...trees import comparable, unite
from ...world import agree, gather
from .._consistency import check_common
from ._start import SaveCall


def compared(call: SaveCall, common: Any) -> Any:
    """Return what of a rank's common tree must be the same on all ranks, or fit together."""
    # `comparable` drops empty containers: a list of shards is empty on a rank that holds none of them.
    common = comparable(common) if call.validate else None
    return common if call.common_view is None or not call.validate else call.common_view(common)


def settled(call: SaveCall, common: Any, hashes: Sequence[str | None]) -> Any:
    """Return the common tree that is stored where ranks' differ: their union, if that is asked for; two all-gathers.

    Args:
        call: the call of `save`.
        common: this rank's, with holes.
        hashes: of what is compared of each rank's, by rank.

    Raises:
        IntegrityError: it isn't asked for, or ranks have different values under the same keys.
    """
    # Whole states travel only in this case, and of those that are the same only one.
    first = [hashes.index(hashed) for hashed in hashes]
    united, allow_pickle = call.options.common == "union", call.options.allow_pickle

    def encoded() -> bytes:
        if first[call.world.rank] != call.world.rank:
            return b""
        # Encoded, not pickled: ranks may hold instances of classes that others can't import.
        return encode_tree(common if united else compared(call, common), allow_pickle=allow_pickle)

    sent = gather(call.world, "save: compare common states", encoded)

    def checked() -> Any:
        commons = {rank: decode_tree(sent[rank], allow_pickle=allow_pickle) for rank in sorted(set(first))}
        if not united:
            check_common([commons[rank] for rank in first])
            return common
        # This rank's own values win: what was decoded has records where these have instances of classes.
        return unite({0: common, 1: _united(commons, first)})[0]

    return agree(call.world, "save: check common states", checked)


def _united(commons: Mapping[int, Any], first: Sequence[int]) -> Any:
    """Return the union of all ranks' common trees, of dicts by key.

    Args:
        commons: common trees with holes, each once, by the first rank that has it.
        first: by rank, the first one that has the same.

    Raises:
        IntegrityError: ranks have different values under one key; names every path, the ranks and all values.
    """
    union, conflicts = unite(commons)
    if conflicts:
        lines = []
        for path, values in conflicts.items():
            by_rank = {rank: values[like] for rank, like in enumerate(first) if like in values}
            found = layouts.common_problems(by_rank)
            lines += [str(replace(problem, key=(*path, *problem.key))) for problem in found]
        fix = (
            "Give each rank's value a key of its own, or wrap it in a ShardedObject. Make a list whose entries differ "
            "a dict by what they belong to, as StateDictOptions(flatten_optimizer_state_dict=True) does of an "
            "optimizer's groups."
        )
        what = "save: no union of the ranks' common states, since they differ under the same keys"
        raise IntegrityError(error_text(what, offenders=lines, fix=fix))
    return union
