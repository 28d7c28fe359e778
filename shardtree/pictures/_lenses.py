"""Pictures of lenses and factories: which rows of what ranks hold are which rows of what is stored."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
import torch

from ..errors import ShapeError, error_text, plural, printable
from ..geometry import Column
from ..lenses import Lens
from ..mapping import ShardedTensor, ShardedTensorFactory
from ..trees import shard_leaves
from ._picture import TONES, Block, Flow, Picture, Stream

_MOST_ELEMENTS = 1 << 22
"""Of what a rank holds: each is followed to where it is stored."""
MOST_STREAMS = 64


def lens_picture(lens: Lens, shards: Sequence[ShardedTensor]) -> Picture:
    """Return the picture of which rows go where by a lens.

    Args:
        lens: from what ranks hold to what is stored.
        shards: what ranks hold, with data or without, beginning with rank 0's.

    Raises:
        ShapeError: there is none, or one has more than four million elements.

    Examples:
        >>> from shardtree.lenses import gate_and_up
        >>> import torch
        >>> held = [ShardedTensor.from_rank_offsets("w", torch.zeros(4, 2), (0, rank, 2)) for rank in range(2)]
        >>> (flow,) = lens_picture(gate_and_up(tensor_parallel=2), held).rows[0]
        >>> [stream.title for stream in flow.streams][:2]
        ['rank 0 [0:2] is w[0:2]', 'rank 0 [2:4] is w[4:6]']
    """
    if not shards:
        raise ShapeError(
            error_text("draw: no shard to show a lens with", fix="Pass what a rank holds: draw(lens, shard).")
        )
    names = [f"rank {rank}" if len(shards) > 1 else shards[0].key for rank in range(len(shards))]
    helds = [_held(name, shard.local_shape, _stored_by(lens, shard)) for name, shard in zip(names, shards, strict=True)]
    return _flow_picture(f"{shards[0].key!r} {shards[0].global_shape}: held and stored", helds)


def factory_picture(factory: ShardedTensorFactory) -> Picture:
    """Return the picture of which rows of a factory's tensor are stored where.

    Raises:
        ShapeError: it has no data, or of more than four million elements.

    Examples:
        >>> from shardtree.lenses import as_factory, transposed
        >>> import torch
        >>> factory = as_factory(ShardedTensor.from_rank_offsets("w", torch.zeros(4, 2)), transposed())
        >>> (flow,) = factory_picture(factory).rows[0]
        >>> [stream.title for stream in flow.streams]
        ['w [0:4] is w[:, 0:4]']
    """
    shape = getattr(factory.data, "shape", None)
    if shape is None:
        raise ShapeError(
            error_text(f"draw: the factory of {factory.key!r} has no tensor", fix="Give it one on 'meta'.")
        )

    def build(numbers: torch.Tensor) -> list[ShardedTensor]:
        return [
            leaf for leaf in shard_leaves(replace(factory, data=numbers).build()) if isinstance(leaf, ShardedTensor)
        ]

    return _flow_picture(f"{factory.key!r} {tuple(shape)}: held and stored", [_held(factory.key, tuple(shape), build)])


def _stored_by(lens: Lens, shard: ShardedTensor) -> Callable[[torch.Tensor], Sequence[ShardedTensor]]:
    return lambda numbers: lens(replace(shard, data=numbers, dtype=numbers.dtype)).shards


@dataclass(frozen=True, slots=True, eq=False)
class _Held:
    """What one rank holds, and where each element is stored.

    Attributes:
        name: of the rank.
        shape: of the tensor.
        stored: the shards.
        shard: which of them has each element, -1 for none, int64 (elements,).
        place: where in the global tensor, right-aligned, int64 (elements, axes).
    """

    name: str
    shape: tuple[int, ...]
    stored: Sequence[ShardedTensor]
    shard: Column
    place: Column


def _held(name: str, shape: tuple[int, ...], build: Callable[[torch.Tensor], Sequence[ShardedTensor]]) -> _Held:
    """Return where elements are stored: they are numbered, and the numbers found again in what a lens makes of them."""
    count = prod(shape)
    if count > _MOST_ELEMENTS:
        found, fix = f"{count:,} elements", "Draw it with a smaller tensor: the lens does the same to that."
        raise ShapeError(error_text("draw: too large to follow each element", found=found, fix=fix))
    stored = build(torch.arange(count, device="cpu").reshape(shape))
    axes = max([1, *(len(one.global_shape) for one in stored)])
    shard, place = np.full(count, -1, dtype=np.int64), np.zeros((count, axes), dtype=np.int64)
    for number, one in enumerate(stored):
        local = (1,) * one.prepend_axis_num + one.local_shape
        numbers = one.data.reshape(-1).numpy()
        own = np.flatnonzero((numbers >= 0) & (numbers < count))
        where = np.stack(np.unravel_index(own, local or (1,)), axis=1) + np.array(one.global_offset or (0,))
        shard[numbers[own]] = number
        place[numbers[own], axes - where.shape[1] :] = where
    return _Held(name, shape or (1,), stored, shard, place)


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive rows that stay together.

    Attributes:
        held: the number of the block on the left.
        start: the first row.
        rows: how many.
        target: the key, the axis and the place along the other axes; None for rows that have no partner.
        to_start: the first row there.
        what: what is said of those without a partner; of others, what they go through besides.
    """

    held: int
    start: int
    rows: int
    target: tuple[str, int, tuple[Any, ...]] | None
    to_start: int
    what: str = ""


def _flow_picture(title: str, helds: Sequence[_Held]) -> Picture:
    axes = range(min(len(each.shape) for each in helds))
    by_axis = [[run for number, held in enumerate(helds) for run in _runs(number, held, axis)] for axis in axes]
    # Rows are those of the axis along which most is moved.
    axis = max(axes, key=lambda each: (len(by_axis[each]), -each))
    shapes = {one.key: one.global_shape for held in helds for one in held.stored}
    blocks = [Block(held.name, held.shape[axis]) for held in helds]
    what = {0: "rows", 1: "columns"}.get(axis, f"axis {axis}")
    caption = f"{what} of what is held, in runs that stay together"
    return flow_picture(title, ("held", "stored"), blocks, by_axis[axis], shapes, caption)


def flow_picture(
    title: str,
    headings: tuple[str, str],
    blocks: Sequence[Block],
    runs: Sequence[Run],
    shapes: dict[str, tuple[int, ...]],
    caption: str,
) -> Picture:
    """Return the picture of which rows of blocks are which rows of tensors.

    Args:
        title: of the picture.
        headings: above both sides.
        blocks: the left side.
        runs: of their rows.
        shapes: of the tensors on the right side, by key.
        caption: below.
    """
    targets = {run.target: None for run in runs if run.target is not None}
    ordered = sorted(targets, key=lambda target: (list(shapes).index(target[0]), target[1:]))
    number = {target: place for place, target in enumerate(ordered)}
    shared = {key for key, *_ in ordered if sum(each[0] == key for each in ordered) > 1}
    names = [_name(target, shapes, is_one=target[0] not in shared) for target in ordered]
    to_blocks = tuple(Block(name, shapes[target[0]][target[1]]) for name, target in zip(names, ordered, strict=True))
    streams = tuple(_stream(run, place, blocks, number, names) for place, run in enumerate(runs[:MOST_STREAMS]))
    left = len(runs) - MOST_STREAMS
    notes = (f"And {plural(left, 'run')} of rows more.",) if left > 0 else ()
    flow = Flow(*headings, tuple(blocks), to_blocks, streams, caption)
    return Picture(title, ((flow,),), notes)


def _stream(
    run: Run,
    place: int,
    blocks: Sequence[Block],
    number: dict[tuple[str, int, tuple[Any, ...]], int],
    names: Sequence[str],
) -> Stream:
    label = f"{run.start}:{run.start + run.rows}"
    held = _with_rows(blocks[run.held].name, label, " ")
    if run.target is None:
        return Stream(run.held, run.start, run.rows, -1, 0, "none", f"{held} {run.what}", f"{label} {run.what}")
    to = number[run.target]
    to_label = held if len(blocks) > 1 else label
    title = f"{held} is {_with_rows(names[to], f'{run.to_start}:{run.to_start + run.rows}')}{run.what}"
    return Stream(run.held, run.start, run.rows, to, run.to_start, f"t{place % TONES}", title, label, to_label)


def _name(target: tuple[str, int, tuple[Any, ...]], shapes: dict[str, tuple[int, ...]], *, is_one: bool) -> str:
    """Return a stored tensor's name, with the place of its rows where they aren't those of axis 0."""
    key, axis, others = target
    free = iter(":" if is_one and isinstance(each, int) else str(each) for each in others)
    shown = ["rows" if each == axis else next(free) for each in range(len(shapes[key]))]
    return key if shown[0] == "rows" and set(shown[1:]) <= {":"} else f"{key}[{', '.join(shown)}]"


def _with_rows(name: str, span: str, apart: str = "") -> str:
    """Return a block's name with the rows of a run in it."""
    head, bracket, place = name.rpartition("[")
    has_place = bracket and "rows" in place.rstrip("]").split(", ")
    return printable(f"{head}[{place.replace('rows', span)}" if has_place else f"{name}{apart}[{span}]")


def _runs(number: int, held: _Held, axis: int) -> Iterator[Run]:
    """Yield the runs of a rank's rows along an axis, by the first element of each row."""
    if not prod(held.shape):
        return
    stride = prod(held.shape[axis + 1 :])
    first = np.arange(held.shape[axis]) * stride
    shard, place = held.shard[first], held.place[first]
    step = np.diff(place, axis=0)
    moved = np.abs(step).sum(axis=1)
    # Rows stay together where exactly one coordinate grows by one, in the same tensor.
    along = np.where((moved == 1) & (step.max(axis=1, initial=0) == 1), step.argmax(axis=1), -1)
    together = (shard[1:] == shard[:-1]) & ((along >= 0) | (shard[1:] < 0))
    together[1:] &= (along[1:] == along[:-1]) | (shard[2:] < 0) | ~together[:-1]
    starts = [0, *(np.flatnonzero(~together) + 1).tolist(), len(first)]
    for low, high in itertools.pairwise(starts):
        if shard[low] < 0:
            yield Run(number, low, high - low, None, 0, "isn't stored")
            continue
        one = held.stored[int(shard[low])]
        where = place[low, place.shape[1] - max(len(one.global_shape), 1) :].tolist()
        own = max(int(along[low]) - (place.shape[1] - len(where)), 0) if high - low > 1 else min(axis, len(where) - 1)
        others = tuple(where[:own] + where[own + 1 :])
        yield Run(number, low, high - low, (one.key, own, others), where[own])
