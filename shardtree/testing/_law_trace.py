"""The laws of traces, for one's own loading code: traced, cut and turned round, it gives what it gives when it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import chain, pairwise

import torch

from ..errors import TraceError
from ..lazy import Box
from ..traces import Trace, localized, trace
from ._bits import first_difference


def check_trace(
    function: Callable[[dict[str, torch.Tensor]], Mapping[str, torch.Tensor]], sources: Mapping[str, torch.Tensor]
) -> Trace:
    """Check the laws of traces for code that loads or converts tensors, and return its trace.

    - *Traced is eager*: evaluated, the trace gives what the code gives, bit for bit.
    - *The same each time*: traced again, it is an equal trace.
    - *Parts are cuts*: what the trace of a box makes, of the boxes of sources that it reads, is that box of the whole.
    - *The way back*: where the trace has an inverse, it gives the sources; its own inverse is the trace.

    Args:
        function: from tensors by name to tensors by name; it may be called several times.
        sources: tensors with data: best with elements that all differ.

    Raises:
        AssertionError: names the law, and says what differs.
        TraceError: the code asks for elements.

    Examples:
        >>> def load(tensors):
        ...     return {"w": torch.cat([tensors["a"], tensors["b"]]).T}
        >>> found = check_trace(load, {"a": torch.arange(6.0).view(2, 3), "b": torch.arange(6.0, 9.0).view(1, 3)})
        >>> found.check()
        ()
    """
    found, eager = trace(function, sources), dict(function(dict(sources)))
    made = found(sources)
    _check_same("traced isn't eager", made, eager)
    if again := found.diff(trace(function, sources)):
        raise AssertionError(f"the code does something else each time: {next(iter(again.values()))[0]}")
    for name, tensor in eager.items():
        for offset, shape in chain.from_iterable(layouts_of(tuple(tensor.shape))):
            local = localized(found, name, offset, shape)
            parts = [_box(sources[root], *box) for root, box in local.boxes]
            what = f"a part isn't a cut of the whole: {shape} at {offset}"
            _check_same(what, {name: local.made(parts)}, {name: _box(tensor, offset, shape)})
    try:
        back = found.inverse()
    except TraceError:
        return found
    kept = {name: made[name] for name in back.sources}
    _check_same("the way back gives other sources", back(kept), {name: sources[name] for name in back.outputs})
    return found


def layouts_of(shape: tuple[int, ...]) -> Iterator[list[Box]]:
    """Yield boxes that make up a tensor: the whole, and its halves and thirds along each axis."""
    zeros = (0,) * len(shape)
    yield [Box(zeros, shape)]
    for axis, size in enumerate(shape):
        for count in (2, 3):
            edges = pairwise([size * number // count for number in range(count + 1)])
            yield [
                Box((*zeros[:axis], low, *zeros[axis + 1 :]), (*shape[:axis], high - low, *shape[axis + 1 :]))
                for low, high in edges
                if low < high
            ]


def _box(tensor: torch.Tensor, offset: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
    return tensor[tuple(slice(low, low + size) for low, size in zip(offset, shape, strict=True))]


def _check_same(what: str, found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    if found.keys() != expected.keys():
        raise AssertionError(f"{what}: {sorted(found)}, not {sorted(expected)}")
    for name, tensor in expected.items():
        if (difference := first_difference(found[name], tensor)) is not None:
            raise AssertionError(f"{what}: {name!r}: {difference}")
