"""Writing one rank's data file: archives one after the other, each with the CRC-32 of its tensor's bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from threading import Thread

import numpy as np

from ...codec import archive_head, archive_tail, crc32
from ...errors import CheckpointingException, ShapeError, error_text
from ...geometry import Column
from ...layouts import ShardColumns
from ...storage import Buffer, SizedBuffers, tensor_buffers
from .._checks import misfit
from .._values import Draft
from ._write_layout import FileLayout, Piece

_ZEROS = memoryview(bytes(64))
_NAMES = "files to remove"
_WORTH_A_THREAD = 1024 * 1024  # bytes; fewer are summed in less time than a thread takes to begin


@dataclass(frozen=True, slots=True, eq=False)
class Written:
    """What one rank wrote, and tells the others before the commit.

    Attributes:
        file: the name of its data file, None if it had nothing to write.
        file_length: in bytes.
        columns: the boxes that it wrote, a row an archive.
        byte: where each archive begins, int64 (boxes,).
        length: of each archive in bytes, int64 (boxes,).
        objects: unique key, first byte and length in bytes of each object's archive.
    """

    file: str | None
    file_length: int
    columns: ShardColumns
    byte: Column
    length: Column
    objects: tuple[tuple[str, int, int], ...]


def data_file(rank: int, number: int = 0) -> str:
    """Return the name of a rank's data file.

    Examples:
        >>> data_file(3)
        '__3_0.distcp'
    """
    return f"__{rank}_{number}.distcp"


def note(draft: Draft, name: str) -> str:
    """Return a name, noted as that of a file that this save writes on rank 0 before it commits."""
    draft.memo[_NAMES] = (*names_of(draft), name)
    return name


def names_of(draft: Draft) -> tuple[str, ...]:
    """Return the names that were noted."""
    noted: tuple[str, ...] = draft.memo.get(_NAMES, ())
    return noted


def write_file(draft: Draft, layout: FileLayout) -> Written:
    """Write a rank's data file, if it has something to write, and return what it wrote. No collective."""
    # The folder of a request that is tried again was removed.
    draft.storage.make_folder(draft.save_id, durable=draft.options.durable)
    count = len(layout.objects)
    places = zip(layout.byte[:count].tolist(), layout.length[:count].tolist(), strict=True)
    objects = tuple((key, *place) for (key, _), place in zip(layout.objects, places, strict=True))
    name, length = (None, 0) if not layout.byte.size else (data_file(draft.world.rank), _write(draft, layout))
    return Written(name, length, layout.columns, layout.byte[count:], layout.length[count:], objects)


def _write(draft: Draft, layout: FileLayout) -> int:
    name, durable = data_file(draft.world.rank), draft.options.durable
    nbytes = int(layout.byte[-1] + layout.length[-1])
    buffers = SizedBuffers(nbytes, _with_progress(_buffers(layout), draft))
    length = draft.storage.write(name, buffers, durable=durable)
    if durable:
        draft.storage.sync_folder()
    return length


def _buffers(layout: FileLayout) -> Iterator[Buffer]:
    archives = [data for _, data in layout.objects]
    ends = np.concatenate([[0], layout.byte + layout.length])
    gaps = iter((layout.byte - ends[:-1]).tolist())
    for data in archives:
        yield _ZEROS[: next(gaps)]
        yield memoryview(data)
    for piece, length in zip(layout.pieces, layout.length[len(archives) :].tolist(), strict=True):
        yield _ZEROS[: next(gaps)]
        yield from _piece_buffers(piece, length)


def _piece_buffers(piece: Piece, length: int) -> Iterator[Buffer]:
    """Yield the bytes of a piece's archive; the sum is computed beside the writing, one buffer behind at most."""
    if misfit(piece.shard):
        raise ShapeError(
            error_text("save: a tensor was changed while it waited to be written", found=misfit(piece.shard))
        )
    head = archive_head(piece.shard.dtype, piece.shape)
    yield memoryview(head)
    written = len(head)
    checksum: Callable[[], int] = partial(int, 0)
    for buffer in tensor_buffers(piece.data):
        checksum = _checksum(buffer, checksum())
        yield buffer
        written += buffer.nbytes
    tail = archive_tail(piece.shard.dtype, piece.shape, checksum())
    yield memoryview(tail)
    if written + len(tail) != length:
        found, expected = f"an archive of {written + len(tail)} bytes", f"{length} bytes"
        what = f"save: {piece.shard.key!r} changed its size"
        raise CheckpointingException(error_text(what, found=found, expected=expected))


def _checksum(buffer: Buffer, before: int) -> Callable[[], int]:
    """Return what gives the sum with one more buffer: for a large one another thread computes while this one writes."""
    found: list[int] = []

    def compute() -> None:
        found.append(crc32(buffer, before))

    # No pool: an asynchronous save may go on while the interpreter ends, and pools take no work then.
    thread = Thread(target=compute, name="crc32")
    if buffer.nbytes < _WORTH_A_THREAD:
        compute()
    else:
        thread.start()

    def settled() -> int:
        if thread.ident is not None:
            thread.join()
        return found[0]

    return settled


def _with_progress(buffers: Iterator[Buffer], draft: Draft) -> Iterator[Buffer]:
    for buffer in buffers:
        yield buffer
        draft.options.progress(buffer.nbytes)
