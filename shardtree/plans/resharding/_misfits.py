"""Layouts that don't fit: what can't be resharded, and why."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

import numpy as np

from ...errors import IntegrityError, KeyMismatch, ShapeError, error_text, plural
from ...geometry import box_slices, volumes
from ...layouts import Problem, ShardColumns, TensorKind, place_text, problem_lines, select_rows, write_problems
from .._convertible import convertible
from .._near import near_names
from ._pieces import NOWHERE, Pieces

_ALL = "Give the plan the shards of all ranks."
_MOST = 2.0**62
"""Bytes: sums of a few such numbers are int64s."""
_PADDED = "save and load handle what is padded."


def check_kinds(source: ShardColumns, target: ShardColumns, *, cast: bool) -> None:
    """Raise unless every tensor that is wanted is in the source, of the same global shape and of a dtype that fits.

    Args:
        source: the shards before.
        target: the shards after.
        cast: whether another dtype fits too, where `load` converts it.

    Raises:
        KeyMismatch: a tensor isn't there.
        ShapeError: one has another global shape, or a dtype that doesn't fit.
    """
    had = dict(zip(source.keys, source.kinds, strict=True))
    asked = dict(zip(target.keys, target.kinds, strict=True))
    absent = [key for key in target.keys if key not in had]
    if absent:
        near = near_names(absent, [key for key in source.keys if key not in asked])
        lines = (repr(key) + (f" (did you mean {near[key]!r}?)" if key in near else "") for key in absent)
        fix = "Ask for tensors that the source has, or rename one side."
        raise KeyMismatch(error_text("plan_reshard: not in the source", offenders=lines, fix=fix))
    pairs = {key: (had[key], kind) for key, kind in asked.items()}
    wrong = {key: pair for key, pair in pairs.items() if not _fits(*pair, cast=cast)}
    if wrong:
        lines = (f"{key!r}: source has {before}, target asks for {after}" for key, (before, after) in wrong.items())
        fix = "\n  ".join(_fixes(wrong.values()))
        raise ShapeError(error_text("plan_reshard: global shapes or dtypes differ", offenders=lines, fix=fix))


def _fits(before: TensorKind, after: TensorKind, *, cast: bool) -> bool:
    same_dtype = before.dtype == after.dtype or (cast and convertible(before.dtype, after.dtype))
    return same_dtype and before.global_shape == after.global_shape


def _fixes(pairs: Collection[tuple[TensorKind, TensorKind]]) -> Iterator[str]:
    """Yield what to do about tensors that don't fit, each once."""
    dtypes = {(before.dtype, after.dtype) for before, after in pairs if before.dtype != after.dtype}
    if any(convertible(*pair) for pair in dtypes):
        yield "Pass cast=True to convert the source's dtype."
    if not all(convertible(*pair) for pair in dtypes):
        yield "Ask for the source's dtype, where values can't be converted without a loss."
    if any(before.global_shape != after.global_shape for before, after in pairs):
        yield f"Resharding keeps global shapes: {_PADDED}"


def check_sizes(source: ShardColumns, target: ShardColumns) -> None:
    """Raise if a side has more bytes than can be counted, on all ranks together.

    Raises:
        ShapeError: names the largest tensors.
    """
    for side, columns in (("source", source), ("target", target)):
        item, box = (
            columns.item_size[columns.key],
            columns.shape.astype(np.float64).prod(axis=1),
        )  # floats don't overflow
        held = np.where(columns.start < 0, box, columns.stop - columns.start) * item
        if max((box * item).max(initial=0), held.sum()) < _MOST:
            continue
        total = np.bincount(columns.key, weights=held, minlength=len(columns.keys))
        largest = np.argsort(-total, kind="stable").tolist()
        lines = (f"{columns.keys[key]!r} {columns.kinds[key]}: {total[key]:.3g} bytes" for key in largest)
        what = f"plan_reshard: the {side}'s shards are too large, together"
        raise ShapeError(error_text(what, offenders=lines, fix="Plan parts of them that have less than 2**62 bytes."))


def check_mains(source: ShardColumns, target: ShardColumns) -> None:
    """Raise if main replicas of what is wanted overlap, for which one is right can't be told, or leave their tensor.

    Raises:
        IntegrityError: names keys, ranks and boxes.
    """
    asked = set(target.keys)
    wanted = np.array([key in asked for key in source.keys], dtype=np.bool_)[source.key]
    problems = write_problems(select_rows(source, np.flatnonzero(source.main & wanted)))
    _raise("plan_reshard: main replicas of the source don't tile their tensors", problems)


def check_held(target: ShardColumns, pieces: Pieces) -> None:
    """Raise if somebody wants what nobody holds.

    Raises:
        IntegrityError: names keys, ranks and boxes.
    """
    lost = np.flatnonzero(pieces.place == NOWHERE)
    _raise("plan_reshard: the source doesn't hold all that the target asks for", _gaps(target, pieces, lost.tolist()))


def _gaps(target: ShardColumns, pieces: Pieces, rows: Iterable[int]) -> Iterator[Problem]:
    for row in rows:
        shard = int(pieces.target[row])
        key = int(target.key[shard])
        box = box_slices(pieces.offset[row], pieces.shape[row], len(target.kinds[key].global_shape))
        count = plural(int(volumes(pieces.shape[row][None])[0]), "element")
        what = f"{place_text(box)} is held by no rank of the source ({count})"
        yield Problem(
            target.keys[key], (int(target.rank[shard]),), what, box, fix="Give the plan the shards of all ranks."
        )


def _raise(what: str, problems: Iterable[Problem]) -> None:
    found = sorted(problems, key=lambda problem: str(problem.key))
    if found:
        fixes = dict.fromkeys(problem.fix for problem in found if problem.fix)
        raise IntegrityError(error_text(what, offenders=problem_lines(found), fix="\n  ".join(fixes)))
