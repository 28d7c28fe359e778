"""Checking all archives of a checkpoint: every byte that a checksum is recorded for."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from ...codec import decode_archive, dtype_name, tensor_place
from ...errors import CheckpointingException, CorruptCheckpoint, UnsafeFile, UnsupportedValue
from ...storage import Reader, read_crc32
from .._values import Checkpoint, Damage
from ..base import StrategyAction, register_default_strategy
from ._backends import DCP, INDEX_FILE, TORCH_DIST
from ._listing import Listing, read_listing
from ._payloads import archive_name, check_kind, check_tensor, part_of

_SMALL_BYTES = 16 * 1024 * 1024
"""An archive of at most this is taken into memory, and each of its entries checked; of a larger one, its payload."""

_ARCHIVE = b"PK\x03\x04"


@register_default_strategy(StrategyAction.VERIFY, *TORCH_DIST)
@register_default_strategy(StrategyAction.VERIFY, *DCP)
def verify_files(checkpoint: Checkpoint) -> tuple[Damage, ...]:
    """Return what is damaged: `.metadata` as a whole, each data file archive by archive.

    `.metadata` has no checksum: it is found damaged where it contradicts itself or the archives.
    """
    try:
        listing = read_listing(checkpoint)
    except CorruptCheckpoint as error:
        return (Damage(INDEX_FILE, str(error)),)
    found: list[Damage] = []
    for file in range(len(listing.archives.files)):
        found += _file_damage(checkpoint, listing, file)
    return tuple(found)


def _file_damage(checkpoint: Checkpoint, listing: Listing, file: int) -> Iterator[Damage]:
    archives, storage = listing.archives, checkpoint.storage
    name = archives.files[file]
    inside = np.flatnonzero(archives.file == file)
    end = int((archives.byte + archives.length)[inside].max())
    try:
        length = storage.length(name)
        if length is None:
            yield Damage(name, "no such file", 0, end, _keys(listing, inside.tolist()))
            return
        with storage.open(name) as reader:
            for number in inside.tolist():
                yield from _archive_damage(checkpoint, listing, reader, number)
                checkpoint.options.progress(int(archives.length[number]))
            if length > end and not _begins_an_archive(reader, end):
                yield Damage(name, f"{length - end} bytes after its last archive", end, length)
    except CheckpointingException as error:
        yield Damage(name, str(error), 0, end, _keys(listing, inside.tolist()))


def _begins_an_archive(reader: Reader, byte: int) -> bool:
    """Return whether an archive begins at a byte, one that `.metadata` doesn't list.

    Of chunks that begin at the same element, as those without elements do, Megatron-Core 0.11 lists the last.
    """
    end = min(byte + len(_ARCHIVE), reader.length)
    return bytes(part_of(reader, byte, 0, end - byte)) == _ARCHIVE


def _keys(listing: Listing, numbers: list[int]) -> tuple[str, ...]:
    return tuple(sorted({listing.archives.names[number] for number in numbers}))


def _archive_damage(checkpoint: Checkpoint, listing: Listing, reader: Reader, number: int) -> Iterator[Damage]:
    archives = listing.archives
    name, begin = archives.files[archives.file[number]], int(archives.byte[number])
    damage = partial(
        Damage, name, begin=begin, end=begin + int(archives.length[number]), keys=(archives.names[number],)
    )
    if reader.length < damage.keywords["end"]:
        yield damage(what=f"the file ends at byte {reader.length}")
    elif number not in archives.refused:
        try:
            _check_archive(checkpoint, listing, reader, number)
        except (UnsafeFile, UnsupportedValue):
            return  # what it holds may be as it was saved: it just isn't read here
        except CheckpointingException as error:
            yield damage(what=str(error))


def _check_archive(checkpoint: Checkpoint, listing: Listing, reader: Reader, number: int) -> None:
    """Raise unless an archive is what was saved."""
    archives = listing.archives
    byte, length = int(archives.byte[number]), int(archives.length[number])
    what = archive_name(checkpoint, listing, number)
    is_tensor = archives.shapes[number] is not None
    if length <= _SMALL_BYTES or not is_tensor:
        value = decode_archive(part_of(reader, byte, 0, length), what=what, types=checkpoint.options.types)
        if is_tensor:
            check_tensor(listing, number, value, what)
        return
    place = tensor_place(partial(part_of, reader, byte), length, what=what)
    check_kind(listing, number, dtype_name(place.dtype), tuple(place.shape), what)
    begin = byte + place.begin
    if place.crc32 and read_crc32(reader, begin, begin + place.nbytes) != place.crc32:
        raise CorruptCheckpoint(f"{what}: the checksum of its payload differs")
