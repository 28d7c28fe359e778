"""Views of a checkpoint: its keys and common state as indented rows; values, pieces and pictures of tensors."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console
from rich.text import Text

from ..core.codec import dtype_name
from ..core.geometry import slices
from ..core.layouts import place_text
from ..core.lazy import as_integers
from ..core.mapping import ShardedTensor
from ..core.trees import near_names, torch_converts
from ..errors import KeyMismatch, ShapeError, StrategyError, error_text
from ..inspection import OpenCheckpoint, open_checkpoint
from ..pictures import COLOURS, Picture, draw, picture_lines
from ..shell.storage import Directory
from ..shell.table import LoadOptions
from ._contents import TensorRow, brief, cut_text, entries_of, fields_of, kind_of, plain, shape_text, stored_index
from ._layouts import chunk_shard
from ._output import Heading, Output, json_text, printable, show_table, size

KEYS = (
    Heading("key", style="bold"),
    Heading("tensors", right=True),
    Heading("dtype", style="cyan"),
    Heading("shape", right=True),
    Heading("cut", right=True, style="yellow"),
    Heading("size", right=True, style="green"),
)
COMMON = (Heading("common state", style="bold"), Heading("type", style="cyan"), Heading("value"))

_DEEPEST = 64
"""Upper bound of the levels of indentation, since keys and values of a file may have any number."""

_INDENT = "  "
_WIDEST = 24
"""Upper bound of the characters of a joined key, so that all columns fit an ordinary terminal."""


@dataclass(slots=True)
class _RowNode:
    row: TensorRow | None = None
    inner: dict[str, _RowNode] = field(default_factory=dict)
    count: int = 0
    length: int = 0


def key_rows(tensors: Sequence[TensorRow]) -> list[tuple[str, ...]]:
    """Return an indented tree of keys, split at their dots, as rows under the headings `KEYS`.

    Layers with consecutive numbers and equal contents share one row.

    Examples:
        >>> rows = [TensorRow(f"layers.{n}.w", "float32", (2, 3), 24, None) for n in range(3)]
        >>> [cells[0] for cells in key_rows(rows)]
        ['layers.0-2', '  w']
    """
    root = _RowNode()
    for row in tensors:
        node = root
        for part in row.key.split(".", _DEEPEST):
            node = node.inner.setdefault(part, _RowNode())
            node.count, node.length = node.count + 1, node.length + row.length
        node.row = row
    return list(_rows(root, 0))


def _rows(node: _RowNode, depth: int) -> Iterator[tuple[str, ...]]:
    for names, entry in _groups(node.inner):
        label = _INDENT * depth + _range(names)
        # An entry with a single child shares its child's row if that stays narrow. A group of layers doesn't, since the
        # rows below it show one of the layers.
        while len(names) == 1 and entry.row is None and len(inner := _groups(entry.inner)) == 1:
            longer = f"{label}.{_range(inner[0][0])}"
            if len(longer) > _WIDEST:
                break
            label, ((names, entry),) = longer, inner
        if entry.row is not None:
            alike, grid = f"{len(names):,}" if len(names) > 1 else "", cut_text(entry.row.grid)
            yield label, alike, entry.row.dtype, shape_text(entry.row.shape), grid, size(entry.row.length * len(names))
        if entry.inner:
            times = f"{len(names)} \N{MULTIPLICATION SIGN} " if len(names) > 1 else ""
            yield label, f"{times}{entry.count:,}", "", "", "", size(entry.length * len(names))
            yield from _rows(entry, depth + 1)


def _range(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]}-{names[-1]}"


def _groups(inner: Mapping[str, _RowNode]) -> list[tuple[list[str], _RowNode]]:
    """Return the sorted children of a node as pairs (names, node).

    Children whose names are consecutive numbers and whose contents are equal, such as layers, share one pair: it has
    all their names, and the node of the first.
    """
    groups: list[tuple[list[str], _RowNode]] = []
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


def _outline(node: _RowNode) -> tuple[Any, ...]:
    """Return the dtypes, shapes, chunk grids and names below a node, which are equal for layers with equal contents."""
    row = node.row
    fields = None if row is None else (row.dtype, row.shape, cut_text(row.grid))
    return fields, tuple((name, _outline(inner)) for name, inner in sorted(node.inner.items()))


def common_rows(common: Any, depth: int = 0) -> Iterator[tuple[str, str, str]]:
    """Yield a row under the headings `COMMON` for every value of a common state; nested values are indented.

    Examples:
        >>> list(common_rows({"args": {"lr": 0.1, "betas": (0.9, 0.95)}}))
        [('args', 'dict', '2 entries: lr, betas'), ('  lr', 'float', '0.1'), ('  betas', 'tuple', '(0.9, 0.95)')]
    """
    for name, value in entries_of(common).items():
        short = _short_list(value)
        yield _INDENT * depth + name, kind_of(value), brief(value) if short is None else short
        if short is None and depth < _DEEPEST:
            yield from common_rows(value if isinstance(value, list | tuple) else fields_of(value) or {}, depth + 1)


def _short_list(value: Any) -> str | None:
    """Return a short list of numbers as Python writes it; None for other values."""
    if not isinstance(value, list | tuple) or len(value) > 8:
        return None
    if any(type(item) not in (int, float, bool) or (type(item) is int and item.bit_length() > 64) for item in value):
        return None
    return repr(value)


# This section prints the values of a tensor.

_MOST = 64 * 2**20
"""Upper bound of the bytes that are printed; a request for more is probably a mistake."""
_INDEXED = re.compile(r"(?P<key>.+)\[(?P<index>[^\[\]]*)\]", re.DOTALL)
_ENTRY = re.compile(r"(?P<start>-?\d{0,18}):(?P<stop>-?\d{0,18})|-?\d{1,18}")
_PIECES = (
    Heading("piece", style="bold"),
    Heading("shape", right=True),
    Heading("size", right=True, style="green"),
    Heading("file"),
    Heading("from byte", right=True),
)

_LISTED = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def show_values(console: Console, tree: OpenCheckpoint, text: str, *, as_json: bool) -> None:
    """Print elements of a tensor, given as KEY or KEY[0:4] or KEY[3, :, 2], without reading others.

    Raises:
        KeyMismatch: Nothing is stored under that key.
        ShapeError: The index doesn't fit the tensor, or selects too many elements.
    """
    match = None if text in tree else _INDEXED.fullmatch(text)  # A key may itself end in brackets.
    key = text if match is None else match["key"]
    index = () if match is None else tuple(_entry(part.strip(), text) for part in match["index"].split(","))
    data = _tensor(tree, key).data
    if len(index) > len(data.shape):
        heading, expected = f"inspect: {text!r} has too many indices", f"at most {len(data.shape)}"
        raise ShapeError(error_text(heading, found=len(index), expected=expected))
    try:
        # Indices apply one at a time from the last axis on, so that one that drops its axis doesn't move the others.
        for axis in reversed(range(len(index))):
            data = data[(slice(None),) * axis + (index[axis],)]
    except IndexError as error:
        raise ShapeError(error_text(f"inspect: {text!r} is outside of the tensor", found=error)) from error
    nbytes = data.numel() * data.dtype.itemsize
    if nbytes > _MOST:
        fix = f"Ask for a part: '{key}[0:4]'."
        raise ShapeError(error_text(f"inspect: {text!r} has {size(nbytes)}, too much to print", fix=fix))
    values, dtype = _numbers(data.read()), data.dtype
    if as_json:
        record = {"key": key, "dtype": dtype_name(dtype), "shape": list(values.shape)}
        # Values that JSON lacks, such as complex numbers, become text.
        content = values.tolist() if values.dtype in _LISTED or values.is_floating_point() else str(values)
        print(json_text({**record, "values": plain(content)}))
        return
    shape = shape_text(tuple(values.shape))
    console.print(Text.assemble((printable(text), "bold"), f"  {dtype_name(dtype)}  {shape}  {size(nbytes)}"))
    for line in str(values).split("\n"):
        console.print(Text(line))


def _numbers(values: torch.Tensor) -> torch.Tensor:
    """Return a tensor that prints as numbers: its bits as integers if torch can't convert the dtype, else itself."""
    has_numbers = values.is_complex() or torch_converts(values.dtype, torch.float64)
    return values if has_numbers else as_integers(values)


def _entry(part: str, text: str) -> int | slice:
    match = _ENTRY.fullmatch(part)
    if match is None:
        expected = "numbers and ranges, as in KEY[3, 0:4, :]"
        raise ShapeError(error_text(f"inspect: {text!r} is not an index", found=repr(part), expected=expected))
    if match["start"] is None:
        return int(part)
    start, stop = (int(bound) if bound not in ("", "-") else None for bound in (match["start"], match["stop"]))
    return slice(start, stop)


def _tensor(tree: OpenCheckpoint, key: str) -> ShardedTensor:
    with suppress(KeyMismatch):  # Errors about tensors that can't be read aren't suppressed.
        shard = tree[key]
        if isinstance(shard, ShardedTensor):
            return shard
    near = near_names([key], list(tree)).get(key)
    fix = f"Did you mean {near!r}?" if near is not None else "`shardtree inspect` without options lists all keys."
    raise KeyMismatch(error_text(f"inspect: no tensor {key!r}", fix=fix))


# This section prints the pieces of a tensor.


def show_pieces(console: Console, tree: OpenCheckpoint, key: str, limit: int | None, *, as_json: bool) -> None:
    """Print the box, shape, size, file and file offset of each stored piece of a tensor.

    Raises:
        KeyMismatch: Nothing is stored under that key.
        StrategyError: The format has no index of pieces.
    """
    whole, index = _tensor(tree, key), stored_index(tree, [key])
    if index is None:
        raise StrategyError(error_text(f"inspect: the format does not say where the pieces of {key!r} lie"))
    (number,) = index.find_keys([key])
    files = index.file_names()
    rows = (index.chunk_key == number).nonzero()[0].tolist()
    shards = [chunk_shard(index, row, whole) for row in rows]
    places = [(files[index.chunk_file[row]], int(index.chunk_byte[row]), int(index.chunk_length[row])) for row in rows]
    pairs = list(zip(shards, places, strict=True))
    if as_json:
        record = {"key": key, "dtype": dtype_name(whole.dtype), "shape": list(whole.global_shape)}
        pieces = [
            {
                "offset": shard.global_offset,
                "shape": shard.local_shape,
                "flat": (flat := shard.flattened_range) and [flat.start, flat.stop],
                "file": file,
                "byte": byte,
                "bytes": length,
            }
            for shard, (file, byte, length) in pairs[:limit]
        ]
        print(json_text({**record, "pieces": pieces}))
        return
    shape, folders = shape_text(whole.global_shape), {file.rpartition("/")[0] for file, *_ in places}
    # A folder that all files share is printed once, since it would make rows wider than terminals.
    folder = f"{folders.pop()}/" if len(folders) == 1 and "" not in folders else ""
    words = f"  {dtype_name(whole.dtype)}  {shape}{'  in ' * bool(folder)}{printable(folder)}"
    console.print(Text.assemble((printable(key), "bold"), words))
    console.print()
    cells = [
        (_place(shard), shape_text(shard.data_shape), size(length), file.removeprefix(folder), f"{byte:,}")
        for shard, (file, byte, length) in pairs
    ]
    show_table(console, _PIECES, cells, limit)


def _place(shard: ShardedTensor) -> str:
    flat, box = shard.flattened_range, place_text(slices(shard.global_offset, shard.local_shape))
    return box if flat is None else f"{box} flattened [{flat.start}:{flat.stop}]"


# This section draws these pieces.


def run_picture(checkpoint: Directory, key: str | None, out: str | None, *, allow_pickle: bool) -> int:
    """Print or write a picture that shows which file holds which part of a tensor, and return the exit status 0.

    Args:
        checkpoint: Path or URL of the checkpoint.
        key: Key of the tensor; None for the largest tensors.
        out: File to write; its suffix chooses SVG, HTML or text. None to print the picture.
        allow_pickle: True to unpickle pickled values.

    Raises:
        CheckpointingException: The checkpoint can't be opened, has no such tensor, or the file can't be written.
    """
    drawing = draw(open_checkpoint(checkpoint, options=LoadOptions(allow_pickle=allow_pickle)), key)
    console = Output()
    if out is not None:
        drawing.save(out)
        console.print(Text(f"written: {printable(out)}"))
        return 0
    show_picture(console, drawing.picture)
    return 0


def show_picture(console: Console, picture: Picture) -> None:
    """Print a picture; if the console has no colours, cells are filled with characters instead."""
    is_plain = console.color_system is None
    for line in picture_lines(picture, console.width, filled=is_plain):
        spans = ((span.text, f"black on {COLOURS[span.tone]}" if span.tone and not is_plain else "") for span in line)
        console.print(Text.assemble(*spans))
