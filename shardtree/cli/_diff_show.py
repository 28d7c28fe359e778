"""How `shardtree diff` shows a difference: tables for people, a document for programs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.text import Text

from ..checkpoint import CheckpointDifference, OpenCheckpoint, ValueDifference
from ..codec import dtype_name
from ..errors import TreePath, plural, render_path
from ..layouts import TensorKind
from ..trees import Difference, Record
from ._brief import brief, kind_of, plain
from ._contents import Contents
from ._output import printable, spellable
from ._table import Heading, show_table
from ._units import size

_VALUES = (
    Heading("other values", style="bold"),
    Heading("differ", right=True, style="yellow"),
    Heading("of", right=True),
    Heading("by at most", right=True),
    Heading("first at", right=True),
    Heading("A", right=True, style="red"),
    Heading("B", right=True, style="green"),
)


@dataclass(frozen=True, slots=True)
class Side:
    """One of two checkpoints.

    Attributes:
        where: the checkpoint, as it was named.
        tree: the checkpoint.
        contents: what of it was compared.
    """

    where: str
    tree: OpenCheckpoint
    contents: Contents


@dataclass(frozen=True, slots=True)
class Compared:
    """Two checkpoints, and where they differ.

    Attributes:
        left: the left one.
        right: the right one.
        difference: where they differ.
        only_structure: whether values weren't looked at.
        is_selection: whether only some keys were looked at, and no common state.
    """

    left: Side
    right: Side
    difference: CheckpointDifference
    only_structure: bool
    is_selection: bool


def show_difference(console: Console, compared: Compared) -> None:
    """Print where two checkpoints differ, a table for each kind of difference, and a line that sums it up."""
    found = compared.difference
    _show_only(console, "A", found.only_left, compared.left.contents)
    _show_only(console, "B", found.only_right, compared.right.contents)
    kinds = [(each.key, _kind(each.left), _kind(each.right)) for each in found.kinds]
    _show_pairs(console, "other dtype or shape", kinds)
    if found.values:
        show_table(console, _VALUES, [_value_cells(each) for each in found.values])
        console.print()
    for unique_key, difference in found.objects.items():
        sides = [side.tree[unique_key].data for side in (compared.left, compared.right)]
        _show_pairs(console, "other object", list(_places(unique_key, difference, *sides)))
    if found.common:
        sides = [side.tree.common() for side in (compared.left, compared.right)]
        _show_pairs(console, "other common state", list(_places("common", found.common, *sides)))
    mark, colour = ("✗ ", "bold red") if found else ("✓ ", "bold green")
    console.print(Text.assemble((spellable(console)(mark), colour), printable(_summary(compared))))


def document(compared: Compared) -> dict[str, Any]:
    """Return what docs/command-line.md describes."""
    found = compared.difference
    return {
        "left": compared.left.where,
        "right": compared.right.where,
        "equal": not found,
        "bytes_compared": found.nbytes,
        "only_left": list(found.only_left),
        "only_right": list(found.only_right),
        "kinds": [{"key": each.key, "left": _shown(each.left), "right": _shown(each.right)} for each in found.kinds],
        "values": [_value_record(each) for each in found.values],
        "objects": [{"unique_key": key, **_paths(difference)} for key, difference in found.objects.items()],
        "common": _paths(found.common),
    }


def value_at(tree: Any, path: TreePath) -> Any:
    """Return what a path of a difference leads to, through the fields of values that have some.

    Examples:
        >>> from argparse import Namespace
        >>> value_at({"args": Namespace(lr=[0.1])}, ("args", "lr", 0))
        0.1
    """
    for entry in path:
        if isinstance(tree, Record):
            tree = tree.type_name if entry == "" else tree.fields[entry]
        elif isinstance(tree, Mapping | list | tuple):
            tree = tree[entry]
        else:
            tree = getattr(tree, entry)
    return tree


def _show_only(console: Console, name: str, keys: tuple[str, ...], contents: Contents) -> None:
    if not keys:
        return
    rows = {row.key: f"{row.dtype} {row.shape}" for row in contents.tensors}
    style = {"A": "red", "B": "green"}[name]
    headings = (Heading(f"only in {name}", style=f"bold {style}"), Heading(""))
    show_table(console, headings, [(key, rows.get(key, "object")) for key in keys])
    console.print()


def _show_pairs(console: Console, name: str, rows: list[tuple[str, str, str]]) -> None:
    if rows:
        headings = (Heading(name, style="bold"), Heading("A", style="red"), Heading("B", style="green"))
        show_table(console, headings, rows)
        console.print()


def _value_cells(found: ValueDifference) -> tuple[str, ...]:
    left, right = (f"{side:.9g}" if isinstance(side, float) else str(side) for side in (found.left, found.right))
    if left == right:
        left, right = repr(found.left), repr(found.right)
    largest = f"{found.largest:.3g}" if isinstance(found.largest, float) else str(found.largest or "")
    return found.key, f"{found.count:,}", f"{found.elements:,}", largest, str(found.first), left, right


def _places(root: str, found: Difference, left: Any, right: Any) -> Iterator[tuple[str, str, str]]:
    yield from ((render_path(path, root), _brief(left, path), "") for path in found.only_left)
    yield from ((render_path(path, root), "", _brief(right, path)) for path in found.only_right)
    yield from ((render_path(path, root), _brief(left, path), _brief(right, path)) for path in found.mismatch)


def _brief(tree: Any, path: TreePath) -> str:
    try:
        value = value_at(tree, path)
    except (LookupError, AttributeError, TypeError):
        return "?"
    return brief(value) or kind_of(value)


def _summary(compared: Compared) -> str:
    found, sides = compared.difference, f"{compared.left.where} and {compared.right.where}"
    if not found:
        return f"{sides} {_equality(compared)}"
    common = sum(map(len, (found.common.only_left, found.common.only_right, found.common.mismatch)))
    counts = {
        f"{plural(len(found.only_left), 'key')} only in A": found.only_left,
        f"{plural(len(found.only_right), 'key')} only in B": found.only_right,
        f"{plural(len(found.kinds), 'tensor')} of another dtype or shape": found.kinds,
        f"{plural(len(found.values), 'tensor')} with other values": found.values,
        f"{plural(len(found.objects), 'object')} with other values": found.objects,
        f"the common state in {plural(common, 'place')}": found.common,
    }
    return f"{sides} differ: " + ", ".join(words for words, there in counts.items() if there)


def _equality(compared: Compared) -> str:
    contents = compared.left.contents
    tensors, objects = plural(len(contents.tensors), "tensor"), plural(len(contents.objects), "object")
    if compared.only_structure:
        return f"have the same keys, dtypes and shapes: {tensors}, {objects}; no value was compared"
    common = "" if compared.is_selection else ", the common state"
    return f"are equal, bit for bit: {tensors}, {size(compared.difference.nbytes)}, {objects}{common}"


def _kind(kind: TensorKind) -> str:
    return f"{dtype_name(kind.dtype)} {kind.global_shape}"


def _shown(kind: TensorKind) -> dict[str, Any]:
    return {"dtype": dtype_name(kind.dtype), "shape": kind.global_shape}


def _value_record(found: ValueDifference) -> dict[str, Any]:
    names = ("key", "count", "elements", "first", "left", "right", "largest")
    return {name: plain(getattr(found, name)) for name in names}


def _paths(found: Difference) -> dict[str, list[str]]:
    sides = {"only_left": found.only_left, "only_right": found.only_right, "mismatch": found.mismatch}
    return {name: [render_path(path, "") for path in paths] for name, paths in sides.items()}
