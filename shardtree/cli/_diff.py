"""`shardtree diff`: whether two checkpoints hold the same, whatever formats they are in and however they are cut."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from ..checkpoint import CheckpointDifference, KindDifference, compare_checkpoints, open_checkpoint
from ..codec import dtype_from_name
from ..layouts import TensorKind
from ..strategies import Strategies, StrategyAction, default_strategies
from ._bars import bar
from ._contents import Contents, TensorRow, check_patterns, contents_at, matcher, select
from ._diff_show import Compared, Side, document, show_difference
from ._output import Output, json_text

Load = Callable[..., Any]


def run_diff(
    left: str, right: str, *, patterns: Sequence[str], only_structure: bool, as_json: bool, allow_pickle: bool
) -> int:
    """Print where two checkpoints differ, and return the exit status: 0 where nowhere, else 1.

    Args:
        left: a path or URL.
        right: likewise.
        patterns: of the keys to compare; none for all, and the common state.
        only_structure: whether to compare keys, dtypes and shapes alone.
        as_json: whether to print JSON.
        allow_pickle: whether pickled values may be unpickled.

    Raises:
        CheckpointingException: one of them can't be read.
    """
    compared = _compare(left, right, patterns, only_structure, allow_pickle)
    if as_json:
        print(json_text(document(compared)))
    else:
        show_difference(Output(), compared)
    return 1 if compared.difference else 0


def _compare(left: str, right: str, patterns: Sequence[str], only_structure: bool, allow_pickle: bool) -> Compared:
    trees = [open_checkpoint(where, allow_pickle=allow_pickle) for where in (left, right)]
    everything = [contents_at(tree) for tree in trees]
    check_patterns("diff", patterns, *everything)
    named = zip((left, right), trees, everything, strict=True)
    sides = [Side(where, tree, select(contents, patterns)) for where, tree, contents in named]
    if only_structure:
        difference = structure_difference(*(side.contents for side in sides))
    else:
        with bar(Output(stderr=True), "compare", _bytes_in_both(*(side.contents for side in sides))) as advance:
            strategies = selecting(matcher(patterns)) if patterns else default_strategies
            options: Any = {"allow_pickle": allow_pickle, "strategies": strategies, "progress": advance}
            difference = compare_checkpoints(*(tree.checkpoint.storage for tree in trees), **options)
    return Compared(sides[0], sides[1], difference, only_structure, bool(patterns))


def _bytes_in_both(left: Contents, right: Contents) -> int:
    kinds = {row.key: (row.dtype, row.shape) for row in right.tensors}
    return sum(row.length for row in left.tensors if kinds.get(row.key) == (row.dtype, row.shape))


def structure_difference(left: Contents, right: Contents) -> CheckpointDifference:
    """Return how two checkpoints differ in keys, dtypes and global shapes.

    Examples:
        >>> one = Contents((TensorRow("w", "float32", (4,), 16, None),), ())
        >>> structure_difference(one, Contents((), ())).only_left
        ('w',)
    """
    mine, theirs = ({row.key: row for row in contents.tensors} for contents in (left, right))
    # A tensor's key can be an object's unique key, and is another thing then.
    objects = [dict.fromkeys(row.unique_key for row in contents.objects) for contents in (left, right)]
    both = [(mine[key], theirs[key]) for key in mine if key in theirs]
    kinds = [
        KindDifference(one.key, _kind(one), _kind(other))
        for one, other in both
        if (one.dtype, one.shape) != (other.dtype, other.shape)
    ]
    return CheckpointDifference(
        only_left=(*_missing(mine, theirs), *_missing(*objects)),
        only_right=(*_missing(theirs, mine), *_missing(*reversed(objects))),
        kinds=tuple(kinds),
    )


def _missing(names: Mapping[str, Any], others: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(name for name in names if name not in others)


def selecting(matches: Callable[[str], bool]) -> Strategies:
    """Return a table whose formats show nothing but the tensors and objects of some keys, and no common state."""
    return {row: _selecting(row[0], strategy, matches) for row, strategy in default_strategies.items()}


def _selecting(action: StrategyAction, strategy: Load, matches: Callable[[str], bool]) -> Load:
    if action is StrategyAction.LOAD_COMMON:
        return lambda checkpoint: {}
    return partial(_matching, strategy, matches) if action is StrategyAction.LOAD_METADATA else strategy


def _matching(load_metadata: Load, matches: Callable[[str], bool], checkpoint: Any) -> Mapping[str, Any]:
    metadata = load_metadata(checkpoint)
    shards = ((key, metadata[key]) for key in metadata)
    return {key: shard for key, shard in shards if matches(key) or matches(shard.key)}


def _kind(row: TensorRow) -> TensorKind:
    return TensorKind(dtype_from_name(row.dtype), row.shape, 0)
