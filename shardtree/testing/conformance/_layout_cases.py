"""Cases about layouts: each kind in a few plain cases, saved in one layout and loaded in others; and random ones."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from random import Random

import torch
from hypothesis import Phase, find, settings
from hypothesis import strategies as st
from hypothesis.errors import NoSuchExample

from ...shell.table import StrategyAction
from .._layouts import Layout, Piece, even_layout
from .._states import GlobalState, state_layouts
from .._tensors import shapes, tensors
from ._subject import Case, Promise, Refused, Subject, check_reloaded

SHAPE = (4, 6)
LOADS = frozenset({StrategyAction.LOAD_SHARDED})


def numbers(shape: tuple[int, ...], first: int = 0) -> torch.Tensor:
    """Return float32 numbers that count up from ``first + 1``: none is 0, since unfilled memory may hold zeros.

    Examples:
        >>> numbers((3,), 10)
        tensor([11., 12., 13.])
    """
    return torch.arange(first + 1, first + 1 + math.prod(shape), dtype=torch.float32, device="cpu").reshape(shape)


def in_ranges(layout: Layout, *, parts: int = 2) -> Layout:
    """Return a layout in which each box is cut into `parts` flat ranges on separate ranks, as with ZeRO.

    Examples:
        >>> [piece.flat for piece in in_ranges(even_layout((4,), 1, 0)).pieces]
        [(0, 1), (1, 4)]
    """
    pieces = []
    for piece in layout.pieces:
        volume = math.prod(piece.shape)
        # Ranges end one element before an even cut: ranges that end where rows do are the easy case.
        edges = [0, *(volume * part // parts - 1 for part in range(1, parts)), volume]
        for part in range(parts):
            flat = (max(edges[part], 0), max(edges[part + 1], 0))
            pieces.append(replace(piece, rank=piece.rank * parts + part, flat=flat))
    return Layout(layout.ranks * parts, layout.global_shape, tuple(pieces), layout.prepended, layout.grid)


def boxes(ranks: int, shape: tuple[int, ...], *pieces: tuple[int, tuple[int, ...], tuple[int, ...]]) -> Layout:
    """Return a layout of boxes that don't form a regular grid, each given as (rank, offset, shape)."""
    return Layout(ranks, shape, tuple(Piece(*piece) for piece in pieces))


WHOLE, ROWS, COLUMNS = even_layout(SHAPE, 1, 0), even_layout(SHAPE, 2, 0), even_layout(SHAPE, 3, 1)
GRID = Layout(4, SHAPE, tuple(Piece(2 * i + j, (2 * i, 3 * j), (2, 3)) for i in (0, 1) for j in (0, 1)), grid=(2, 2))
UNEVEN = boxes(2, SHAPE, (0, (0, 0), (1, 6)), (1, (1, 0), (3, 6)))
IRREGULAR = boxes(3, SHAPE, (0, (0, 0), (4, 2)), (1, (0, 2), (1, 4)), (2, (1, 2), (3, 4)))
SEVERAL = boxes(2, SHAPE, (0, (0, 0), (2, 3)), (1, (0, 3), (2, 3)), (1, (2, 0), (2, 3)), (0, (2, 3), (2, 3)))
EMPTY = boxes(3, SHAPE, (0, (0, 0), (4, 6)), (1, (4, 0), (0, 6)), (2, (4, 0), (0, 6)))
FLAT_ROWS, FLAT_COLUMNS, FLAT_WHOLE = in_ranges(ROWS), in_ranges(COLUMNS), in_ranges(WHOLE, parts=3)
LAYERS = Layout(2, SHAPE, tuple(Piece(row % 2, (row, 0), (1, 6)) for row in range(4)), 1, (4, 1))
HALF_LAYERS = Layout(
    2, SHAPE, tuple(Piece(column // 3, (row, column), (1, 3)) for row in range(4) for column in (0, 3)), 1, (4, 2)
)
COPIES = even_layout(SHAPE, 3)
ROWS_TWICE = Layout(
    4,
    SHAPE,
    tuple(Piece(2 * row + n, (2 * row, 0), (2, 6), replica=(0, 0, n)) for row in (0, 1) for n in (1, 0)),
    0,
    (2, 1),
)
FLAT_TWICE = Layout(
    4, SHAPE, tuple(Piece(2 * n + part, (0, 0), SHAPE, ((0, 11), (11, 24))[part], n) for n in (0, 1) for part in (0, 1))
)
IDLE = replace(ROWS, ranks=3)

Pairs = Mapping[str, tuple[Layout, Layout]]

# Each case saves in one layout and loads in another: with the same layout twice, many wrong descriptions pass.
REGULAR: Pairs = {
    "whole on 1 rank": (WHOLE, WHOLE),
    "2 ranks' rows": (ROWS, ROWS),
    "2 ranks' rows, loaded whole": (ROWS, WHOLE),
    "whole, loaded as 2 ranks' rows": (WHOLE, ROWS),
    "2 ranks' rows, loaded as 3 ranks' columns": (ROWS, COLUMNS),
    "3 ranks' columns, loaded as a grid on 4": (COLUMNS, GRID),
    "a grid on 4 ranks, loaded as 2 ranks' rows": (GRID, ROWS),
}
IRREGULARS: Pairs = {
    "2 ranks' uneven rows, loaded whole": (UNEVEN, WHOLE),
    "3 boxes of no grid, loaded whole": (IRREGULAR, WHOLE),
    "2 boxes on each rank, loaded as rows": (SEVERAL, ROWS),
    "3 boxes of no grid, loaded as uneven rows": (IRREGULAR, UNEVEN),
    "columns, loaded as 3 boxes of no grid": (COLUMNS, IRREGULAR),
    "a rank without shards, loaded as columns": (IDLE, COLUMNS),
}
FLAT: Pairs = {
    "whole, loaded as 3 flat ranges": (WHOLE, FLAT_WHOLE),
    "3 flat ranges, loaded whole": (FLAT_WHOLE, WHOLE),
    "flat ranges of rows, loaded as columns": (FLAT_ROWS, COLUMNS),
    "flat ranges of columns, loaded as rows": (FLAT_COLUMNS, ROWS),
    "flat ranges of rows, loaded as flat ranges of columns": (FLAT_ROWS, FLAT_COLUMNS),
    "flat ranges with replicas, loaded as 3 flat ranges": (FLAT_TWICE, FLAT_WHOLE),
}
PREPENDED: Pairs = {
    "4 layers on 2 ranks, loaded whole": (LAYERS, WHOLE),
    "rows, loaded as 4 layers": (ROWS, LAYERS),
    "4 layers, each cut in two, loaded as 4 layers": (HALF_LAYERS, LAYERS),
    "flat ranges of layers, loaded as rows": (in_ranges(LAYERS), ROWS),
}
REPLICAS: Pairs = {
    "3 replicas, loaded whole": (COPIES, WHOLE),
    "whole, loaded as 3 replicas": (WHOLE, COPIES),
    "rows with 2 replicas each, loaded as columns": (ROWS_TWICE, COLUMNS),
    "columns, loaded as rows with 2 replicas each": (COLUMNS, ROWS_TWICE),
}
SCALAR, SCALARS = even_layout((), 1), even_layout((), 3)
SCALAR_CASES: Pairs = {"on 1 rank": (SCALAR, SCALAR), "3 replicas, loaded on 1 rank": (SCALARS, SCALAR)}
# Zero-size chunks must be stored too: without them the tensor's shape would be lost.
NOTHING, NO_ROWS = even_layout((0,), 1, 0), even_layout((0, 4), 2, 1)
ZERO_SIZE: Pairs = {
    "a tensor without elements": (NOTHING, NOTHING),
    "a tensor without rows, cut in columns": (NO_ROWS, even_layout((0, 4), 1)),
    "one rank has all of a tensor, two have none": (EMPTY, WHOLE),
    "whole, loaded where two ranks have none": (WHOLE, EMPTY),
    "an empty flat range": (
        Layout(2, SHAPE, (Piece(0, (0, 0), SHAPE, (0, 0)), Piece(1, (0, 0), SHAPE, (0, 24)))),
        WHOLE,
    ),
}

# Ranks of two digits, whose names sort differently from their numbers; many axes; and more bytes than a block of 256
# KiB or a buffer of 1 MiB, with a length that is a multiple of neither.
_TWELVE, _AXES, _LONG = (12, 2), (2,) * 8, (300_002,)
LARGE: Pairs = {
    "12 ranks' rows, loaded whole": (even_layout(_TWELVE, 12, 0), even_layout(_TWELVE, 1)),
    "whole, loaded as 12 ranks' rows": (even_layout(_TWELVE, 1), even_layout(_TWELVE, 12, 0)),
    "8 axes, cut in two": (even_layout(_AXES, 2, 3), even_layout(_AXES, 2, 6)),
    "more than a megabyte, cut in two": (even_layout(_LONG, 2, 0), even_layout(_LONG, 1)),
}


def of_pairs(pairs: Pairs, count: int, subject: Subject) -> Iterator[Case]:
    """Yield a round trip of one tensor for each pair (layout of the save, layout of the load).

    A format may refuse pairs that it can't represent, except the first `count`.
    """
    for number, (name, (save_layout, load_layout)) in enumerate(pairs.items()):
        state = GlobalState({"w": numbers(save_layout.global_shape)}, {}, {})
        check = partial(check_reloaded, subject, state, {"w": save_layout}, {"w": load_layout})
        yield Case(name, check, number < count)


def several_tensors(subject: Subject) -> Iterator[Case]:
    """Yield states of several tensors of the same shape, which a backend could mix up without an error."""
    # Not in alphabetical order, and one key is a prefix of another.
    whole = {key: numbers(SHAPE, 100 * number) for number, key in enumerate(("b", "a", "a.b"))}
    state = GlobalState(whole, {}, {})

    def case(name: str, save_layouts: tuple[Layout, ...], load_layouts: tuple[Layout, ...]) -> Case:
        layouts = [dict(zip(whole, of_keys, strict=True)) for of_keys in (save_layouts, load_layouts)]
        return Case(name, partial(check_reloaded, subject, state, *layouts), name.startswith("all"))

    rows, on_3 = (ROWS, ROWS, ROWS), (COLUMNS, IRREGULAR, COPIES)
    yield case("all of 3 tensors whole", (WHOLE, WHOLE, WHOLE), (WHOLE, WHOLE, WHOLE))
    yield case("all of 3 tensors cut in rows, loaded whole", rows, (WHOLE, WHOLE, WHOLE))
    yield case("each of 3 tensors cut in its own way, loaded as rows", on_3, rows)


def replicas(subject: Subject) -> Iterator[Case]:
    """Yield replicated tensors, alone and several at once, whose writes are shared between ranks."""
    yield from of_pairs(REPLICAS, 2, subject)
    state = GlobalState({key: numbers(SHAPE, 100 * number) for number, key in enumerate("abc")}, {}, {})
    for name, layout in (("3 tensors, 3 replicas each", COPIES), ("3 tensors' rows, 2 replicas each", ROWS_TWICE)):
        layouts = (dict.fromkeys("abc", layout), dict.fromkeys("abc", WHOLE))
        yield Case(f"{name}, loaded whole", partial(check_reloaded, subject, state, *layouts))


PROMISES = (
    Promise("regular layouts come back", LOADS, partial(of_pairs, REGULAR, 7)),
    Promise("many ranks, axes and elements come back", LOADS, partial(of_pairs, LARGE, 0)),
    Promise("several tensors come back, each as itself", LOADS, several_tensors),
    Promise("replicas come back", LOADS, replicas),
    Promise("scalars come back", LOADS, partial(of_pairs, SCALAR_CASES, 0)),
    Promise("shards without elements come back", LOADS, partial(of_pairs, ZERO_SIZE, 0)),
    Promise("irregular layouts come back", LOADS, partial(of_pairs, IRREGULARS, 0)),
    Promise("prepended axes come back", LOADS, partial(of_pairs, PREPENDED, 0)),
    Promise("flat ranges come back", LOADS, partial(of_pairs, FLAT, 1)),
)


# Random states in random layouts find faults that the plain cases miss; failures are shrunk.


@dataclass(frozen=True, slots=True, eq=False)
class Reload:
    """A state, and the layouts in which it is saved and loaded."""

    state: GlobalState
    save_layout: dict[str, Layout]
    load_layout: dict[str, Layout]


@st.composite
def reloads(draw: st.DrawFn) -> Reload:
    """Return a strategy for states of one or two tensors, saved on 1 to 4 ranks and loaded on 1 to 4."""
    mappings = st.dictionaries(st.sampled_from(["w", "a.w"]), tensors(shapes(max_axes=3)), min_size=1, max_size=2)
    state = GlobalState(draw(mappings), {}, {})
    save_layout, load_layout = (draw(state_layouts(state, draw(st.integers(1, 4)))) for _ in range(2))
    return Reload(state, save_layout, load_layout)


def states(subject: Subject) -> Iterator[Case]:
    """Yield one case that tries random states in random layouts; no case if `examples` is 0."""
    if subject.examples:
        yield Case(f"{subject.examples} random states", partial(_check_random, subject))


def _check_random(subject: Subject) -> None:
    # With a fixed seed and no database the same states are tried each time, in other people's test suites too.
    options = settings(
        max_examples=subject.examples, deadline=None, database=None, phases=[Phase.generate, Phase.shrink]
    )
    with suppress(NoSuchExample):
        worst = find(reloads(), lambda case: _failure(subject, case) is not None, settings=options, random=Random(0))
        if (error := _failure(subject, worst)) is not None:
            text = (
                f"{type(error).__name__}: {error}\n{worst.state}\nsaved {worst.save_layout}\nloaded {worst.load_layout}"
            )
            raise AssertionError(text) from error


def _failure(subject: Subject, case: Reload) -> Exception | None:
    """Return the error that a case raises; None if it passes or the format refuses it."""
    try:
        check_reloaded(subject, case.state, case.save_layout, case.load_layout)
    except Refused:
        return None
    except Exception as error:
        return error
    return None


RANDOM = (Promise("random states come back in random layouts", LOADS, states),)
