"""Random indices of every form that torch takes, and what may be done with them."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import torch

Index = tuple[Any, ...]


def _numbers(random: Random, size: int, shape: tuple[int, ...], *, once: bool = False) -> torch.Tensor:
    """Return positions along an axis, some counted from its end."""
    count = int(torch.tensor(shape).prod())
    positions = random.sample(range(size), count) if once else [random.randrange(size) for _ in range(count)]
    signed = [each - size if random.random() < 0.2 else each for each in positions]
    dtype = random.choice([torch.int64, torch.int64, torch.int32])
    return torch.tensor(signed, dtype=dtype).reshape(shape)


def _mask(random: Random, shape: tuple[int, ...]) -> torch.Tensor:
    density = random.choice([0.0, 0.3, 0.7, 1.0])
    kept = [random.random() < density for _ in range(int(torch.tensor(shape).prod()))]
    return torch.tensor(kept, dtype=torch.bool).reshape(shape)


def _tensor_or_mask(random: Random, shape: tuple[int, ...], inner: tuple[int, ...]) -> tuple[Any, int]:
    """Return an index that is a tensor, and how many axes it takes."""
    if random.random() < 0.6:
        return _numbers(random, shape[0], random.choice([inner, inner, ()])), 1
    count = random.randint(1, len(shape))
    mask = _mask(random, shape[:count])
    return (mask.to(torch.uint8) if random.random() < 0.15 else mask), count


def _one_index(random: Random, shape: tuple[int, ...], inner: tuple[int, ...]) -> tuple[Any, int]:
    """Return what may stand in an index before these axes, and how many of them it takes."""
    size = shape[0]
    return random.choice(
        [
            lambda: (random.randrange(-size, size), 1),
            lambda: (slice(random.randint(0, size), random.randint(0, size), random.randint(1, 3)), 1),
            lambda: (slice(None), 1),
            lambda: (None, 0),
            lambda: (random.choice([True, False, torch.tensor(True)]), 0),
            lambda: (_numbers(random, size, inner or (1,)).tolist(), 1),
            *[lambda: _tensor_or_mask(random, shape, inner)] * 5,
        ]
    )()


def index_of(random: Random, shape: tuple[int, ...]) -> Index:
    """Return an index of a tensor: numbers, slices, None, Ellipsis, tensors that broadcast, masks of several axes."""
    if random.random() < 0.15:
        return (_mask(random, shape[: random.randint(1, len(shape))]),)
    inner = random.choice([(), (1,), (2,), (2,), (3,), (2, 1), (1, 2), (2, 2), (0,)])
    left = shape if random.random() < 0.6 else shape[: random.randint(0, len(shape))]
    index, after = list[Any](), len(left) < len(shape) and random.random() < 0.5
    while left and len(index) < 7:
        one, count = _one_index(random, left, inner)
        index, left = [*index, one], left[count:]
    return (*index, Ellipsis) if after else tuple(index)


Value = Callable[[tuple[int, ...], torch.Tensor], Any]


def value_of(random: Random) -> Value:
    """Return a function that makes something to write to elements of a shape, of a tensor's elements."""

    def part(shape: tuple[int, ...], source: torch.Tensor) -> torch.Tensor:
        count = int(torch.tensor(shape).prod())
        flat = source.reshape(-1)
        return flat.repeat(-(-count // flat.numel()))[:count].reshape(shape)

    kept, number = random.randint(0, 3), random.choice([0, -0.0, 7, float("nan")])
    return random.choice(
        [
            lambda shape, source: number,
            lambda shape, source: source.reshape(-1)[0],
            lambda shape, source: source.reshape(-1)[:1] * 2,
            lambda shape, source: torch.tensor(-0.0),
            lambda shape, source: torch.arange(float(int(torch.tensor(shape).prod()))).reshape(shape),
            part,
            part,
            lambda shape, source: part(shape[kept:], source),
            lambda shape, source: part(tuple(1 if axis == kept else size for axis, size in enumerate(shape)), source),
        ]
    )


def read(random: Random) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return a function that takes elements of its first tensor by an index."""
    seed = random.random()

    def run(tensor: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        draw = Random(seed)
        dim, size = _axis(draw, tensor)
        form = draw.randrange(8)
        if form == 0:
            return tensor.index_select(dim, _numbers(draw, size, (3,)).abs() % size)
        if form == 1:
            return tensor.gather(dim, _along(draw, tensor, dim, once=False))
        if form == 2:
            return tensor.take(_numbers(draw, tensor.numel(), draw.choice([(3,), (2, 2), ()])).long())
        if form == 3:
            return tensor.masked_select(_mask(draw, tuple(tensor.shape[draw.randint(0, tensor.ndim) :])))
        return tensor[index_of(draw, tuple(tensor.shape))]

    return run


def _axis(random: Random, tensor: torch.Tensor) -> tuple[int, int]:
    dim = random.randrange(-tensor.ndim, tensor.ndim)
    return dim, tensor.shape[dim]


def _along(random: Random, tensor: torch.Tensor, dim: int, *, once: bool) -> torch.Tensor:
    """Return an index for ``gather`` and ``scatter``, which have one of its own for each other axis."""
    sizes = list(tensor.shape)
    sizes[dim] = random.randint(1, sizes[dim]) if once else 3
    lines = [
        random.sample(range(tensor.shape[dim]), sizes[dim])
        if once
        else [random.randrange(tensor.shape[dim]) for _ in range(sizes[dim])]
        for _ in range(int(torch.tensor(sizes).prod()) // sizes[dim])
    ]
    others = [size for axis, size in enumerate(sizes) if axis != dim % tensor.ndim]
    return torch.tensor(lines).reshape(*others, sizes[dim]).movedim(-1, dim)


def write(random: Random) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return a function that writes to its first tensor by an index, elements of the second among other values."""
    seed, makes = random.random(), value_of(random)

    def by_index(draw: Random, tensor: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        index = index_of(draw, tuple(tensor.shape))
        shape = tuple(torch.empty(tensor.shape)[index].shape)
        if draw.random() < 0.2:
            tensor[index] += 1
        else:
            tensor[index] = makes(shape, source)
        return tensor

    def run(tensor: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        draw = Random(seed)
        dim, size = _axis(draw, tensor)
        once = draw.random() < 0.7
        rows = _numbers(draw, size, (draw.randint(1, size) if once else 3,), once=once) % size
        picked = tuple(len(rows) if axis == dim % tensor.ndim else length for axis, length in enumerate(tensor.shape))
        mask = _mask(draw, tuple(tensor.shape[draw.randint(0, tensor.ndim) :]))
        along = _along(draw, tensor, dim, once=once)
        flat = _numbers(draw, tensor.numel(), (min(3, tensor.numel()),), once=once).long()
        in_place = draw.choice(["", "_"])
        value: Any = lambda shape: makes(tuple(shape), source)  # noqa: E731
        number = value(())
        number = number.reshape(-1)[0] if isinstance(number, torch.Tensor) else number
        full: Any = lambda shape: source.reshape(-1).repeat(64)[: int(torch.tensor(shape).prod())].reshape(shape)  # noqa: E731
        calls: list[tuple[str, tuple[Any, ...]]] = [
            ("masked_fill", (mask, number)),
            ("masked_scatter", (mask, full(tensor.shape))),
            ("scatter", (dim, along, full(tensor.shape) if draw.random() < 0.7 else 5.0)),
            ("scatter_add", (dim, along, full(tensor.shape))),
            ("index_fill", (dim, rows.long(), number)),
            ("index_copy", (dim, rows.long(), full(picked))),
            ("index_add", (dim, rows, full(picked))),
            ("put", (flat, full(flat.shape), draw.random() < 0.3)),
            ("index_put", ((rows.long(),), full((len(rows), *tensor.shape[1:])), draw.random() < 0.3)),
        ]
        if draw.random() < 0.5:
            return by_index(draw, tensor, source)
        name, args = draw.choice(calls)
        result: torch.Tensor = getattr(tensor, name + in_place)(*args)
        return result

    return run
