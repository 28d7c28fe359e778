"""`shardtree inspect`: a checkpoint's contents, as tables or as JSON, without reading a tensor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.text import Text

from ..errors import CheckpointingException, NotACheckpoint, error_text, plural, shorten
from ..inspection import OpenCheckpoint, load_content_metadata, open_checkpoint
from ..shell.table import LoadOptions
from ..shell.table.index import DeferredMetadata
from ._command import complain
from ._contents import (
    ObjectRow,
    StoredContents,
    TensorRow,
    brief,
    check_patterns,
    contents_in_files,
    cut_text,
    entries_of,
    kind_of,
    plain,
    product_text,
    select,
    shape_text,
)
from ._files import Files, files_of
from ._output import Heading, Output, Table, json_text, printable, show_table, size, spellable, working
from ._series import find_steps, run_series
from ._views import COMMON, KEYS, common_rows, key_rows, show_pieces, show_values

# The output is tables for people, or a document for programs.

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
class CheckpointFindings:
    """Contents of a checkpoint that `inspect` shows.

    Attributes:
        where: Name of the checkpoint, as the user typed it.
        fields: Fields of its metadata.json; without this file, fields that name the recognised format.
        everything: All tensors and objects.
        selection: Tensors and objects whose keys match, sorted.
        common: Top-level entries of the common state, without the content metadata; None if it can't be read.
        problem: Error that reading the common state raised; None if it raised none.
        content_metadata: The save's `content_metadata`.
        files: Files in the checkpoint's folder.
        in_files: True if the listed names are the names in the files, and a load uses other names.
    """

    where: str
    fields: Mapping[str, Any]
    everything: StoredContents
    selection: StoredContents
    common: Mapping[str, Any] | None
    problem: CheckpointingException | None
    content_metadata: Any
    files: Files
    in_files: bool


def show_findings(console: Console, findings: CheckpointFindings, limit: int | None, *, is_selection: bool) -> None:
    """Print tables of tensors, of objects and, unless keys were selected, of the common state; then the totals."""
    console.print(Text(printable(findings.where), style="bold"))
    _show_rows(console, tensor_table(findings.selection.tensors), limit)
    _show_rows(console, object_table(findings.selection.objects), limit)
    if not is_selection and findings.common is not None:
        rows = [(name, kind_of(value), brief(value)) for name, value in findings.common.items()]
        _show_rows(console, Table(_COMMON, rows), limit)
    console.print()
    if is_selection:
        _show_facts(console, [("selected", _count(findings.selection))])
    _show_facts(console, facts_of(findings))


def _show_rows(console: Console, table: Table, limit: int | None) -> None:
    if table.rows:
        console.print()
        show_table(console, table.headings, table.rows, limit)


def _show_facts(console: Console, facts: Iterable[tuple[str, str]]) -> None:
    spell = spellable(console)
    for name, fact in facts:
        console.print(Text.assemble((f"{name:<18}", "dim"), spell(printable(fact))))


def tensor_table(rows: Sequence[TensorRow]) -> Table:
    """Return the table with a row for each tensor."""
    shapes = [shape_text(row.shape) + " ?" * (not row.is_proven) for row in rows]
    cells = [
        (row.key, row.dtype, shape, cut_text(row.grid), size(row.length))
        for row, shape in zip(rows, shapes, strict=True)
    ]
    return Table(_TENSOR, cells)


def object_table(rows: Sequence[ObjectRow]) -> Table:
    """Return the table with a row for each array of objects.

    Args:
        rows: Stored objects, each a cell of an array.
    """
    arrays: dict[tuple[str, tuple[int, ...]], list[ObjectRow]] = {}
    for row in rows:
        arrays.setdefault((row.key, row.shape), []).append(row)
    cells_of_rows = [
        # -1 is the length of an array of objects that old checkpoints omit.
        (key, product_text(shape).replace("-1", "?") or "1", f"{len(cells):,}", _length(cells))
        for (key, shape), cells in arrays.items()
    ]
    return Table(_OBJECT, cells_of_rows)


def _length(cells: Sequence[ObjectRow]) -> str:
    lengths = [cell.length for cell in cells if cell.length is not None]
    return size(sum(lengths)) if len(lengths) == len(cells) else "?"


def facts_of(findings: CheckpointFindings) -> Iterable[tuple[str, str]]:
    """Yield (name, text) pairs about a whole checkpoint, such as its number of tensors, its files and its format."""
    yield "tensors", _count(StoredContents(findings.everything.tensors, ()))
    by_dtype = Counter[str]()
    for row in findings.everything.tensors:
        by_dtype[row.dtype] += row.elements
    if by_dtype:
        yield "elements", ", ".join(f"{count:,} {name}" for name, count in by_dtype.most_common())
    if unproven := sum(not row.is_proven for row in findings.everything.tensors):
        yield (
            "unproven",
            f"{plural(unproven, 'shape')}, marked ?: larger if a file is missing; nothing here says so",
        )
    if findings.everything.objects:
        yield "objects", _count(StoredContents((), findings.everything.objects))
    # The count of files stops at a limit.
    beyond = "" if findings.files.is_all else "more than "
    yield "files", f"{beyond}{plural(findings.files.count, 'file')}, {beyond}{size(findings.files.length)}"
    if findings.files.missing:
        missing = findings.files.missing
        yield "missing", f"{plural(len(missing), 'file')}, or a part: {', '.join(shorten(missing))}"
    parts = [(f"{part}_backend", f"{part}_backend_version") for part in ("sharded", "common")]
    sharded, common = (f"{findings.fields[name]} {findings.fields[version]}" for name, version in parts)
    yield "format", sharded if common == sharded else f"{sharded}, common state: {common}"
    if "save_id" in findings.fields:
        yield "save", str(findings.fields["save_id"])
    if findings.in_files:
        yield "buckets", "hold states of named parameters; --key 'optimizer.state.**' reads the weights and lists them"
    if findings.content_metadata is not None:
        yield (
            "content metadata",
            ", ".join(f"{name}: {brief(value)}" for name, value in entries_of(findings.content_metadata).items()),
        )


def _count(contents: StoredContents) -> str:
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


def document(findings: CheckpointFindings, limit: int | None) -> dict[str, Any]:
    """Return the document that `--json` prints."""
    names = ("sharded_backend", "sharded_backend_version", "common_backend", "common_backend_version")
    common = findings.common
    return {
        "checkpoint": findings.where,
        "format": {name: findings.fields[name] for name in names},
        "save_id": findings.fields.get("save_id"),
        "content_metadata": plain(findings.content_metadata),
        "totals": _totals(findings.everything),
        "selected": _totals(findings.selection),
        "files": files_record(findings.files),
        "tensors": list(map(_tensor_record, findings.selection.tensors[:limit])),
        "objects": [
            {
                "key": row.key,
                "unique_key": row.unique_key,
                "shape": row.shape,
                "offset": row.offset,
                "bytes": row.length,
            }
            for row in findings.selection.objects[:limit]
        ],
        "common": None
        if common is None
        else [{"name": name, "type": kind_of(value), "value": brief(value)} for name, value in common.items()][:limit],
    }


def files_record(files: Files) -> dict[str, Any]:
    """Return the value of `files` in the JSON document: number and length of the files, and the missing ones."""
    counts = {"count": files.count, "bytes": files.length}
    return {**counts, "complete": files.is_complete, "missing": list(files.missing or ())}


def _totals(contents: StoredContents) -> dict[str, int]:
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
        "shape_proven": row.is_proven,
    }


# Keys break ties, so that the order is the same each time.
_SORTS = {"key": lambda row: row.key, "bytes": lambda row: (-(row.length or 0), row.key)}


@dataclass(frozen=True, slots=True)
class Selection:
    """Contents of a checkpoint that the user asks for; at most one of the last four fields is given.

    Attributes:
        patterns: Patterns of the keys to show; none shows all.
        sort: Order of the rows, "key" or "bytes".
        limit: Upper bound of the rows of each table; None for all.
        tree: True to show keys as a tree.
        common: True to show the whole common state.
        values: Key of a tensor whose elements are shown, maybe with an index.
        layout: Key of a tensor whose pieces are shown.
    """

    patterns: Sequence[str] = ()
    sort: str = "key"
    limit: int | None = None
    tree: bool = False
    common: bool = False
    values: str | None = None
    layout: str | None = None


def run_inspect(checkpoint: str, view: Selection, *, as_json: bool, allow_pickle: bool) -> int:
    """Print the contents of a checkpoint, or the steps under a root, and return the exit status.

    The status is 1 if the common state can't be read, or files are missing; else 0.

    Args:
        checkpoint: Path or URL of the checkpoint.
        view: Contents to show.
        as_json: True to print JSON.
        allow_pickle: True to unpickle pickled values.

    Raises:
        CheckpointingException: The checkpoint can't be opened, or has no such key.
    """
    try:
        with working("opening it"):
            tree = open_checkpoint(checkpoint, options=LoadOptions(allow_pickle=allow_pickle))
    except NotACheckpoint:
        steps = find_steps(checkpoint)
        if steps is None:
            raise
        if view != Selection(sort=view.sort, limit=view.limit):
            heading, fix = f"inspect: {checkpoint!r} is a folder of steps", f"Inspect one step, such as {steps.newest}."
            raise NotACheckpoint(error_text(heading, expected="one checkpoint", fix=fix)) from None
        return run_series(steps, limit=view.limit, as_json=as_json)
    console = Output()
    if view.values is not None:
        show_values(console, tree, view.values, as_json=as_json)
    elif view.layout is not None:
        show_pieces(console, tree, view.layout, view.limit, as_json=as_json)
    elif view.common:
        if as_json:
            print(json_text({"common": plain(tree.common())}))
        else:
            show_table(console, COMMON, list(common_rows(tree.common())), view.limit)
    elif view.tree and not as_json:
        contents = _select(contents_in_files(tree, view.patterns), view.patterns)
        show_table(console, KEYS, key_rows(contents.tensors), view.limit)
    else:
        return _show_contents(console, checkpoint, tree, view, as_json=as_json)
    return 0


def _show_contents(console: Console, where: str, tree: OpenCheckpoint, view: Selection, *, as_json: bool) -> int:
    with working("reading what is stored"):
        findings = examine(where, tree, view.patterns, view.sort)
    if findings.problem is not None:
        # Tensors are shown without the common state, which may have pickled values that may not be loaded.
        complain("inspect", findings.problem)
    if as_json:
        print(json_text(document(findings, view.limit)))
    else:
        show_findings(console, findings, view.limit, is_selection=bool(view.patterns))
    return 0 if findings.common is not None and not findings.files.missing else 1


def examine(where: str, tree: OpenCheckpoint, patterns: Sequence[str] = (), sort: str = "key") -> CheckpointFindings:
    """Return the content of a checkpoint to show, without reading a tensor.

    Raises:
        KeyMismatch: A pattern matches nothing.
        CheckpointingException: The checkpoint's metadata can't be read.
    """
    everything = contents_in_files(tree, patterns)
    selection, order = _select(everything, patterns), _SORTS[sort]
    selection = StoredContents(tuple(sorted(selection.tensors, key=order)), tuple(sorted(selection.objects, key=order)))
    common: dict[str, Any] | None = None
    problem = None
    try:
        common = entries_of(tree.common())
    except CheckpointingException as error:
        problem = error
    # The content metadata is an entry of the stored common state, but is shown separately.
    content = load_content_metadata(preloaded_state_dict=common or {})
    if common is not None:
        common = {name: value for name, value in common.items() if name != "content_metadata"}
    return CheckpointFindings(
        where,
        tree.checkpoint.fields,
        everything,
        selection,
        common,
        problem,
        content,
        files_of(tree),
        in_files=isinstance(tree.metadata, DeferredMetadata) and everything == contents_in_files(tree),
    )


def _select(everything: StoredContents, patterns: Sequence[str]) -> StoredContents:
    check_patterns("inspect", patterns, everything)
    return select(everything, patterns)
