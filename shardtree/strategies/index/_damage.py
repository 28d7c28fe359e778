"""Files checked against the hashes of their blocks, many blocks at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from ...errors import CheckpointingException
from ...storage import BLOCK_BYTES, BlockHasher, StoredFile, in_threads
from .._findings import Damage, Finding, Unchecked
from .._values import Checkpoint
from ._columns import Index
from ._regions import FileContents, file_contents, keys_between, regions_between
from ._rows import file_at

_STEP_BYTES = 4 * BLOCK_BYTES
_PIECE_BYTES = 32 * _STEP_BYTES


@dataclass(frozen=True, slots=True, eq=False)
class _Piece:
    """A part of a file that one thread takes; its first block is the file's `first`."""

    file: StoredFile
    first: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True, eq=False)
class _Checked:
    """What was found in a piece: the numbers of blocks with another hash, or why it can't be read."""

    piece: _Piece
    blocks: Sequence[int] = ()
    error: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class _Describer:
    """Says what is damaged in stretches of an index's files; looks up what a file holds once."""

    index: Index
    contents: dict[int, FileContents] = field(default_factory=dict)

    def damage(self, number: int, what: str, begin: int, end: int) -> Damage:
        """Return a file's damage, with what lies there."""
        if number not in self.contents:
            self.contents[number] = file_contents(self.index, number)
        contents = self.contents[number]
        keys = keys_between(self.index, contents, begin, end)
        regions = regions_between(self.index, contents, begin, end)
        name = file_at(self.index, number).name
        return Damage(name, what, begin, end, keys, regions)

    def block_damage(self, number: int, begin: int, end: int) -> Damage:
        """Return the damage of one block, which may hold a header or padding too."""
        found = self.damage(number, "the hash of a block differs", begin, end)
        contents = self.contents[number]
        first = end if contents.begin is None else contents.begin
        around = " (the file's header lies in it)" if begin < first else ""
        around = around or (" (it goes on after the file's last tensor)" if end > contents.end else "")
        return replace(found, what=found.what + around)


def files_damage(checkpoint: Checkpoint, index: Index) -> Iterator[Finding]:
    """Yield what is wrong with an index's files: their lengths, or blocks whose hashes differ; and those without any.

    As many threads as the options say read, each a part of a file at a time.

    Args:
        checkpoint: where the files are.
        index: what describes them.
    """
    describer = _Describer(index)
    pieces: list[_Piece] = []
    numbers: dict[str, int] = {}
    for number in range(index.file_length.size):
        file = file_at(index, number)
        numbers[file.name] = number
        length = checkpoint.storage.length(file.name)
        if length != file.length:
            what = "no such file" if length is None else f"{length} bytes where {file.length} were saved"
            yield describer.damage(number, what, 0, file.length)
        elif file.hashes is None:
            if length:
                yield Unchecked(file.name, "it was saved without hashes, or by several ranks", length)
        else:
            pieces += _pieces(file)
    for found in in_threads(partial(_checked, checkpoint), pieces, checkpoint.options.threads):
        piece, number = found.piece, numbers[found.piece.file.name]
        if found.error:
            yield describer.damage(number, found.error, piece.begin, piece.end)
        for block in found.blocks:
            begin, end = block * BLOCK_BYTES, min(piece.file.length, (block + 1) * BLOCK_BYTES)
            yield describer.block_damage(number, begin, end)


def _pieces(file: StoredFile) -> Iterator[_Piece]:
    for begin in range(0, file.length, _PIECE_BYTES):
        yield _Piece(file, begin // BLOCK_BYTES, begin, min(file.length, begin + _PIECE_BYTES))


def _checked(checkpoint: Checkpoint, piece: _Piece) -> _Checked:
    try:
        found = _hashes(checkpoint, piece)
    except CheckpointingException as error:
        return _Checked(piece, error=str(error))
    assert piece.file.hashes is not None
    known = piece.file.hashes[piece.first : -(-piece.end // BLOCK_BYTES)].tolist()
    return _Checked(piece, [block for block, value in enumerate(known, piece.first) if found.get(block) != value])


def _hashes(checkpoint: Checkpoint, piece: _Piece) -> dict[int, int]:
    hasher = BlockHasher(piece.file.length)
    room = memoryview(bytearray(min(_STEP_BYTES, piece.end - piece.begin)))
    with checkpoint.storage.open(piece.file.name) as reader:
        for byte in range(piece.begin, piece.end, _STEP_BYTES):
            part = room[: min(_STEP_BYTES, piece.end - byte)]
            reader.read_into(byte, [part])
            hasher.update(part, byte)
            checkpoint.options.progress(part.nbytes)
    return hasher.hashes
