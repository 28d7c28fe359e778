"""The check of all archives of a checkpoint: every byte that has a checksum, many archives at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from ...errors import CheckpointingException, CorruptCheckpoint, UnsafeFile, UnsupportedValue
from ...kit import (
    Checkpoint,
    Damage,
    Finding,
    Reader,
    Region,
    Unchecked,
    dtype_name,
    fetch_ahead,
    file_regions,
    in_threads,
    is_damaged,
    joined_crc32,
    limits,
    opened,
    refused_findings,
    span_findings,
    threads_of,
    untaken_findings,
)
from ..archives import archive_records, read_crc32, tensor_place
from ..torch import HEADERS, verify_archive
from ._common import load_dcp_common
from ._listing import META_FILE, ArchiveListing, has_meta, read_listing
from ._load import master_damage
from ._metadata_file import INDEX_FILE
from ._payloads import archive_name, batches, check_kind, check_tensor, decoded_at, ends_of, part_of, wholes_of

# This section checks one archive: the CRC32 of each of its records, and its value against `.metadata`.

_LARGE_BYTES = 64 * 1024 * 1024
"""Length above which several threads read a record."""

_DECODED_BYTES = 16 * 1024 * 1024
"""Upper bound of the length of archives that are decoded, to save memory; of others only the checksums are checked."""


@dataclass(frozen=True, slots=True)
class LargeRecord:
    """A large record that hasn't been read yet.

    Attributes:
        file: Number of the file.
        number: Number of the archive.
        begin: First byte of the record in the file.
        end: One past its last byte.
        crc32: Recorded CRC32.
        what: Text of the damage if the CRC32 differs.
    """

    file: int
    number: int
    begin: int
    end: int
    crc32: int
    what: str


@dataclass(slots=True, eq=False)
class _BatchResult:
    """Findings about the archives of one file.

    Attributes:
        file: Number of the file.
        damage: Damage of the archives.
        spans: Byte ranges of the file that have a CRC32.
        large: Large records with a CRC32, which haven't been read yet.
        refused: Errors of values that a load with the same options refuses, by name.
    """

    file: int
    damage: list[Damage] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)
    large: list[LargeRecord] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)


def _check_archive(
    checkpoint: Checkpoint, listing: ArchiveListing, reader: Reader, number: int, result: _BatchResult
) -> None:
    """Check an archive in an open data file by its number, and add the findings to the result."""
    archives = listing.archives
    if number in archives.refusals:
        return
    begin, length = int(archives.byte[number]), int(archives.length[number])
    what = archive_name(checkpoint, listing, number)
    try:
        if _records_are_right(listing, reader, number, what, result):
            _check_value(checkpoint, listing, reader, number, what)
    except (UnsafeFile, UnsupportedValue) as error:
        result.refused[archives.names[number]] = str(error)  # The archive may still be what was saved.
    except CheckpointingException as error:
        result.damage.append(archive_damage(listing, number, str(error), begin, begin + length))


def _records_are_right(listing: ArchiveListing, reader: Reader, number: int, what: str, result: _BatchResult) -> bool:
    """Check the CRC32 of each record of an archive, except large ones, and return whether none differs.

    The result gets the records' byte ranges, the damage, and the large records, which are read later.
    """
    byte, length = int(listing.archives.byte[number]), int(listing.archives.length[number])
    try:
        records = archive_records(partial(part_of, reader, byte), length, what=what)
    except CorruptCheckpoint:
        return True  # torch may have written another form; decoding, which follows, raises if it is damaged.
    damages = len(result.damage)
    for record in records:
        begin, end = byte + record.begin, byte + record.begin + record.nbytes
        wrong = f"the CRC32 of record {record.name[:100]!r} of an archive differs"
        if not record.crc32:
            continue  # No CRC32 was recorded.
        result.spans.append((begin, end))
        if record.nbytes > _LARGE_BYTES:
            result.large.append(LargeRecord(result.file, number, begin, end, record.crc32, wrong))
        elif read_crc32(reader, begin, end) != record.crc32:
            result.damage.append(archive_damage(listing, number, wrong, begin, end))
    return len(result.damage) == damages


def _check_value(checkpoint: Checkpoint, listing: ArchiveListing, reader: Reader, number: int, what: str) -> None:
    """Raise unless an archive's value agrees with `.metadata`."""
    archives, is_tensor = listing.archives, listing.archives.shape(number) is not None
    byte, length = int(archives.byte[number]), int(archives.length[number])
    if is_tensor:
        try:
            place = tensor_place(partial(part_of, reader, byte), length, what=what)
        except (CorruptCheckpoint, UnsafeFile):
            pass  # The archive isn't in the usual form: decoding it, below, handles more kinds of tensors.
        else:
            check_kind(listing, number, dtype_name(place.dtype), tuple(place.shape), what)
            return
    if length <= _DECODED_BYTES:
        value = decoded_at(checkpoint, listing, reader, number)
        if is_tensor:
            check_tensor(listing, number, value, what)


_REQUESTS = 8  # Each request has a batch in memory.

_ARCHIVE = b"PK\x03\x04"
_MOST_REGIONS = 10_000


@dataclass(frozen=True, slots=True, eq=False)
class _Batch:
    """Archives that one thread checks; they lie in one file of `length` bytes."""

    file: int
    length: int
    numbers: list[int]


def verify_files(checkpoint: Checkpoint) -> tuple[Finding, ...]:
    """Return the damage of `.metadata` as a whole and of data files by archive, and the bytes without a checksum.

    `.metadata` has no checksum: it is reported as damaged if it contradicts itself or the archives.
    """
    try:
        listing = read_listing(checkpoint)
    except CorruptCheckpoint as error:
        return (Damage(INDEX_FILE, str(error)),)
    findings: list[Finding] = []
    work: list[_Batch] = []
    length = checkpoint.storage.length(INDEX_FILE) or 0
    findings.append(Unchecked(INDEX_FILE, "a pickle, which is only compared with the archives", length))
    checkpoint.options.progress(length)
    for file in range(len(listing.archives.files)):
        damage, length, inside = _check_file(checkpoint, listing, file)
        findings += damage
        work += (_Batch(file, length, numbers) for numbers in batches(listing, inside))
    threads = threads_of(checkpoint.storage, checkpoint.options.threads, _REQUESTS)
    results = in_threads(partial(_check_batch, checkpoint, listing), work, threads)
    findings += (damage for result in results for damage in result.damage)
    for wrong in _wrong_large(checkpoint, listing, results):
        findings.append(archive_damage(listing, wrong.number, wrong.what, wrong.begin, wrong.end))
    # Damaged masters differ from their weights in any case, so these are only compared if nothing is damaged.
    if not any(isinstance(finding, Damage) for finding in findings):
        findings += master_damage(checkpoint)
    return (
        *findings,
        *_meta(checkpoint),
        *untaken_findings(listing.unknown),
        *refused_findings({name: error for result in results for name, error in result.refused.items()}),
        *_coverage(checkpoint, listing, results),
    )


def _meta(checkpoint: Checkpoint) -> tuple[Finding, ...]:
    """Return the findings about Lightning's archive, meta.pt; none if there is no such file beside the data files."""
    if not has_meta(checkpoint):
        return ()
    findings = verify_archive(checkpoint, META_FILE)
    if is_damaged(findings):
        return findings
    try:
        with suppress(UnsafeFile, UnsupportedValue):
            load_dcp_common(checkpoint)  # Loading raises if the archive contradicts the other files.
    except CorruptCheckpoint as error:
        return (*findings, Damage(META_FILE, str(error)))
    return findings


def _check_file(checkpoint: Checkpoint, listing: ArchiveListing, file: int) -> tuple[list[Damage], int, list[int]]:
    """Return the damage of a file as a whole, its length, and the archives in it that can be checked."""
    archives, storage = listing.archives, checkpoint.storage
    name = archives.files[file]
    inside = np.flatnonzero(archives.file == file).tolist()
    end = int((archives.byte + archives.length)[inside].max())
    try:
        length = storage.length(name)
        if length is None:
            return [_file_damage(listing, file, "no such file", inside)], 0, []
        damages = []
        if length > end:
            with opened(storage, name, length) as reader:
                if not _begins_an_archive(reader, end):
                    damages.append(Damage(name, f"{length - end} bytes after its last archive", end, length))
    except CheckpointingException as error:
        return [_file_damage(listing, file, str(error), inside)], 0, []
    return damages, length, inside


def _begins_an_archive(reader: Reader, byte: int) -> bool:
    """Return whether an archive begins at a byte."""
    # An archive that isn't listed is no damage: of chunks without elements at one offset, Megatron-Core 0.11 only lists
    # the last.
    end = min(byte + len(_ARCHIVE), reader.length)
    return bytes(part_of(reader, byte, 0, end - byte)) == _ARCHIVE


def _check_batch(checkpoint: Checkpoint, listing: ArchiveListing, batch: _Batch) -> _BatchResult:
    archives, name = listing.archives, listing.archives.files[batch.file]
    result = _BatchResult(batch.file)
    try:
        with opened(checkpoint.storage, name, batch.length) as reader:
            inside = [
                number for number in batch.numbers if archives.byte[number] + archives.length[number] <= batch.length
            ]
            fetch_ahead(reader, _read_of(listing, inside))
            for number in batch.numbers:
                begin = int(archives.byte[number])
                end = begin + int(archives.length[number])
                if reader.length < end:
                    what = f"the file ends at byte {reader.length}"
                    result.damage.append(archive_damage(listing, number, what, begin, end))
                    continue
                before = len(result.large)
                _check_archive(checkpoint, listing, reader, number, result)
                postponed = sum(record.end - record.begin for record in result.large[before:])
                checkpoint.options.progress(end - begin - postponed)
    except CheckpointingException as error:
        result.damage.append(_file_damage(listing, batch.file, str(error), batch.numbers))
    return result


def _read_of(listing: ArchiveListing, numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    for number in numbers:
        yield from (ends_of if listing.archives.length[number] > _LARGE_BYTES else wholes_of)(listing, [number])


def archive_damage(listing: ArchiveListing, number: int, what: str, begin: int, end: int) -> Damage:
    """Return a `Damage` of one archive, with the region of the tensor that it contains."""
    archives = listing.archives
    name = archives.files[archives.file[number]]
    return Damage(name, what, begin, end, (archives.names[number],), _regions(listing, [number]))


def _file_damage(listing: ArchiveListing, file: int, what: str, numbers: Sequence[int]) -> Damage:
    """Return one `Damage` for all given archives of a file."""
    archives = listing.archives
    begin, end = int(archives.byte[numbers].min()), int((archives.byte + archives.length)[numbers].max())
    keys = tuple(sorted({archives.names[number] for number in numbers}))
    # Regions are omitted for very many archives, since each one's are looked up separately.
    regions = _regions(listing, numbers) if len(numbers) <= _MOST_REGIONS else ()
    return Damage(archives.files[file], what, begin, end, keys, regions)


def _regions(listing: ArchiveListing, numbers: Sequence[int]) -> tuple[Region, ...]:
    archives, regions_in = listing.archives, file_regions(listing.index, 0)
    places = [(int(archives.start[number]), int(archives.payload[number])) for number in numbers]
    by_payload = (regions_in(start, start + payload) for start, payload in places)
    return tuple(region for regions in by_payload for region in regions)


def _wrong_large(
    checkpoint: Checkpoint, listing: ArchiveListing, results: Iterable[_BatchResult]
) -> Iterator[LargeRecord]:
    """Yield the large records whose CRC32 differs; several threads read each."""
    large = [record for result in results for record in result.large]
    # The CRC32s of pieces can be joined, so that one huge tensor keeps all threads busy.
    pieces = [
        (record.file, begin, min(record.end, begin + limits.CHECKED_BYTES))
        for record in large
        for begin in range(record.begin, record.end, limits.CHECKED_BYTES)
    ]
    read = partial(_piece_crc32, checkpoint, listing)
    checksums = iter(zip(pieces, in_threads(read, pieces, checkpoint.options.threads), strict=True))
    for record in large:
        crc32, at = 0, record.begin
        while at < record.end:
            (_, begin, at), part = next(checksums)
            crc32 = joined_crc32(crc32, part, at - begin)
        if crc32 != record.crc32:
            yield record


def _piece_crc32(checkpoint: Checkpoint, listing: ArchiveListing, piece: tuple[int, int, int]) -> int:
    file, begin, end = piece
    with opened(checkpoint.storage, listing.archives.files[file], end) as reader:
        crc32 = read_crc32(reader, begin, end)
    checkpoint.options.progress(end - begin)
    return crc32


def _coverage(checkpoint: Checkpoint, listing: ArchiveListing, results: Iterable[_BatchResult]) -> Iterator[Finding]:
    """Yield, for each file, the number of bytes that have a CRC32, and the byte ranges that have none."""
    spans: dict[int, list[tuple[int, int]]] = {}
    for result in results:
        spans.setdefault(result.file, []).extend(result.spans)
    for file, name in enumerate(listing.archives.files):
        length = checkpoint.storage.length(name)
        if length is not None:
            yield from span_findings(name, HEADERS, length, spans.get(file, ()))
