"""`shardtree inspect`: a checkpoint's contents, as tables or as JSON, without reading a tensor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.text import Text

from ..checkpoint import OpenCheckpoint, load_content_metadata, open_checkpoint
from ..errors import CheckpointingException, plural
from ..layouts import Grid
from ..strategies import LoadOptions
from ._contents import (
    Contents,
    Files,
    ObjectRow,
    TensorRow,
    brief,
    check_patterns,
    contents_at,
    entries_of,
    files_in,
    kind_of,
    plain,
    select,
)
from ._output import Output, complain, json_text, printable, size, spellable
from ._table import Heading, show_table

# The output: tables for people, a document for programs.

_TENSOR = (
    Heading("tensor", style="bold"),
    Heading("dtype", style="cyan"),
    Heading("shape", right=True),
    Heading("cut", right=True, style="yellow"),
    Heading("size", right=True, style="green"),
)
_OBJECT = (
    Heading("object", style="bold"),
    Heading("cells", right=True),
    Heading("stored", right=True, style="yellow"),
    Heading("size", right=True, style="green"),
)
_COMMON = (Heading("common state", style="bold"), Heading("type", style="cyan"), Heading("value"))


@dataclass(frozen=True, slots=True)
class Findings:
    """What `inspect` shows of a checkpoint.

    Attributes:
        where: the checkpoint, as it was named.
        fields: those of its metadata.json, or what recognizing its format gave.
        everything: all of its tensors and objects.
        selected: those whose keys match, sorted.
        common: top-level entries of the common state, without the content metadata; None where it can't be read.
        content_metadata: the save's `content_metadata`.
        files: the folder's files.
    """

    where: str
    fields: Mapping[str, Any]
    everything: Contents
    selected: Contents
    common: Mapping[str, Any] | None
    content_metadata: Any
    files: Files


def show_findings(console: Console, found: Findings, limit: int | None, *, is_selection: bool) -> None:
    """Print tables of tensors, objects and, unless keys were selected, the common state; then the totals."""
    console.print(Text(printable(found.where), style="bold"))
    _show_rows(console, _TENSOR, [_tensor_cells(row) for row in found.selected.tensors], limit)
    _show_rows(console, _OBJECT, _object_rows(found.selected.objects), limit)
    if not is_selection and found.common is not None:
        rows = [(name, kind_of(value), brief(value)) for name, value in found.common.items()]
        _show_rows(console, _COMMON, rows, limit)
    console.print()
    if is_selection:
        _show_facts(console, [("selected", _count(found.selected))])
    _show_facts(console, _facts(found))


def _show_rows(
    console: Console, headings: Sequence[Heading], rows: Sequence[tuple[str, ...]], limit: int | None
) -> None:
    if rows:
        console.print()
        show_table(console, headings, rows, limit)


def _show_facts(console: Console, facts: Iterable[tuple[str, str]]) -> None:
    spell = spellable(console)
    for name, fact in facts:
        console.print(Text.assemble((f"{name:<18}", "dim"), spell(printable(fact))))


def _tensor_cells(row: TensorRow) -> tuple[str, ...]:
    return row.key, row.dtype, _product(row.shape) or "scalar", _cut(row.grid), size(row.length)


def _cut(grid: Grid | None) -> str:
    if grid is None:  # a format of others may not say it
        return "?"
    if grid.kind in ("regular", "uneven"):
        return _product(grid.counts) + " uneven" * (grid.kind == "uneven")
    return grid.kind if grid.kind in ("whole", "empty") else f"{grid.kind} ({grid.chunks})"


def _object_rows(rows: Sequence[ObjectRow]) -> list[tuple[str, ...]]:
    """Return a row for each array of objects, in the order of their first cells."""
    arrays: dict[tuple[str, tuple[int, ...]], list[ObjectRow]] = {}
    for row in rows:
        arrays.setdefault((row.key, row.shape), []).append(row)
    return [
        # Old checkpoints left the lengths of arrays of objects out: -1.
        (key, _product(shape).replace("-1", "?") or "1", f"{len(cells):,}", _length(cells))
        for (key, shape), cells in arrays.items()
    ]


def _length(cells: Sequence[ObjectRow]) -> str:
    lengths = [cell.length for cell in cells if cell.length is not None]
    return size(sum(lengths)) if len(lengths) == len(cells) else "?"


def _product(numbers: Sequence[int]) -> str:
    return " \N{MULTIPLICATION SIGN} ".join(map(str, numbers))


def _facts(found: Findings) -> Iterable[tuple[str, str]]:
    yield "tensors", _count(Contents(found.everything.tensors, ()))
    by_dtype = Counter[str]()
    for row in found.everything.tensors:
        by_dtype[row.dtype] += row.elements
    if len(by_dtype) > 1:
        yield "elements", ", ".join(f"{count:,} {name}" for name, count in by_dtype.most_common())
    if found.everything.objects:
        yield "objects", _count(Contents((), found.everything.objects))
    # The count of files stops at a limit.
    beyond = "" if found.files.is_all else "more than "
    yield "files", f"{beyond}{plural(found.files.count, 'file')}, {beyond}{size(found.files.length)}"
    sharded, common = (_format(found.fields, part) for part in ("sharded", "common"))
    yield "format", sharded if common == sharded else f"{sharded}, common state: {common}"
    if "save_id" in found.fields:
        yield "save", str(found.fields["save_id"])
    if found.content_metadata is not None:
        yield (
            "content metadata",
            ", ".join(f"{name}: {brief(value)}" for name, value in entries_of(found.content_metadata).items()),
        )


def _count(contents: Contents) -> str:
    parts = []
    if contents.tensors or not contents.objects:
        elements, length = sum(row.elements for row in contents.tensors), sum(row.length for row in contents.tensors)
        parts.append(f"{_many(len(contents.tensors), 'tensor')}, {_many(elements, 'element')}, {size(length)}")
    if contents.objects:
        arrays = len({(row.key, row.shape) for row in contents.objects})
        cells = _many(len(contents.objects), "cell")
        parts.append(f"{_many(arrays, 'object')} in {cells}, {_length(contents.objects)}")
    return "; ".join(parts)


def _many(count: int, noun: str) -> str:
    return plural(count, noun).replace(str(count), f"{count:,}", 1)


def _format(fields: Mapping[str, Any], part: str) -> str:
    return f"{fields[f'{part}_backend']} {fields[f'{part}_backend_version']}"


def document(found: Findings, limit: int | None) -> dict[str, Any]:
    """Return what docs/command-line.md describes."""
    names = ("sharded_backend", "sharded_backend_version", "common_backend", "common_backend_version")
    common = found.common
    return {
        "checkpoint": found.where,
        "format": {name: found.fields[name] for name in names},
        "save_id": found.fields.get("save_id"),
        "content_metadata": plain(found.content_metadata),
        "totals": _totals(found.everything),
        "selected": _totals(found.selected),
        "files": {"count": found.files.count, "bytes": found.files.length, "complete": found.files.is_all},
        "tensors": [_tensor_record(row) for row in found.selected.tensors[:limit]],
        "objects": [_object_record(row) for row in found.selected.objects[:limit]],
        "common": None
        if common is None
        else [{"name": name, "type": kind_of(value), "value": brief(value)} for name, value in common.items()][:limit],
    }


def _totals(contents: Contents) -> dict[str, int]:
    return {
        "tensors": len(contents.tensors),
        "elements": sum(row.elements for row in contents.tensors),
        "bytes": sum(row.length for row in contents.tensors),
        "objects": len(contents.objects),
    }


def _tensor_record(row: TensorRow) -> dict[str, Any]:
    grid = row.grid
    return {
        "key": row.key,
        "dtype": row.dtype,
        "shape": row.shape,
        "elements": row.elements,
        "bytes": row.length,
        "cut": None if grid is None else {"kind": grid.kind, "counts": grid.counts, "chunks": grid.chunks},
    }


def _object_record(row: ObjectRow) -> dict[str, Any]:
    place = {"shape": row.shape, "offset": row.offset}
    return {"key": row.key, "unique_key": row.unique_key, **place, "bytes": row.length}


# Keys break ties, so that the order is the same each time.
_SORTS = {"key": lambda row: row.key, "bytes": lambda row: (-(row.length or 0), row.key)}


def run_inspect(
    checkpoint: str, *, patterns: Sequence[str], sort: str, limit: int | None, as_json: bool, allow_pickle: bool
) -> int:
    """Print what is in a checkpoint, and return the exit status: 1 where its common state can't be read.

    Args:
        checkpoint: a path or URL.
        patterns: of the keys to show; none for all.
        sort: "key" or "bytes".
        limit: rows of each table; None for all.
        as_json: whether to print JSON.
        allow_pickle: whether pickled values may be unpickled.

    Raises:
        CheckpointingException: it can't be opened.
    """
    found = _examine(checkpoint, patterns, sort, allow_pickle)
    if as_json:
        print(json_text(document(found, limit)))
    else:
        show_findings(Output(), found, limit, is_selection=bool(patterns))
    return 0 if found.common is not None else 1


def _examine(where: str, patterns: Sequence[str], sort: str, allow_pickle: bool) -> Findings:
    tree = open_checkpoint(where, options=LoadOptions(allow_pickle=allow_pickle))
    everything = contents_at(tree)
    check_patterns("inspect", patterns, everything)
    chosen = select(everything, patterns)
    order = _SORTS[sort]
    ordered = Contents(tuple(sorted(chosen.tensors, key=order)), tuple(sorted(chosen.objects, key=order)))
    common = _common(tree)
    # The save stored it as an entry of the common state; it is shown apart.
    content = load_content_metadata(preloaded_state_dict=common or {})
    if common is not None:
        common = {name: value for name, value in common.items() if name != "content_metadata"}
    return Findings(
        where, tree.checkpoint.fields, everything, ordered, common, content, files_in(tree.checkpoint.storage)
    )


def _common(tree: OpenCheckpoint) -> dict[str, Any] | None:
    try:
        return entries_of(tree.common())
    except CheckpointingException as error:
        # Tensors can be shown without it, as where it holds pickled values that may not be loaded.
        complain("inspect", error)
        return None
