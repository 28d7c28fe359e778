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
MOVES = (
    "transpose",
    "narrow",
    "reshape",
    "cat",
    "stack",
    "split",
    "gather",
    "select",
    "copy",
    "step",
    "flip",
    "expand",
)
ONE_TO_ONE = ("transpose", "reshape", "shuffle", "split", "rejoin", "copy_whole", "widen", "negate")
VALUES = ("widen", "negate", "scale", "add", "round", "exp", "bits", "choose")


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


def _pick(random: Random, pool: list[torch.Tensor]) -> int:
    return random.randrange(len(pool))


def _transpose(random: Random, pool: list[torch.Tensor]) -> None:
    which = _pick(random, pool)
    pool[which] = pool[which].permute(*random.sample(range(pool[which].ndim), pool[which].ndim))


def _narrow(random: Random, pool: list[torch.Tensor]) -> None:
    which = _pick(random, pool)
    one = pool[which]
    dim = random.randrange(one.ndim)
    start = random.randrange(one.shape[dim])
    pool.append(one.narrow(dim, start, random.randint(1, one.shape[dim] - start)))


def _reshape(random: Random, pool: list[torch.Tensor]) -> None:
    which = _pick(random, pool)
    one = pool[which]
    if one.numel() > 1:
        first = random.choice([size for size in range(1, one.numel() + 1) if one.numel() % size == 0])
        pool[which] = one.reshape(first, -1) if random.random() < 0.7 else one.reshape(-1)


def _cat(random: Random, pool: list[torch.Tensor]) -> None:
    one = pool[_pick(random, pool)]
    like = [each for each in pool if each.shape == one.shape and each.dtype == one.dtype]
    pool.append(torch.cat([random.choice(like) for _ in range(random.randint(1, 3))], random.randrange(one.ndim)))


def _stack(random: Random, pool: list[torch.Tensor]) -> None:
    one = pool[_pick(random, pool)]
    like = [each for each in pool if each.shape == one.shape and each.dtype == one.dtype]
    pool.append(torch.stack([random.choice(like) for _ in range(random.randint(1, 3))], random.randint(0, one.ndim)))


def _split(random: Random, pool: list[torch.Tensor]) -> None:
    which = _pick(random, pool)
    one = pool.pop(which)
    pool.extend(one.chunk(random.randint(1, 3), random.randrange(one.ndim)))


def _rejoin(random: Random, pool: list[torch.Tensor]) -> None:
    which = _pick(random, pool)
    one = pool.pop(which).reshape(-1)
    like = [number for number, each in enumerate(pool) if each.dtype == one.dtype]
    pool.append(torch.cat([one, pool.pop(random.choice(like)).reshape(-1)]) if like else one)


def _gather(random: Random, pool: list[torch.Tensor]) -> None:
    one = pool[_pick(random, pool)]
    dim = random.randrange(one.ndim)
    index = torch.tensor([random.randrange(one.shape[dim]) for _ in range(random.randint(1, 6))])
    pool.append(one.index_select(dim, index))


def _shuffle(random: Random, pool: list[torch.Tensor]) -> None:
    which = _pick(random, pool)
    dim = random.randrange(pool[which].ndim)
    order = random.sample(range(pool[which].shape[dim]), pool[which].shape[dim])
    pool[which] = pool[which].index_select(dim, torch.tensor(order))


def _select(random: Random, pool: list[torch.Tensor]) -> None:
    one = pool[_pick(random, pool)]
    dim = random.randrange(one.ndim)
    pool.append(one.select(dim, random.randrange(one.shape[dim])).unsqueeze(0))


def _step(random: Random, pool: list[torch.Tensor]) -> None:
    one = pool[_pick(random, pool)]
    pool.append(one[random.randrange(one.shape[0]) :: random.randint(1, 3)])


def _flip(random: Random, pool: list[torch.Tensor]) -> None:
    one = pool[_pick(random, pool)]
    pool.append(one.flip(random.randrange(one.ndim)))


def _expand(random: Random, pool: list[torch.Tensor]) -> None:
    one = pool[_pick(random, pool)]
    pool.append(one.unsqueeze(0).expand(random.randint(1, 3), *one.shape))


def _copy(random: Random, pool: list[torch.Tensor]) -> None:
    one = pool[_pick(random, pool)]
    new = torch.zeros([size + random.randint(0, 2) for size in one.shape], dtype=one.dtype)
    for _ in range(random.randint(1, 3)):
        part = one[tuple(slice(0, random.randint(1, size)) for size in one.shape)]
        offset = [random.randint(0, size - n) for size, n in zip(new.shape, part.shape, strict=True)]
        new[tuple(slice(low, low + n) for low, n in zip(offset, part.shape, strict=True))].copy_(part)
    pool.append(new)


def _copy_whole(random: Random, pool: list[torch.Tensor]) -> None:
    which = _pick(random, pool)
    new = torch.empty(pool[which].shape, dtype=pool[which].dtype)
    new.copy_(pool[which])
    pool[which] = new


def _value(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Random, list[torch.Tensor]], None]:
    def step(random: Random, pool: list[torch.Tensor]) -> None:
        which = _pick(random, pool)
        pool[which] = function(pool[which])

    return step


def _add(random: Random, pool: list[torch.Tensor]) -> None:
    one = pool[_pick(random, pool)]
    like = [each for each in pool if each.shape == one.shape]
    pool.append(one + random.choice(like))


_STEPS: dict[str, Callable[[Random, list[torch.Tensor]], None]] = {
    "transpose": _transpose,
    "narrow": _narrow,
    "reshape": _reshape,
    "cat": _cat,
    "stack": _stack,
    "split": _split,
    "rejoin": _rejoin,
    "gather": _gather,
    "shuffle": _shuffle,
    "select": _select,
    "copy": _copy,
    "copy_whole": _copy_whole,
    "step": _step,
    "flip": _flip,
    "expand": _expand,
    "add": _add,
    "widen": _value(lambda one: one.to(torch.float64)),
    "negate": _value(torch.neg),
    "scale": _value(lambda one: one * 3),
    "round": _value(lambda one: one.to(torch.bfloat16)),
    "exp": _value(lambda one: (one / 64).exp()),
    "bits": _value(lambda one: one.view(torch.int32).view(torch.float32) if one.dtype is torch.float32 else one),
    "choose": _value(lambda one: torch.where(one > 7, one, -one)),
}


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
