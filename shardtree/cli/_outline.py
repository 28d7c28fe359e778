"""Trees as indented rows: a checkpoint's keys, in which layers that are alike are one row, and its common state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ._contents import TensorRow, brief, cut_text, entries_of, fields_of, kind_of, shape_text
from ._output import Heading, size

KEYS = (
    Heading("key", style="bold"),
    Heading("tensors", right=True),
    Heading("dtype", style="cyan"),
    Heading("shape", right=True),
    Heading("cut", right=True, style="yellow"),
    Heading("size", right=True, style="green"),
)
COMMON = (Heading("common state", style="bold"), Heading("type", style="cyan"), Heading("value"))

_DEEPEST = 64  # levels that are shown as such: keys and values come from files, and may have any number
_INDENT = "  "
_WIDEST = 24  # characters of a row's key, so that all columns fit an ordinary terminal


@dataclass(slots=True)
class _Node:
    row: TensorRow | None = None
    inner: dict[str, _Node] = field(default_factory=dict)
    count: int = 0
    length: int = 0


def key_rows(tensors: Sequence[TensorRow]) -> list[tuple[str, ...]]:
    """Return keys, taken apart at their dots, as rows of `KEYS`; numbered neighbours that are alike are one row.

    Examples:
        >>> rows = [TensorRow(f"layers.{n}.w", "float32", (2, 3), 24, None) for n in range(3)]
        >>> [cells[0] for cells in key_rows(rows)]
        ['layers.0-2', '  w']
    """
    root = _Node()
    for row in tensors:
        node = root
        for part in row.key.split(".", _DEEPEST):
            node = node.inner.setdefault(part, _Node())
            node.count, node.length = node.count + 1, node.length + row.length
        node.row = row
    return list(_rows(root, 0))


def _rows(node: _Node, depth: int) -> Iterator[tuple[str, ...]]:
    for names, one in _groups(node.inner):
        label = _INDENT * depth + _range(names)
        # What holds nothing but one entry shares its row, as long as that stays narrow. Layers don't: below them stands
        # what one of them has.
        while len(names) == 1 and one.row is None and len(inner := _groups(one.inner)) == 1:
            longer = f"{label}.{_range(inner[0][0])}"
            if len(longer) > _WIDEST:
                break
            label, ((names, one),) = longer, inner
        if one.row is not None:
            alike, grid = f"{len(names):,}" if len(names) > 1 else "", cut_text(one.row.grid)
            yield label, alike, one.row.dtype, shape_text(one.row.shape), grid, size(one.row.length * len(names))
        if one.inner:
            times = f"{len(names)} \N{MULTIPLICATION SIGN} " if len(names) > 1 else ""
            yield label, f"{times}{one.count:,}", "", "", "", size(one.length * len(names))
            yield from _rows(one, depth + 1)


def _range(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]}-{names[-1]}"


def _groups(inner: Mapping[str, _Node]) -> list[tuple[list[str], _Node]]:
    """Return the entries in order, numbers by value; neighbours by number that are alike are one entry."""
    groups: list[tuple[list[str], _Node]] = []
    last: tuple[Any, ...] | None = None
    for name in sorted(inner, key=lambda name: (True, int(name), name) if _is_number(name) else (False, 0, name)):
        node = inner[name]
        outline = _outline(node) if _is_number(name) else None
        if outline is not None and outline == last and int(groups[-1][0][-1]) + 1 == int(name):
            groups[-1][0].append(name)
        else:
            groups.append(([name], node))
        last = outline
    return groups


def _is_number(name: str) -> bool:
    return name.isascii() and name.isdecimal() and len(name) < 10


def _outline(node: _Node) -> tuple[Any, ...]:
    """Return what layers that are alike have in common."""
    row = node.row
    own = None if row is None else (row.dtype, row.shape, cut_text(row.grid))
    return own, tuple((name, _outline(one)) for name, one in sorted(node.inner.items()))


def common_rows(common: Any) -> Iterator[tuple[str, str, str]]:
    """Yield every value of a common state as rows of `COMMON`, those within others indented.

    Examples:
        >>> list(common_rows({"args": {"lr": 0.1, "betas": (0.9, 0.95)}}))
        [('args', 'dict', '2 entries: lr, betas'), ('  lr', 'float', '0.1'), ('  betas', 'tuple', '(0.9, 0.95)')]
    """
    yield from _values(entries_of(common), 0)


def _values(entries: Mapping[str, Any], depth: int) -> Iterator[tuple[str, str, str]]:
    for name, value in entries.items():
        short = _short_list(value)
        yield _INDENT * depth + name, kind_of(value), brief(value) if short is None else short
        if short is None and depth < _DEEPEST:
            inner = entries_of(value) if isinstance(value, list | tuple) else fields_of(value)
            yield from _values(inner or {}, depth + 1)


def _short_list(value: Any) -> str | None:
    """Return a list of a few numbers as Python writes it; None for anything else."""
    if not isinstance(value, list | tuple) or len(value) > 8:
        return None
    if any(type(one) not in (int, float, bool) or (type(one) is int and one.bit_length() > 64) for one in value):
        return None
    return repr(value)
