"""The last step of a conversion: check that the destination reads back as what should be there, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import Any

import torch

from ...errors import IntegrityError, error_text, render_path
from ...fingerprints import PartialFingerprint, add_fingerprints, box_part
from ...layouts import TensorKind
from ...lazy import LazyTensor, stored
from ...mapping import ShardedObject, ShardedTensor
from ...plans import grouped
from ...strategies import stored_fingerprints
from ...trees import HOLE, Difference, values_only
from ...world import World, agree, gather, on_rank_zero
from .._differences import ValueDifference, boxes_within, combined, value_difference
from .._fingerprint import in_usual_threads
from .._lazy_tree import OpenCheckpoint
from ..comparison._compare import plain_difference
from ..comparison._values import BoxReader, group_bytes
from ._passage import Passage, passed_fingerprints
from ._plan import Plan
from ._source import StoredObject, expect_tensors
from ._write import deal


@dataclass(slots=True, eq=False)
class FingerprintReader:
    """Reads boxes of a checkpoint, each element once, and adds up their tensors' fingerprints.

    Attributes:
        reader: of the checkpoint.
    """

    reader: BoxReader
    _parts: dict[str, PartialFingerprint] = field(default_factory=dict)

    def whole(self, key: str) -> LazyTensor:
        """Return a tensor whose elements are read through this."""
        known: Any = self.reader.opened.metadata[key]
        kind = TensorKind(known.dtype, known.global_shape, 0)
        return stored(partial(self._read, key, kind), known.global_shape, known.dtype, name=key)

    def take(self) -> dict[str, PartialFingerprint]:
        """Return the fingerprints of what was read since this was called last, by key."""
        taken = dict(self._parts)
        self._parts.clear()
        return taken

    def _read(self, key: str, kind: TensorKind, offset: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
        data = self.reader.read(key, offset, shape)
        part = box_part(kind, data, offset, in_usual_threads)
        before = self._parts.get(key, replace(part, elements=0, total=0))
        total = (before.total + part.total) % 2**64
        self._parts[key] = replace(part, elements=before.elements + part.elements, total=total)
        return data


def whole_fingerprints(
    tensors: Sequence[ShardedTensor], parts: Sequence[Mapping[str, PartialFingerprint]]
) -> dict[str, int]:
    """Return the fingerprints of tensors, given those of pieces that have each element once."""
    kinds = {shard.key: TensorKind(shard.dtype, shard.global_shape, 0) for shard in tensors}
    none = {key: PartialFingerprint(kind, 0, 0) for key, kind in kinds.items()}  # for those without elements
    return add_fingerprints([none, *parts])


@dataclass(frozen=True, slots=True)
class Checked:
    """The results of checking a destination.

    Attributes:
        nbytes: bytes of tensors that were compared with what was to be written, and found equal.
        fingerprints: of the destination's tensors, by key.
    """

    nbytes: int
    fingerprints: dict[str, int]


def check_written(
    opened: Callable[[], OpenCheckpoint],
    plan: Plan,
    passage: Passage,
    most_bytes: int,
    progress: Callable[[int], None],
    world: World,
) -> Checked:
    """Return what was compared with what was to be written, and found equal; every rank calls it.

    Of a tensor whose elements were fingerprinted while they were written, only the destination is read. Of others, and
    where fingerprints differ, the source is read once more and compared bit for bit. A tensor that the transform
    returned unchanged must have the fingerprint that the source stores, if it stores any.

    Args:
        opened: returns the destination, opened again.
        plan: what should be in it, lazily read once more where that is needed.
        passage: has the fingerprints of what this call has written.
        most_bytes: about how much memory the comparison may take.
        progress: called with the bytes that were compared since the last call.
        world: the ranks that share out the bytes.

    Raises:
        IntegrityError: something differs; names every key.
    """

    def begin() -> FingerprintReader:
        written = opened()
        _refuse(_key_problems(written, plan.tensors, plan.objects))
        return FingerprintReader(BoxReader(written))

    # Kinds first, values next: elements of another dtype or shape couldn't be compared.
    reader = agree(world, "convert: look at what was written", begin)
    passed = passed_fingerprints(gather(world, "convert: add up fingerprints", passage.sums))

    def read(tensors: Sequence[ShardedTensor]) -> list[ValueDifference]:
        _read_all(reader, [shard for shard in tensors if shard.key in passed], progress)
        others = [shard for shard in tensors if shard.key not in passed]
        return list(_value_differences(reader, plan.reader, others, most_bytes, progress))

    found = _compared(reader, plan, world, read)
    wrong = {key for key, number in found.items() if number != passed.get(key, number)}
    if wrong:

        def read_again(tensors: Sequence[ShardedTensor]) -> list[ValueDifference]:
            chosen = [shard for shard in tensors if shard.key in wrong]
            return list(_value_differences(reader, plan.reader, chosen, most_bytes, lambda _: None))

        # The source decides: it says which elements differ, and by how much.
        found |= _compared(reader, plan, world, read_again, wrong)
    _refuse(_fingerprint_problems(plan, found))
    _refuse(on_rank_zero(world, "convert: compare the rest", partial(_other_problems, reader.reader.opened, plan)))
    return Checked(sum(shard.data.nbytes for shard in plan.tensors), found)


def _compared(
    reader: FingerprintReader,
    plan: Plan,
    world: World,
    read: Callable[[Sequence[ShardedTensor]], list[ValueDifference]],
    only: AbstractSet[str] | None = None,
) -> dict[str, int]:
    """Return the destination's fingerprints, once all ranks have read their shares and found no difference.

    Args:
        reader: of the destination.
        plan: what should be there.
        world: the ranks.
        read: reads tensors through `reader`, and returns where they differ.
        only: the keys that it reads; None for all.
    """
    differences: list[ValueDifference] = []
    parts: list[dict[str, PartialFingerprint]] = []
    for tensors in _shares(plan, world):
        work = partial(_read_and_taken, reader, read, tensors)
        for found, taken in gather(world, "convert: compare", work):
            differences += found
            parts.append(taken)
    _refuse(map(str, _by_key(differences)))
    return whole_fingerprints([shard for shard in plan.tensors if only is None or shard.key in only], parts)


def _read_and_taken(
    reader: FingerprintReader,
    read: Callable[[Sequence[ShardedTensor]], list[ValueDifference]],
    tensors: Sequence[ShardedTensor],
) -> tuple[list[ValueDifference], dict[str, PartialFingerprint]]:
    return read(tensors), reader.take()


def _shares(plan: Plan, world: World) -> Iterator[Sequence[ShardedTensor]]:
    """Yield what this rank compares, round by round: pieces as they were written, or tensors where it is alone."""
    if world.size == 1:
        yield plan.tensors
        return
    for dealt in deal([(number, batch.nbytes) for number, batch in enumerate(plan.batches)], world.size):
        yield [shard for number in dealt[world.rank] for shard in plan.batches[number].tensors]


def _by_key(found: Sequence[ValueDifference]) -> list[ValueDifference]:
    """Return one difference for each tensor, of which pieces were compared."""
    merged: dict[str, ValueDifference] = {}
    for each in sorted(found, key=lambda each: each.first):
        merged[each.key] = combined(merged[each.key], each) if each.key in merged else each
    return [merged[key] for key in dict.fromkeys(each.key for each in found)]


def _other_problems(written: OpenCheckpoint, plan: Plan) -> list[str]:
    """Return how objects and the common state differ."""
    pairs = [(item.unique_key, _differs(item, written)) for item in plan.objects]
    problems = [f"object {key!r} differs{_where(differs)}" for key, differs in pairs if differs]
    if plan.common is not HOLE:
        # Formats keep values: what shards leave of containers may be there in another form, or not at all.
        differs = plain_difference(values_only(plan.common), values_only(written.common()))
        problems += [f"the common state differs{_where(differs)}"] if differs else []
    return problems


def _read_all(reader: FingerprintReader, tensors: Sequence[ShardedTensor], progress: Callable[[int], None]) -> None:
    most = group_bytes(reader.reader)
    for group in grouped(tensors, lambda shard: shard.data.nbytes, most):
        whole = [_box(reader, shard) for shard in group]
        reader.reader.expect(fetch for box in whole for fetch in box.fetches)
        for box in whole:
            for offset, shape in boxes_within(tuple(box.shape), max(1, most // box.itemsize), f"convert: {box.name!r}"):
                progress(box.read_box(offset, shape).nbytes)


def _value_differences(
    reader: FingerprintReader,
    source: BoxReader,
    tensors: Sequence[ShardedTensor],
    most_bytes: int,
    progress: Callable[[int], None],
) -> Iterator[ValueDifference]:
    most_together = min(most_bytes, max(group_bytes(source), group_bytes(reader.reader)))
    for group in grouped(tensors, lambda shard: shard.data.nbytes, most_together):
        boxes = [_box(reader, shard) for shard in group]
        expect_tensors(source, group)
        reader.reader.expect(fetch for box in boxes for fetch in box.fetches)
        for shard, box in zip(group, boxes, strict=True):
            found = value_difference(shard.key, shard.data, box, most_bytes, progress)
            if found is not None:
                yield _in_whole(found, shard)


def _in_whole(found: ValueDifference, shard: ShardedTensor) -> ValueDifference:
    """Return a piece's difference as one of its tensor."""
    offset = shard.global_offset[shard.prepend_axis_num :]
    before = shard.global_offset[: shard.prepend_axis_num]
    inside = tuple(start + index for start, index in zip(offset, found.first, strict=True))
    return replace(found, first=(*before, *inside), elements=prod(shard.global_shape))


def _fingerprint_problems(plan: Plan, found: Mapping[str, int]) -> list[str]:
    """Return the unchanged tensors whose fingerprint isn't the one that the source stores."""
    # An independent check: comparing reads the source twice in the same way, and would repeat a mistake of that.
    stored = stored_fingerprints(plan.reader.opened.metadata)
    return [
        f"{key!r} has the fingerprint {found[key]:016x}, not {stored[key]:016x} as the source says"
        for key in sorted(plan.unchanged & stored.keys())
        if found[key] != stored[key]
    ]


def _box(reader: FingerprintReader, shard: ShardedTensor) -> LazyTensor:
    whole = reader.whole(shard.key)
    box: LazyTensor = whole if shard.local_shape == shard.global_shape else whole[shard.global_slice()]
    return box


def _refuse(problems: Iterable[str]) -> None:
    listed = list(problems)
    if listed:
        fix = (
            "Don't use the destination: remove it. The medium, or the format's strategy, doesn't keep what it is given."
        )
        what = "convert: the destination isn't what was to be written"
        raise IntegrityError(error_text(what, offenders=listed, fix=fix))


def _key_problems(
    written: OpenCheckpoint, tensors: Sequence[ShardedTensor], objects: Sequence[ShardedObject]
) -> list[str]:
    kinds: dict[str, TensorKind | None] = {
        shard.key: TensorKind(shard.dtype, shard.global_shape, 0) for shard in tensors
    }
    kinds |= {item.unique_key: None for item in objects}
    problems = [f"{key!r} isn't there" for key in kinds if key not in written.metadata]
    problems += [f"{key!r} is there, and shouldn't be" for key in written if key not in kinds]
    for key in [key for key in kinds if key in written.metadata]:
        found = written.metadata[key]
        kind = TensorKind(found.dtype, found.global_shape, 0) if isinstance(found, ShardedTensor) else None
        if kind != kinds[key]:
            problems.append(f"{key!r} is {kind or 'an object'}, not {kinds[key] or 'an object'}")
    return problems


def _differs(item: ShardedObject, written: OpenCheckpoint) -> Difference:
    data = item.data.read() if isinstance(item.data, StoredObject) else item.data
    return plain_difference(data, written[item.unique_key].data)


def _where(difference: Difference) -> str:
    paths = [*difference.only_left, *difference.only_right, *difference.mismatch]
    return f" at {render_path(paths[0], 'data')}" + (f" and {len(paths) - 1} more places" if len(paths) > 1 else "")
