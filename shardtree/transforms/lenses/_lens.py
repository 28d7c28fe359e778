"""A lens: a pure function from a box that a model holds to the boxes that are stored, with the way back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, TypeAlias

from ...errors import MetadataError
from ...geometry import refuse
from ...mapping import ShardedTensor


@dataclass(frozen=True, slots=True, eq=False)
class Built:
    """What a lens makes of one box.

    Attributes:
        shards: what is stored, boxes; their data are views of the given data where they can be, None where it is None.
        merge: takes tensors of exactly these boxes, in order, and returns the tensor of the given box.
    """

    shards: tuple[ShardedTensor, ...]
    merge: Callable[[Sequence[Any]], Any]


Lens: TypeAlias = Callable[[ShardedTensor], Built]
"""A function from a box of a tensor, as the model holds it, to what is stored of it.

Where an element is stored may depend on the tensor's global shape and the lens's own parameters, never on how the
tensor is cut. So boxes, flat ranges, optimizer states and other numbers of ranks all meet in the same stored tensors.
The given shard is a box; it may lack prepended axes, which axis numbers don't count.

References:
    J. N. Foster et al., Combinators for bidirectional tree transformations, TOPLAS 29(3), 2007; `jax.vjp` for the form.
"""


def compose_factories(*lenses: Lens) -> Lens:
    """Return the lens that goes through all of these: the first sees what the model holds, the last what is stored.

    Without any, it is the lens that changes nothing.

    Raises:
        MetadataError: one of them isn't a function.

    Examples:
        >>> import torch
        >>> from shardtree.transforms import transposed
        >>> twice = compose_factories(transposed(), transposed())
        >>> built = twice(ShardedTensor.from_rank_offsets("w", torch.zeros(2, 3), (0, 1, 2)))
        >>> built.shards[0].global_offset
        (2, 0)
        >>> built.merge([torch.ones(2, 3)]).shape
        torch.Size([2, 3])
    """
    for number, lens in enumerate(lenses):
        check_function("compose_factories", f"lenses[{number}]", lens)
    return lambda shard: _through(lenses, shard)


def check_function(doing: str, field: str, lens: object) -> None:
    """Raise unless a lens is a function.

    Raises:
        MetadataError: it isn't.
    """
    if not callable(lens):
        fix = "Pass what `gate_and_up(...)`, `transposed()` or another such function returns."
        refuse(doing, field, type(lens).__name__, "a lens", fix, error=MetadataError)


def built_by(lens: Lens, shard: ShardedTensor) -> Built:
    """Return what a lens, of whoever's making, gives for a box.

    Raises:
        MetadataError: it gives something else.
    """
    built = lens(shard)
    if not isinstance(built, Built):
        fix = "Let the lens return Built(shards, merge)."
        refuse(f"a lens, of {shard.key!r}", "result", type(built).__name__, "a Built", fix, error=MetadataError)
    return built


def _through(lenses: Sequence[Lens], shard: ShardedTensor) -> Built:
    if not lenses:
        return Built((shard,), lambda parts: parts[0])
    first = built_by(lenses[0], shard)
    rest = [_through(lenses[1:], part) for part in first.shards]

    def merge(parts: Sequence[Any]) -> Any:
        left = iter(parts)
        return first.merge([each.merge(list(islice(left, len(each.shards)))) for each in rest])

    return Built(tuple(chain.from_iterable(each.shards for each in rest)), merge)
