"""Traces as text. Each side of a move (`Move`) is an index expression with named loops, like the axes in einops."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from ..core.lazy import dense
from ..errors import plural
from ._fields import Fields
from ._moves import Loop, Move, rolled
from ._steps import Constant, via_text

_SHOWN = 16
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def trace_text(trace: Fields) -> str:
    """Return a trace's printed form, with a limited number of moves for each output."""
    lines = [f"trace: {plural(len(trace.sources), 'source')} -> {plural(len(trace.outputs), 'output')}"]
    for name, kind in trace.outputs.items():
        if name in trace.tied:
            lines.append(f"  {name}: {kind} is {trace.tied[name]}")
            continue
        lines.append(f"  {name}: {kind} =")
        moves = rolled(trace.moves[name])
        lines += [f"    {move_text(move, kind.shape, trace.root_shape(move))}" for move in moves[:_SHOWN]]
        lines += [f"    and {len(moves) - _SHOWN} more moves"] if len(moves) > _SHOWN else []
        lines += ["    nothing"] if not moves and kind.numel else []
    return "\n".join(lines)


def move_text(move: Move, shape: tuple[int, ...], root: tuple[int, ...]) -> str:
    """Return a move as text: an assignment of elements of the root, the tensor that is read, to those of an output.

    Args:
        move: Move from a root to an output.
        shape: Shape of the output.
        root: Shape of the root.

    Examples:
        >>> move_text(Move("w", 0, 0, ((2, 4, 1), (4, 1, 2))), (2, 4), (4, 2))
        '[a, b] = w[b, a]  (a=2 b=4)'
    """
    loops = factored(move, shape, root)
    names = [_LETTERS[number % 26] for number in range(len(loops))]
    into = _side(move.to, [(count, to, name) for (count, to, _), name in zip(loops, names, strict=True)], shape)
    read = _side(move.at, [(count, at, name) for (count, _, at), name in zip(loops, names, strict=True)], root)
    is_one = isinstance(move.root, Constant) and move.root.value.numel() == 1
    source = f"{move.root}[{read}]" if isinstance(move.root, str) else str(move.root)
    source += "" if is_one or isinstance(move.root, str) or move.last + 1 == move.numel else f"[{read}]"
    sizes = " ".join(f"{name}={count}" for (count, _, _), name in zip(loops, names, strict=True))
    return f"[{into}] = {via_text(source, move.via)}" + (f"  ({sizes})" if sizes else "")


def factored(move: Move, shape: tuple[int, ...], root: tuple[int, ...]) -> list[Loop]:
    """Return a move's loops, cut where they cross an axis's end in the output or in the root, as far as possible.

    Args:
        move: Move from a root to an output.
        shape: Shape of the output.
        root: Shape of the root.
    """
    loops = list(move.loops)
    # By the output's axes first, then by the root's: a loop that crosses both is cut twice.
    for side, steps in ((1, dense(shape).stride), (2, dense(root).stride)):
        new: list[Loop] = []
        for count, to, at in loops:
            stride = (to, at)[side - 1]
            for step in steps:
                inner = step // stride if stride else 0
                if 1 < inner < count and step % stride == 0 and count % inner == 0:
                    new.append((count // inner, to * inner, at * inner))
                    count = inner
            new.append((count, to, at))
        loops = new
    return loops


def _side(place: int, loops: Sequence[tuple[int, int, str]], shape: tuple[int, ...]) -> str:
    """Return a move's indices in its root or its output as an expression, such as ``2:+a, (b c), 0``.

    Each axis has an index, a loop's name, or several names in parentheses; ``2:+a`` is loop ``a`` from index 2 on.

    Args:
        place: Flat index of the first element.
        loops: Loops as (count, step, name).
        shape: Shape of the tensor.
    """
    texts = []
    for axis, step in enumerate(dense(shape).stride):
        low, place = divmod(place, step) if step else (0, place)
        factors = [(count, stride // step, name) for count, stride, name in loops if axis_of(stride, shape) == axis]
        # From the innermost: contiguous factors, such as (a b), need no steps beside them.
        expected, is_dense = 1, True
        for count, stride, _ in reversed(factors):
            is_dense, expected = is_dense and stride == expected, stride * count
        names = " ".join(name if is_dense else f"{name}*{stride}" for _, stride, name in factors)
        names = f"({names})" if len(factors) > 1 else names
        is_whole = is_dense and not low and prod([count for count, _, _ in factors]) == shape[axis]
        texts.append(str(low) if not factors else names if is_whole else f"{low}:+{names}")
    return ", ".join(texts)


def axis_of(step: int, shape: tuple[int, ...]) -> int:
    """Return the axis along which adding `step` to a flat index moves; the number of axes if there is none."""
    strides = dense(shape).stride
    return next((axis for axis, stride in enumerate(strides) if 0 < stride <= step and shape[axis] > 1), len(shape))


def places_text(moves: Sequence[Move], shape: tuple[int, ...], shown: int = 3) -> str:
    """Return the elements that moves write, as text: slices of the tensor.

    Elements that no slice describes are given by the first and last flat index.

    Args:
        moves: Moves into the flat tensor.
        shape: Shape of the tensor.
        shown: Number of moves that are shown; the text ends with the number of the others.

    Examples:
        >>> places_text([Move(None, 4, 0, ((2, 4, 1), (2, 1, 1)))], (4, 4))
        '[1:3, 0:2]'
    """
    listed = rolled(moves)
    texts = [_place_text(move, shape) for move in listed[:shown]]
    return ", ".join(texts) + (f" and {len(listed) - shown} more" if len(listed) > shown else "")


def _place_text(move: Move, shape: tuple[int, ...]) -> str:
    if not shape:
        return "the scalar"
    axes, loops, place = [], factored(move, shape, shape), move.to
    for axis, step in enumerate(dense(shape).stride):
        low, place = divmod(place, step) if step else (0, place)
        factors = [(count, stride // step) for count, stride, _ in loops if axis_of(stride, shape) == axis]
        length = 1 + sum((count - 1) * stride for count, stride in factors)
        by = factors[0][1] if len(factors) == 1 else 1
        # Two factors that leave gaps are no slice.
        if len(factors) > 1 and length != prod([count for count, _ in factors]):
            return f"{plural(move.numel, 'element')} from {move.to} to {move.end} of the flat tensor"
        axes.append(f"{low}:{low + length}{f':{by}' if by > 1 else ''}" if length > 1 else str(low))
    return f"[{', '.join(axes)}]"
