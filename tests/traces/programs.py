"""Random programs of what loaders do to tensors, run on tensors and traced; and places of moves, counted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain
from random import Random
from typing import Any

import numpy as np
import torch

from shardtree.traces._moves import Move

Tensors = dict[str, torch.Tensor]


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bits: 0.0 isn't -0.0, and NaN equals itself."""
    flat = tensor.resolve_conj().resolve_neg().reshape(-1).clone(memory_format=torch.contiguous_format)
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8).reshape(*tensor.shape, tensor.itemsize)


def places(move: Move, side: int) -> np.ndarray[Any, Any]:
    """Return the place of each element on one side: 0 of the destination, 1 of the root."""
    found = np.array([(move.to, move.at)[side]])
    for loop in move.loops:
        found = (found[:, None] + np.arange(loop[0])[None] * loop[1 + side]).reshape(-1)
    return found


def shape_of(random: Random, least: int = 1) -> tuple[int, ...]:
    return tuple(random.randint(1, 5) for _ in range(random.randint(least, 3)))


def given(random: Random, dtype: torch.dtype = torch.float32) -> Tensors:
    """Return a few tensors, all elements of which differ."""
    found, start = {}, 1
    for name in "abc"[: random.randint(1, 3)]:
        shape = shape_of(random)
        count = int(np.prod(shape))
        found[name] = torch.arange(start, start + count).to(dtype).reshape(shape)
        start += count
    return found


Pool = list[torch.Tensor]
Step = Callable[[Random, Pool], None]


def _replaced(change: Callable[[Random, torch.Tensor], torch.Tensor]) -> Step:
    """Return a step that puts another tensor in a tensor's place."""

    def step(random: Random, pool: Pool) -> None:
        which = random.randrange(len(pool))
        pool[which] = change(random, pool[which])

    return step


def _added(make: Callable[[Random, torch.Tensor, int], torch.Tensor]) -> Step:
    """Return a step that adds a tensor made of another one along one of its dimensions."""

    def step(random: Random, pool: Pool) -> None:
        one = random.choice(pool)
        pool.append(make(random, one, random.randrange(one.ndim)))

    return step


def _value(function: Callable[[torch.Tensor], torch.Tensor]) -> Step:
    return _replaced(lambda _, one: function(one))


def _joined(join: Callable[[Pool, int], torch.Tensor], more: int = 0) -> Step:
    """Return a step that joins tensors of one kind."""

    def step(random: Random, pool: Pool) -> None:
        one = random.choice(pool)
        like = [each for each in pool if each.shape == one.shape and each.dtype == one.dtype]
        pool.append(join([random.choice(like) for _ in range(random.randint(1, 3))], random.randrange(one.ndim + more)))

    return step


def _narrow(random: Random, one: torch.Tensor, dim: int) -> torch.Tensor:
    start = random.randrange(one.shape[dim])
    return one.narrow(dim, start, random.randint(1, one.shape[dim] - start))


def _gather(random: Random, one: torch.Tensor, dim: int) -> torch.Tensor:
    index = [random.randrange(one.shape[dim]) for _ in range(random.randint(1, 6))]
    return one.index_select(dim, torch.tensor(index))


def _copy(random: Random, one: torch.Tensor, dim: int) -> torch.Tensor:
    new = torch.zeros([size + random.randint(0, 2) for size in one.shape], dtype=one.dtype)
    for _ in range(random.randint(1, 3)):
        part = one[tuple(slice(0, random.randint(1, size)) for size in one.shape)]
        offset = [random.randint(0, size - n) for size, n in zip(new.shape, part.shape, strict=True)]
        new[tuple(slice(low, low + n) for low, n in zip(offset, part.shape, strict=True))].copy_(part)
    return new


def _reshape(random: Random, one: torch.Tensor) -> torch.Tensor:
    first = random.choice([size for size in range(1, one.numel() + 1) if one.numel() % size == 0])
    return one.reshape(first, -1) if random.random() < 0.7 else one.reshape(-1)


def _shuffle(random: Random, one: torch.Tensor) -> torch.Tensor:
    dim = random.randrange(one.ndim)
    return one.index_select(dim, torch.tensor(random.sample(range(one.shape[dim]), one.shape[dim])))


def _split(random: Random, pool: Pool) -> None:
    one = pool.pop(random.randrange(len(pool)))
    pool.extend(one.chunk(random.randint(1, 3), random.randrange(one.ndim)))


def _rejoin(random: Random, pool: Pool) -> None:
    one = pool.pop(random.randrange(len(pool))).reshape(-1)
    like = [number for number, each in enumerate(pool) if each.dtype == one.dtype]
    pool.append(torch.cat([one, pool.pop(random.choice(like)).reshape(-1)]) if like else one)


def _add(random: Random, pool: Pool) -> None:
    one = random.choice(pool)
    pool.append(one + random.choice([each for each in pool if each.shape == one.shape]))


def _write(random: Random, one: torch.Tensor) -> torch.Tensor:
    """Return a tensor in which elements that a mask of some axes picks are in reverse order, or are all one of them."""
    new, axes = one.clone(), random.randint(1, one.ndim)
    mask = torch.tensor([random.random() < 0.5 for _ in range(one.shape[:axes].numel())]).reshape(one.shape[:axes])
    new[mask] = one[mask].flip(0) if random.random() < 0.7 else one.reshape(-1)[random.randrange(one.numel())]
    return new


def _scale(random: Random, one: torch.Tensor, _: int) -> torch.Tensor:
    """Return a tensor by a scale without axes, beside the scale: it is computed with, and used twice."""
    scale = one.reshape(-1)[random.randrange(one.numel())] / 64
    scale = random.choice([scale, -scale, scale * torch.tensor(0.5, dtype=torch.float64), scale * scale])
    return torch.stack([(one * scale).to(one.dtype), scale.expand(one.shape).to(one.dtype)])


_MOVING: dict[str, Step] = {
    "transpose": _replaced(lambda random, one: one.permute(*random.sample(range(one.ndim), one.ndim))),
    "narrow": _added(_narrow),
    "reshape": _replaced(_reshape),
    "cat": _joined(torch.cat),
    "stack": _joined(torch.stack, 1),
    "split": _split,
    "gather": _added(_gather),
    "select": _added(lambda random, one, dim: one.select(dim, random.randrange(one.shape[dim])).unsqueeze(0)),
    "copy": _added(_copy),
    "step": _added(lambda random, one, _: one[random.randrange(one.shape[0]) :: random.randint(1, 3)]),
    "flip": _added(lambda _, one, dim: one.flip(dim)),
    "write": _replaced(_write),
    "expand": _added(lambda random, one, _: one.unsqueeze(0).expand(random.randint(1, 3), *one.shape)),
}
_COMPUTING: dict[str, Step] = {
    "widen": _value(lambda one: one.to(torch.float64)),
    "negate": _value(torch.neg),
    "scale": _value(lambda one: one * 3),
    "add": _add,
    "round": _value(lambda one: one.to(torch.bfloat16)),
    "exp": _value(lambda one: (one / 64).exp()),
    "bits": _value(lambda one: one.view(torch.int32).view(torch.float32) if one.dtype is torch.float32 else one),
    "scale_by_one": _added(_scale),
    "choose": _value(lambda one: torch.where(one > 7, one, -one)),
}
_STEPS = {
    **_MOVING,
    **_COMPUTING,
    "rejoin": _rejoin,
    "shuffle": _replaced(_shuffle),
    "copy_whole": _value(lambda one: torch.empty(one.shape, dtype=one.dtype).copy_(one)),
}
MOVES, VALUES = tuple(_MOVING), tuple(_COMPUTING)
ONE_TO_ONE = ("transpose", "reshape", "shuffle", "split", "rejoin", "copy_whole", "widen", "negate")


def program(
    seed: int, steps: tuple[str, ...] = MOVES, count: int = 6
) -> Callable[[Mapping[str, torch.Tensor]], Tensors]:
    """Return a function of tensors that does the same steps to all tensors of the same shapes."""

    def run(tensors: Mapping[str, torch.Tensor]) -> Tensors:
        random, pool = Random(seed), list(tensors.values())
        for _ in range(random.randint(1, count)):
            step = random.choice(steps)
            _STEPS[step](random, pool)
        if steps is ONE_TO_ONE or random.random() < 0.3:
            chosen = pool
        else:
            chosen = random.sample(pool, random.randint(1, len(pool)))
        return {f"out{number}": each for number, each in enumerate(chosen)}

    return run


def box_of(random: Random, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    offset = tuple(random.randrange(size) if size else 0 for size in shape)
    return offset, tuple(random.randint(1, size - low) if size else 0 for size, low in zip(shape, offset, strict=True))


def cut(tensor: torch.Tensor, box: tuple[tuple[int, ...], tuple[int, ...]]) -> torch.Tensor:
    return tensor[tuple(slice(low, low + size) for low, size in zip(*box, strict=True))]


def random_view(random: Random, numel: int) -> tuple[int, list[tuple[int, int]]]:
    """Return the first place and the loops (count, step) of a view of flat elements that has none twice."""
    while True:
        below, loops = 1, list[tuple[int, int]]()
        for _ in range(random.randint(1, 3)):
            step = below * random.randint(1, 3)
            count = random.randint(1, 5)
            loops.append((count, step))
            below = step * count
        span = sum((count - 1) * step for count, step in loops)
        if span < numel:
            return random.randint(0, numel - 1 - span), loops[::-1]


def all_places(moves: Any, side: int) -> list[int]:
    return sorted(chain.from_iterable(places(move, side).tolist() for move in moves))
