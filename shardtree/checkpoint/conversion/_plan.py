"""What a conversion will do: which shards are written, in which batches, and what of the source they leave unused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import StorageError, TreeError, error_text, render_path
from ...lazy import Fetch
from ...mapping import ShardedObject, ShardedTensor
from ...trees import HOLE, leaves_with_paths
from .._lazy_tree import OpenCheckpoint
from .._open import load_common
from ..comparison._reader import BoxReader
from ..saving._prepare import prepare
from ._accounting import check_output, unused_elements
from ._pieces import Batch, Cutting, batches_of
from ._source import COMMON, Shard, left_out_keys, source_tree

Transform = Callable[[dict[str, Any]], Any]


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """What a conversion will do.

    Attributes:
        reader: reads the source.
        tensors: what is written, uncut.
        objects: what is written.
        common: the common tree that is written, with holes where shards were; `HOLE` where it is left out.
        batches: pieces of the tensors, and the objects, in the order in which they are written.
        left_out: keys and unique keys that the transform wasn't given.
        unused: (key, elements) of tensors of which the output has only a part.
        unchanged: keys of tensors that go through as they are.
    """

    reader: BoxReader
    tensors: tuple[ShardedTensor, ...]
    objects: tuple[ShardedObject, ...]
    common: Any
    batches: tuple[Batch, ...]
    left_out: tuple[str, ...]
    unused: tuple[tuple[str, int], ...]
    unchanged: frozenset[str]


def plan_conversion(
    opened: OpenCheckpoint,
    transform: Transform | None,
    transform_common: Callable[[Any], Any] | None,
    *,
    leave_out: Sequence[str],
    layout: Cutting,
    most_bytes: int,
) -> Plan:
    """Return what a conversion will do; of the source only metadata and the common state are read.

    Raises:
        KeyMismatch: a key is neither used nor left out, or a pattern names nothing.
        IntegrityError: the output's shards don't tile their tensors.
        TreeError: the transform gave something that isn't a shard.
    """
    if type(most_bytes) is not int or most_bytes < 1:
        what = "convert: max_bytes_in_flight"
        raise StorageError(error_text(what, found=repr(most_bytes)[:200], expected="a number of bytes, 1 at least"))
    left_out = left_out_keys(opened.metadata, leave_out)
    reads: list[Fetch] = []
    reader = BoxReader(opened)
    source = source_tree(reader, left_out, reads.append)
    output = prepare(dict(source) if transform is None else transform(dict(source)))
    _refuse_plain_values(output.common)
    check_output(output.tensors, output.objects)
    unused = unused_elements(source, output.tensors, output.objects, tuple(reads))
    common = HOLE
    if COMMON not in leave_out:
        stored = load_common(opened.checkpoint, None, opened.strategies)
        common = stored if transform_common is None else transform_common(stored)
    batches = batches_of(output.tensors, output.objects, layout, most_bytes)
    listed = (*left_out, *([COMMON] if COMMON in leave_out else []))
    listed_unused = tuple(sorted(unused.items()))
    unchanged = frozenset(shard.key for shard in output.tensors if _went_through(shard, source.get(shard.key)))
    return Plan(reader, output.tensors, output.objects, common, tuple(batches), listed, listed_unused, unchanged)


def _went_through(shard: ShardedTensor, given: Shard | None) -> bool:
    return given is not None and shard.data is given.data and shard.global_shape == given.global_shape


def _refuse_plain_values(rest: Any) -> None:
    plain = [
        f"{render_path(path)}: {type(leaf).__name__}" for path, leaf in leaves_with_paths(rest) if leaf is not HOLE
    ]
    if plain:
        fix = "Give shards alone; what isn't sharded is the common state, which transform_common= changes."
        raise TreeError(error_text("convert: the transform gave what isn't a shard", offenders=plain, fix=fix))
