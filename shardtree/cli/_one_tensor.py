"""One stored tensor: some of its values, of which only those are read, and where its pieces lie, also as a picture."""

from __future__ import annotations

import re

import torch
from rich.console import Console
from rich.text import Text

from ..checkpoint import OpenCheckpoint, open_checkpoint
from ..codec import dtype_name
from ..display import draw
from ..errors import KeyMismatch, ShapeError, StrategyError, error_text
from ..layouts import place_text
from ..mapping import ShardedTensor
from ..pictures import COLOURS, Picture, picture_lines
from ..storage import Directory
from ..strategies import LoadOptions
from ..strategies.index import find_texts, reasoned, texts, untaken_of
from ..trees import near_names
from ._contents import plain, shape_text, stored_index
from ._layouts import chunk_shard
from ._output import Heading, Output, json_text, printable, show_table, size

_MOST = 64 * 2**20  # bytes that are printed: more is a mistake
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

# Values.


def show_values(console: Console, tree: OpenCheckpoint, typed: str, *, as_json: bool) -> None:
    """Print elements of a tensor, named as KEY or KEY[0:4] or KEY[3, :, 2]; no others are read.

    Raises:
        KeyMismatch: nothing is stored under that key.
        ShapeError: the index doesn't fit the tensor, or so many elements aren't for reading.
    """
    found = None if typed in tree else _INDEXED.fullmatch(typed)  # a key may end in brackets itself
    key = typed if found is None else found["key"]
    index = () if found is None else tuple(_entry(one.strip(), typed) for one in found["index"].split(","))
    data = _tensor(tree, key).data
    if len(index) > len(data.shape):
        what, expected = f"inspect: {typed!r} has too many indices", f"at most {len(data.shape)}"
        raise ShapeError(error_text(what, found=len(index), expected=expected))
    try:
        # One index at a time, the last axis first, so that an index that drops its axis doesn't move the others.
        for axis in reversed(range(len(index))):
            data = data[(slice(None),) * axis + (index[axis],)]
    except IndexError as error:
        raise ShapeError(error_text(f"inspect: {typed!r} is outside of the tensor", found=error)) from error
    nbytes = data.numel() * data.dtype.itemsize
    if nbytes > _MOST:
        fix = f"Ask for a part: '{key}[0:4]'."
        raise ShapeError(error_text(f"inspect: {typed!r} has {size(nbytes)}, too many to print", fix=fix))
    values: torch.Tensor = data.read()
    if as_json:
        record = {"key": key, "dtype": dtype_name(values.dtype), "shape": list(values.shape)}
        # What JSON has no form for, as complex numbers, is a text.
        listed = values.tolist() if values.dtype in _LISTED or values.is_floating_point() else str(values)
        print(json_text({**record, "values": plain(listed)}))
        return
    shape = shape_text(tuple(values.shape))
    console.print(Text.assemble((printable(typed), "bold"), f"  {dtype_name(values.dtype)}  {shape}  {size(nbytes)}"))
    for line in str(values).split("\n"):
        console.print(Text(line))


def _entry(text: str, typed: str) -> int | slice:
    found = _ENTRY.fullmatch(text)
    if found is None:
        expected = "numbers and ranges, as in KEY[3, 0:4, :]"
        raise ShapeError(error_text(f"inspect: {typed!r} isn't an index", found=repr(text), expected=expected))
    if found["start"] is None:
        return int(text)
    start, stop = (int(one) if one not in ("", "-") else None for one in (found["start"], found["stop"]))
    return slice(start, stop)


def _tensor(tree: OpenCheckpoint, key: str) -> ShardedTensor:
    shard = tree.get(key)
    if isinstance(shard, ShardedTensor):
        return shard
    near = near_names([key], list(tree)).get(key)
    fix = f"Did you mean {near!r}?" if near is not None else "`shardtree inspect` without options lists all keys."
    raise KeyMismatch(error_text(f"inspect: no tensor {reasoned(untaken_of(tree.metadata), key)}", fix=fix))


# Where its pieces lie.


def show_pieces(console: Console, tree: OpenCheckpoint, key: str, limit: int | None, *, as_json: bool) -> None:
    """Print which piece of a tensor lies in which file.

    Raises:
        KeyMismatch: nothing is stored under that key.
        StrategyError: the format doesn't say it.
    """
    whole, index = _tensor(tree, key), stored_index(tree, [key])
    if index is None:
        raise StrategyError(error_text(f"inspect: the format doesn't say where the pieces of {key!r} lie"))
    (number,) = find_texts(index.key_text, index.key_start, [key])
    files = texts(index.file_text, index.file_start)
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
    # The one folder of a save is said once: with it in each row, rows are wider than terminals.
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
    ends = zip(shard.global_offset, shard.local_shape, strict=True)
    flat, box = shard.flattened_range, place_text(tuple(slice(first, first + count) for first, count in ends))
    return box if flat is None else f"{box} flattened [{flat.start}:{flat.stop}]"


# A picture of that.


def run_picture(checkpoint: Directory, key: str | None, out: str | None, *, allow_pickle: bool) -> int:
    """Draw which file holds which part of a checkpoint's tensors, print it or write it, and return the exit status.

    Args:
        checkpoint: a path or URL.
        key: the tensor's; None for the largest ones.
        out: the file to write, by its ending an SVG, a page of HTML or text; None to print.
        allow_pickle: whether pickled values may be unpickled.

    Raises:
        CheckpointingException: it can't be opened, has no such tensor, or the file can't be written.
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
    """Print a picture, in colours where the console has them, else with a mark for each."""
    is_plain = console.color_system is None
    for line in picture_lines(picture, console.width, filled=is_plain):
        spans = ((span.text, f"black on {COLOURS[span.tone]}" if span.tone and not is_plain else "") for span in line)
        console.print(Text.assemble(*spans))
