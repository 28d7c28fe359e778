"""The last step of a conversion: check that the destination reads back as it should, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from functools import partial
from math import prod

from ..core.fingerprints import PartialFingerprint, add_fingerprints
from ..core.layouts import TensorKind
from ..core.lazy import LazyTensor
from ..core.mapping import ShardedObject, ShardedTensor
from ..core.plans import grouped
from ..core.trees import HOLE, Difference, values_only
from ..errors import IntegrityError, error_text, render_path
from ..formats import huggingface
from ..inspection import (
    BoxReader,
    OpenCheckpoint,
    ValueDifference,
    boxes_within,
    group_bytes,
    joint_difference,
    plain_difference,
    value_differences,
)
from ..shell.table import stored_fingerprints
from ..shell.world import World, agree, gather, on_rank_zero
from ._passage import Passage, passed_fingerprints
from ._plan import Plan
from ._source import StoredObject
from ._write import deal


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The results of checking a destination.

    Attributes:
        nbytes: Bytes of the tensors verified at the destination.
        fingerprints: Fingerprints of the destination's tensors, by key.
    """

    nbytes: int
    fingerprints: dict[str, int]


def check_destination(
    reopen: Callable[[], OpenCheckpoint],
    plan: Plan,
    passage: Passage,
    most_bytes: int,
    progress: Callable[[int], None],
    world: World,
) -> CheckResult:
    """Compare the destination with the plan, and return the verified bytes and the fingerprints; collective.

    If all elements of a tensor were fingerprinted while they were written, only the destination is read, and the
    fingerprints are compared. Otherwise, or if the fingerprints differ, the source is read once more and compared bit
    for bit. A tensor that the transform returned unchanged must have the fingerprint that the source stores, if it
    stores one.

    Args:
        reopen: Function that opens the destination again.
        plan: Plan of the conversion; tensors of the source are read once more if needed.
        passage: Fingerprints of the elements that this rank has written during this call of `convert`.
        most_bytes: Approximate bound of the comparison's memory.
        progress: Callback with the bytes compared since its last call.
        world: World of the ranks that share the bytes.

    Raises:
        IntegrityError: The destination differs; the error names every key.
    """

    def begin() -> BoxReader:
        destination = reopen()
        _refuse(_key_problems(destination, plan.tensors, plan.objects))
        return BoxReader(destination)

    # Dtypes and shapes are compared first, since elements of other dtypes or shapes couldn't be compared.
    reader = agree(world, "convert: look at what was written", begin)
    fingerprints = passed_fingerprints(gather(world, "convert: add up fingerprints", passage.sums))

    def read(tensors: Sequence[ShardedTensor], readback: Passage) -> list[ValueDifference]:
        _read_all(reader, [shard for shard in tensors if shard.key in fingerprints], readback, progress)
        others = [shard for shard in tensors if shard.key not in fingerprints]
        return _value_differences(plan.reader, reader, others, readback, most_bytes, progress)

    numbers = _read_shares(plan, world, read)
    wrong = {key for key, number in numbers.items() if number != fingerprints.get(key, number)}
    if wrong:

        def read_again(tensors: Sequence[ShardedTensor], readback: Passage) -> list[ValueDifference]:
            shards = [shard for shard in tensors if shard.key in wrong]
            return _value_differences(plan.reader, reader, shards, readback, most_bytes, lambda _: None)

        # A comparison with the source shows which elements differ, and by how much.
        numbers |= _read_shares(plan, world, read_again, wrong)
    _refuse(_fingerprint_problems(plan, numbers))
    _refuse(on_rank_zero(world, "convert: compare the rest", partial(_other_problems, reader.tree, plan)))
    return CheckResult(sum(shard.data.nbytes for shard in plan.tensors), numbers)


def _read_shares(
    plan: Plan,
    world: World,
    read: Callable[[Sequence[ShardedTensor], Passage], list[ValueDifference]],
    only: AbstractSet[str] | None = None,
) -> dict[str, int]:
    """Read the destination on all ranks, and return its fingerprints by key; raise if a rank finds a difference.

    Args:
        plan: Plan of the conversion.
        world: World of the ranks that share the tensors.
        read: Function that reads tensors and returns their differences; its `Passage` collects their fingerprints.
        only: Keys to read; None for all.
    """
    differences, readback = list[ValueDifference](), Passage(0, has_sums=True)
    for tensors in _shares(plan, world):
        for part in gather(world, "convert: compare", partial(read, tensors, readback)):
            differences += part
    _refuse(map(str, _by_key(differences)))
    parts = gather(world, "convert: add up what was read", readback.sums)
    shards = [shard for shard in plan.tensors if only is None or shard.key in only]
    kinds = {shard.key: TensorKind(shard.dtype, shard.global_shape, 0) for shard in shards}
    none = {key: PartialFingerprint(kind, 0, 0) for key, kind in kinds.items()}  # for tensors without elements
    return add_fingerprints([none, *parts])


def _shares(plan: Plan, world: World) -> Iterator[Sequence[ShardedTensor]]:
    """Yield the shards that this rank compares, a group at a time.

    Several ranks compare the batches of pieces that they wrote; a single rank compares all tensors whole.
    """
    if world.size == 1:
        yield plan.tensors
        return
    for hands in deal([(number, batch.nbytes) for number, batch in enumerate(plan.batches)], world.size):
        yield [shard for number in hands[world.rank] for shard in plan.batches[number].tensors]


def _by_key(differences: Sequence[ValueDifference]) -> list[ValueDifference]:
    """Return one difference for each tensor, joined from the differences of its pieces."""
    by_key: dict[str, ValueDifference] = {}
    for each in sorted(differences, key=lambda each: each.first):
        by_key[each.key] = joint_difference(by_key[each.key], each) if each.key in by_key else each
    return [by_key[key] for key in dict.fromkeys(each.key for each in differences)]


def _other_problems(destination: OpenCheckpoint, plan: Plan) -> list[str]:
    """Return a line for each object that differs from the plan, and a line if the common state differs."""
    pairs = [(item.unique_key, _differs(item, destination)) for item in plan.objects]
    problems = [f"object {key!r} differs{_where(differs)}" for key, differs in pairs if differs]
    if plan.common is not HOLE:
        # Only values are compared: a format may change or drop empty containers of shards.
        there, expected = destination.common(), huggingface.without_framework(plan.common)
        differs = plain_difference(values_only(expected), values_only(huggingface.without_framework(there)))
        problems += [f"the common state differs{_where(differs)}"] if differs else []
    return problems


def _read_all(
    reader: BoxReader, tensors: Sequence[ShardedTensor], readback: Passage, progress: Callable[[int], None]
) -> None:
    most = group_bytes(reader)
    for group in grouped(tensors, lambda shard: shard.data.nbytes, most):
        boxes = [_box(reader, shard, readback) for shard in group]
        reader.expect(boxes)
        for box in boxes:
            for offset, shape in boxes_within(tuple(box.shape), max(1, most // box.itemsize), f"convert: {box.name!r}"):
                progress(box.read_box(offset, shape).nbytes)
    reader.check()


def _value_differences(
    source: BoxReader,
    reader: BoxReader,
    tensors: Sequence[ShardedTensor],
    readback: Passage,
    most_bytes: int,
    progress: Callable[[int], None],
) -> list[ValueDifference]:
    pairs = ((shard.key, shard.data, _box(reader, shard, readback)) for shard in tensors)
    differences = value_differences(pairs, source, reader, most_bytes, progress)
    return [_in_whole(one, shard) for one, shard in zip(differences, tensors, strict=True) if one is not None]


def _in_whole(difference: ValueDifference, shard: ShardedTensor) -> ValueDifference:
    """Return a piece's difference with `first` as an index in the whole tensor, and `elements` as its size."""
    offset = shard.global_offset[shard.prepend_axis_num :]
    before = shard.global_offset[: shard.prepend_axis_num]
    inside = tuple(start + index for start, index in zip(offset, difference.first, strict=True))
    return replace(difference, first=(*before, *inside), elements=prod(shard.global_shape))


def _fingerprint_problems(plan: Plan, numbers: Mapping[str, int]) -> list[str]:
    """Return a line for each unchanged tensor whose fingerprint differs from the one stored in the source."""
    # This check doesn't read the source's elements, so it also finds mistakes that every read of them would repeat.
    source_numbers = stored_fingerprints(plan.reader.tree.metadata)
    return [
        f"{key!r} has the fingerprint {numbers[key]:016x}, not {source_numbers[key]:016x} as the source says"
        for key in sorted(plan.unchanged_keys & source_numbers.keys())
        if numbers[key] != source_numbers[key]
    ]


def _box(reader: BoxReader, shard: ShardedTensor, readback: Passage) -> LazyTensor:
    """Return the destination's elements for a shard as a lazy tensor; reads of it are fingerprinted by `readback`."""
    whole = reader.whole(shard.key)
    box = whole if shard.local_shape == shard.global_shape else whole[shard.global_slice()]
    data: LazyTensor = readback.watch(replace(shard, data=box)).data
    return data


def _refuse(problems: Iterable[str]) -> None:
    lines = list(problems)
    if lines:
        fix = "Do not use the destination: its storage, or the format's save function, does not keep the written bytes."
        fix += "\n  Convert to another storage, or with another save function."
        heading = "convert: the destination differs from what was to be written"
        raise IntegrityError(error_text(heading, offenders=lines, fix=fix))


def _key_problems(
    destination: OpenCheckpoint, tensors: Sequence[ShardedTensor], objects: Sequence[ShardedObject]
) -> list[str]:
    kinds: dict[str, TensorKind | None] = {
        shard.key: TensorKind(shard.dtype, shard.global_shape, 0) for shard in tensors
    }
    kinds |= {item.unique_key: None for item in objects}
    problems = [f"{key!r} is missing" for key in kinds if key not in destination.metadata]
    problems += [f"{key!r} is there, but not in the output" for key in destination if key not in kinds]
    for key in [key for key in kinds if key in destination.metadata]:
        entry = destination.metadata[key]
        kind = TensorKind(entry.dtype, entry.global_shape, 0) if isinstance(entry, ShardedTensor) else None
        if kind != kinds[key]:
            problems.append(f"{key!r} is {kind or 'an object'}, not {kinds[key] or 'an object'}")
    return problems


def _differs(item: ShardedObject, destination: OpenCheckpoint) -> Difference:
    data = item.data.read() if isinstance(item.data, StoredObject) else item.data
    return plain_difference(data, destination[item.unique_key].data)


def _where(difference: Difference) -> str:
    paths = [*difference.only_left, *difference.only_right, *difference.mismatch]
    return f" at {render_path(paths[0], 'data')}" + (f" and {len(paths) - 1} more places" if len(paths) > 1 else "")
