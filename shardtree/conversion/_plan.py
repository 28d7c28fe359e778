"""The plan of a conversion: the shards to write, their batches, and the unused parts of the source."""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
import torch

from ..core.geometry import Column, as_int, box_shape, slices, volumes
from ..core.layouts import access_problems, shard_columns
from ..core.lazy import Fetch, LazyTensor
from ..core.mapping import ShardedObject, ShardedTensor
from ..core.plans import grouped
from ..core.trees import (
    HOLE,
    key_matcher,
    leaves_with_paths,
    near_patterns,
    plain_matcher,
    refuse_scaled,
    scaled_values,
)
from ..errors import IntegrityError, KeyMismatch, ShapeError, StorageError, TreeError, error_text, render_path
from ..inspection import BoxReader, OpenCheckpoint, boxes, refuse_unproven
from ..shell.checkpoint import Metadata, load_common
from ..shell.checkpoint.saving import take_apart
from ..shell.table.index import reasoned, stored_kinds, untaken_of
from ..traces import Trace, transformed
from ._casts import cast_sources
from ._source import COMMON, Shard, SourceKey, StoredObject, note_shell_patterns, source_tree

# Accounting for all of a source: used, left out on purpose, or lost, which is an error

_Boxes = dict[str, set[tuple[tuple[int, ...], tuple[int, ...], int]]]


def unused_elements(
    source: Mapping[str, Shard],
    tensors: Sequence[ShardedTensor],
    objects: Sequence[ShardedObject],
    reads: Iterable[Fetch],
) -> tuple[tuple[str, ...], dict[str, int]]:
    """Return the source's unused keys, and a lower bound of each partly used tensor's number of unused elements.

    Args:
        source: Input of the transform.
        tensors: Tensors of its output.
        objects: Objects of its output.
        reads: Boxes that the transform has read itself.
    """
    boxes = _used_boxes(tensors, reads)
    used = {item.data.unique_key for item in objects if isinstance(item.data, StoredObject)} | boxes.keys()
    unused = tuple(key for key, shard in source.items() if key not in used and _has_elements(shard))
    whole = {key: shard for key, shard in source.items() if isinstance(shard, ShardedTensor)}
    counts = {key: prod(shard.global_shape) - _coverage(boxes[key]) for key, shard in whole.items() if key in boxes}
    return unused, {key: count for key, count in counts.items() if count > 0}


def _refuse_unused_keys(keys: Sequence[str]) -> None:
    if keys:
        heading = "convert: the output lacks keys of the source"
        fix = "Let the transform pass them on, list them in leave_out=[...], or drop them with prune=True."
        raise KeyMismatch(error_text(heading, offenders=map(repr, keys), fix=fix))


def _refuse_untaken(untaken: Mapping[str, str], leave_out: Sequence[str]) -> None:
    named = key_matcher([pattern for pattern in leave_out if pattern != COMMON])
    lost = [reasoned(untaken, name) for name in sorted(untaken) if not named(name)]
    if lost:
        heading = "convert: the source has values that cannot be converted"
        fix = "To convert the rest, list these in leave_out=[...], or drop all such values with prune=True."
        raise KeyMismatch(error_text(heading, offenders=lost, fix=fix))


def check_output(tensors: Sequence[ShardedTensor], objects: Sequence[ShardedObject]) -> None:
    """Raise an error unless the shards tile whole tensors, and no object has the key of another object or a tensor.

    Raises:
        IntegrityError: Elements are missing or repeated, a key isn't unique, or a shard is a flat range of a box. The
            error names every such key.
    """
    # Flat shards are refused: batches are cut as boxes, and a flat range of a box isn't one.
    problems = [f"{problem.key!r}: {problem.what}" for problem in access_problems(shard_columns(tensors))]
    names = Counter(item.unique_key for item in objects)
    keys = {shard.key for shard in tensors}
    problems += [f"object {name!r} is there twice" for name, count in names.items() if count > 1]
    problems += [f"{name!r} is both a tensor and an object" for name in names if name in keys]
    problems += [f"{shard.key!r} has a flattened_range" for shard in tensors if shard.flattened_range is not None]
    if problems:
        fix = "Give each tensor and object a unique key; cover each tensor's elements once, without flattened_range."
        raise IntegrityError(error_text("convert: the output is not a whole checkpoint", offenders=problems, fix=fix))


def _has_elements(shard: Shard) -> bool:
    return isinstance(shard, ShardedObject) or prod(shard.global_shape) > 0


def _used_boxes(tensors: Sequence[ShardedTensor], reads: Iterable[Fetch]) -> _Boxes:
    """Return the boxes to be read from each source tensor, as (offset, shape, count).

    A view may use only some elements of a box; `count` is an upper bound of their number.
    """
    boxes: _Boxes = defaultdict(set)
    for fetch in reads:
        _add(boxes, fetch, prod(fetch.shape))
    for shard in tensors:
        if isinstance(shard.data, LazyTensor):
            fetches = shard.data.fetches
            # The box around a view can hold more elements than the view, for example that of every second row.
            most = shard.data.numel() if len(fetches) == 1 else None
            for fetch in fetches:
                _add(boxes, fetch, prod(fetch.shape) if most is None else min(most, prod(fetch.shape)))
    return boxes


def _add(boxes: _Boxes, fetch: Fetch, count: int) -> None:
    if isinstance(fetch.name, SourceKey):
        boxes[fetch.name].add((fetch.offset, fetch.shape, count))


def _coverage(boxes: set[tuple[tuple[int, ...], tuple[int, ...], int]]) -> int:
    """Return an upper bound of the number of a tensor's used elements, from its boxes as `_used_boxes` returns them."""
    # It is the smaller of two upper bounds: boxes may overlap, and a view may use fewer elements than its box has.
    places = sorted({(offset, shape) for offset, shape, _ in boxes})
    begin, shape = (np.array(column, dtype=np.int64).reshape(len(places), -1) for column in zip(*places, strict=True))
    return min(_union(begin, begin + shape), sum(count for *_, count in boxes))


def _union(begin: Column, end: Column) -> int:
    """Return the volume of a union of boxes: slab by slab between the edges along the first axis."""
    if len(begin) == 1 or not begin.shape[1]:
        return int(volumes(end[:1] - begin[:1])[0])
    edges = np.unique(np.concatenate([begin[:, 0], end[:, 0]]))
    total, before, volume = 0, b"", 0
    for low, high in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        inside = (begin[:, 0] <= low) & (end[:, 0] > low)
        if inside.tobytes() != before:  # neighbouring slabs mostly meet the same boxes: one recursion serves them all
            before = inside.tobytes()
            volume = _union(begin[inside, 1:], end[inside, 1:]) if inside.any() else 0
        total += (high - low) * volume
    return total


# Cutting a destination: tensors into pieces, pieces into batches

Counts = Sequence[int]
Cutting = Callable[[ShardedTensor], Counts | None] | Mapping[str, Counts] | None
"""Number of pieces along each axis: a function from a whole tensor, or counts by key pattern; None if only the size
decides."""

_MOST_PIECES = 2**16  # per tensor, since planning so many takes seconds; with default options, they hold 16 TiB
_OBJECTS = 64  # per batch: their size isn't known before they are read


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """The tensors and objects that are written together, as one rank of a save would write them.

    Attributes:
        tensors: Pieces of tensors.
        objects: Sharded objects.
    """

    tensors: tuple[ShardedTensor, ...] = ()
    objects: tuple[ShardedObject, ...] = ()

    @property
    def nbytes(self) -> int:
        """The size of the pieces in bytes."""
        return sum(_nbytes(shard) for shard in self.tensors)


def batches_of(
    tensors: Sequence[ShardedTensor],
    objects: Sequence[ShardedObject],
    layout: Cutting,
    most_bytes: int,
    *,
    cuts: bool = True,
) -> list[Batch]:
    """Return the batches in the order of writing; at least one.

    Args:
        tensors: Boxes of tensors, in the order of writing.
        objects: Objects, which come first, so that a format that can't hold them fails before anything is written.
        layout: Number of pieces along each axis, for whole tensors. A shard without such counts, or a shard that isn't
            a whole tensor, is cut only if it is larger than a batch.
        most_bytes: Upper bound of a batch's bytes, unless a piece that `layout` asks for is larger.
        cuts: Whether a tensor that is larger than a batch is cut; else it is a batch of its own.

    Raises:
        KeyMismatch: `layout` has a pattern that matches no key.
        ShapeError: `layout` is neither a function nor a dict of patterns, or doesn't give a count for each axis.
    """
    counts_of = _counts_function(layout, tensors)
    batches = [Batch((), tuple(objects[start : start + _OBJECTS])) for start in range(0, len(objects), _OBJECTS)]
    most_piece = most_bytes if cuts else sys.maxsize
    pieces = (piece for shard in tensors for piece in _pieces(shard, counts_of(shard), most_piece))
    batches += [Batch(tuple(group)) for group in grouped(pieces, _nbytes, most_bytes)]
    return batches or [Batch()]


def _nbytes(shard: ShardedTensor) -> int:
    return prod(shard.local_shape) * shard.dtype.itemsize


def _counts_function(layout: Cutting, tensors: Sequence[ShardedTensor]) -> Callable[[ShardedTensor], Counts | None]:
    if layout is None:
        return lambda shard: None
    if callable(layout):
        return layout
    if not isinstance(layout, Mapping) or not all(isinstance(pattern, str) for pattern in layout):
        expected = "a dict from key patterns to counts of pieces, or a function that returns such counts for a shard"
        raise ShapeError(error_text("convert: wrong layout", found=repr(layout)[:200], expected=expected))
    rows, keys = (
        [(key_matcher([pattern]), counts) for pattern, counts in layout.items()],
        {shard.key for shard in tensors},
    )
    nothing = [pattern for pattern, (fits, _) in zip(layout, rows, strict=True) if not any(map(fits, keys))]
    if nothing:
        heading = "convert: layout has patterns that match no key of the output"
        raise KeyMismatch(error_text(heading, offenders=near_patterns(nothing, keys)))
    note_shell_patterns("convert: layout", layout, keys)
    return lambda shard: next((counts for fits, counts in rows if fits(shard.key)), None)


def _pieces(shard: ShardedTensor, counts: Counts | None, most_bytes: int) -> Iterator[ShardedTensor]:
    is_whole = shard.local_shape == shard.global_shape
    if counts is not None and is_whole:
        cell = _cell(shard, counts)
    elif _nbytes(shard) > most_bytes:
        cell = box_shape(shard.local_shape, max(1, most_bytes // shard.dtype.itemsize))
    else:
        yield shard
        return
    fragments = _fragments(shard.local_shape, cell) if is_whole else None
    if not prod(shard.local_shape):
        yield shard
    for offset, shape in boxes(shard.local_shape, cell, f"convert: {shard.key!r}", _MOST_PIECES):
        yield _piece(shard, offset, shape, fragments)


def _cell(shard: ShardedTensor, counts: Any) -> tuple[int, ...]:
    shape = shard.local_shape
    pieces = [as_int(count) or 0 for count in counts] if isinstance(counts, (tuple, list)) else []
    if len(pieces) != len(shape) or any(count < 1 for count in pieces):
        expected = f"{len(shape)} counts of pieces, one for each axis of {shape}"
        raise ShapeError(
            error_text(f"convert: wrong layout of {shard.key!r}", found=repr(counts)[:200], expected=expected)
        )
    return tuple(max(1, -(-size // count)) for size, count in zip(shape, pieces, strict=True))


def _fragments(shape: tuple[int, ...], cell: tuple[int, ...]) -> tuple[int, ...] | None:
    regular = all(size % step == 0 for size, step in zip(shape, cell, strict=True))
    return tuple(size // step for size, step in zip(shape, cell, strict=True)) if regular else None


def _piece(
    shard: ShardedTensor, offset: tuple[int, ...], shape: tuple[int, ...], fragments: tuple[int, ...] | None
) -> ShardedTensor:
    axes = shard.prepend_axis_num
    starts = zip(shard.global_offset[axes:], offset, strict=True)
    return replace(
        shard,
        data=shard.data[slices(offset, shape)],
        local_shape=shape,
        global_offset=(*shard.global_offset[:axes], *(first + start for first, start in starts)),
        axis_fragmentations=fragments,
    )


Transform = Callable[[dict[str, Any]], Any] | Trace


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """The plan of a conversion.

    Attributes:
        reader: Reader of the source.
        tensors: Tensors to write, uncut.
        objects: Objects to write.
        common: Common tree to write, with holes in place of shards; `HOLE` if it is left out.
        batches: Pieces of the tensors, and the objects, in the order of writing.
        left_out: Keys that patterns leave out or the transform drops; keys of unreadable values; and, if the common
            state is left out, ``"common"`` and the paths of its tensors that aren't converted, such as sparse ones.
        unused: (key, number of unused elements) of each tensor that the output uses only in part.
        unchanged_keys: Keys of tensors that the transform returned unchanged.
    """

    reader: BoxReader
    tensors: tuple[ShardedTensor, ...]
    objects: tuple[ShardedObject, ...]
    common: Any
    batches: tuple[Batch, ...]
    left_out: tuple[str, ...]
    unused: tuple[tuple[str, int], ...]
    unchanged_keys: frozenset[str]


def _checked_bytes(most_bytes: object) -> int:
    number = as_int(most_bytes)
    if number is None or number < 1:
        heading = "convert: max_bytes_in_flight is too small or no number"
        raise StorageError(error_text(heading, found=repr(most_bytes)[:200], expected="a number of bytes, 1 at least"))
    return number


def plan_conversion(
    tree: OpenCheckpoint,
    transform: Transform | None,
    transform_common: Callable[[Any], Any] | None,
    *,
    leave_out: Sequence[str],
    plain: Sequence[str],
    prune: bool,
    layout: Cutting,
    most_bytes: int,
    cuts: bool = True,
) -> Plan:
    """Return the plan of a conversion; only metadata and the common state of the source are read.

    Arguments are as in `convert`, except that `most_bytes` and `cuts` are as in `batches_of`.

    Raises:
        KeyMismatch: A key is neither used nor left out nor pruned, or a pattern matches nothing.
        IntegrityError: The output's shards don't tile their tensors.
        TreeError: The transform returned a value that isn't a shard.
        ShapeError: The output casts quantised values, but doesn't use their scales.
    """
    most = _checked_bytes(most_bytes)
    reads: list[Fetch] = []
    reader = BoxReader(tree, SourceKey)
    source, left_out, others = source_tree(reader, leave_out, reads.append)
    refuse_unproven("convert", tree.metadata, source)
    output = take_apart(_output(dict(source), transform))
    _refuse_plain_values(output.common)
    check_output(output.tensors, output.objects)
    unused_keys, counts = unused_elements(source, output.tensors, output.objects, tuple(reads))
    if not prune:
        _refuse_unused_keys(unused_keys)
        _refuse_untaken(untaken_of(tree.metadata), leave_out)
    _refuse_without_scales(output.tensors, tree.metadata, {*left_out, *unused_keys}, plain)
    common = HOLE
    if COMMON not in leave_out:
        common = load_common(tree.checkpoint, None, tree.strategies)
        if transform_common is not None:
            common = transform_common(common)
    batches = batches_of(output.tensors, output.objects, layout, most, cuts=cuts)
    without = [COMMON, *others] if COMMON in leave_out else []
    left_out = (*left_out, *unused_keys, *untaken_of(tree.metadata), *without)
    unused = tuple(sorted(counts.items()))
    unchanged_keys = frozenset(shard.key for shard in output.tensors if _is_unchanged(shard, source.get(shard.key)))
    return Plan(reader, output.tensors, output.objects, common, tuple(batches), left_out, unused, unchanged_keys)


def _refuse_without_scales(
    tensors: Sequence[ShardedTensor], metadata: Metadata, unused: Set[str], plain: Sequence[str]
) -> None:
    """Raise an error if the output casts quantised values, but doesn't use their scales.

    Values whose scales are used aren't checked: `cast` refuses them itself, and `recode` multiplies them by the scales.
    """
    is_plain = plain_matcher("convert", plain, lambda: metadata)
    pairs = (pair for shard in tensors if isinstance(shard.data, LazyTensor) for pair in cast_sources(shard.data))
    values = {str(name): dtype for name, dtype in pairs if isinstance(name, SourceKey) and not is_plain(name)}

    def unused_dtypes(keys: list[str]) -> dict[str, torch.dtype]:
        return {key: kind.dtype for key, kind in stored_kinds(metadata, [key for key in keys if key in unused]).items()}

    refuse_scaled("convert", values, scaled_values(values, unused_dtypes))


def _output(source: dict[str, Any], transform: Transform | None) -> Any:
    if transform is None:
        return source
    return transformed(transform, source, "convert") if isinstance(transform, Trace) else transform(source)


def _is_unchanged(shard: ShardedTensor, original: Shard | None) -> bool:
    return original is not None and shard.data is original.data and shard.global_shape == original.global_shape


def _refuse_plain_values(rest: Any) -> None:
    plain = [
        f"{render_path(path)}: {type(leaf).__name__}" for path, leaf in leaves_with_paths(rest) if leaf is not HOLE
    ]
    if plain:
        fix = "Return only shards; values that are not sharded are the common state, which transform_common= changes."
        raise TreeError(
            error_text("convert: the transform returned values that are not shards", offenders=plain, fix=fix)
        )
