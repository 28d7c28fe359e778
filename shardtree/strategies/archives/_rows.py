"""The rows of a format that consists of torch.save's files: loads, metadata, verify."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any

from ...codec.archives import Record
from ...errors import CheckpointingException
from ...mapping import ShardedObject, ShardedTensor
from ...storage import ReadReport, in_threads, opened, read_crc32, threads_of
from .._actions import LoadCommon, LoadMetadata, LoadObjects, LoadSharded, Resolution, Resolve, VerifyFiles
from .._checks import check_objects_known
from .._findings import Damage, Finding, uncovered
from .._values import Checkpoint
from ..index import file_contents, regions_between
from ..torch import HEADERS
from ._contents import Contents
from ._copies import differing_among, resolution
from ._files import ArchiveFile, filled
from ._load import compare_all, load_metadata, load_sharded

ReadContents = Callable[[Checkpoint], Contents]
"""Returns what is in a checkpoint; raises CorruptCheckpoint if that can't be read."""


RowFunctions = tuple[LoadCommon, LoadSharded, LoadObjects, LoadMetadata, VerifyFiles, Resolve]
"""Functions of a format's rows, in this order."""


def rows_from_contents(read_contents: ReadContents) -> RowFunctions:
    """Return the functions of a format that can say what is in its files: all that load and verify.

    Args:
        read_contents: called once for an open checkpoint.
    """

    def contents(checkpoint: Checkpoint) -> Contents:
        return checkpoint.once(read_contents)

    def load_common(checkpoint: Checkpoint) -> Any:
        """Return the stored common tree."""
        return filled(checkpoint, contents(checkpoint).common)

    def load(checkpoint: Checkpoint, shards: Sequence[ShardedTensor]) -> ReadReport:
        """Fill each shard's data, a contiguous tensor, in place, and return what was read."""
        return load_sharded(checkpoint, contents(checkpoint), shards)

    def load_objects(checkpoint: Checkpoint, objects: Sequence[ShardedObject]) -> list[Any]:
        """Return the data of each sharded object, in order."""
        known, wanted = contents(checkpoint).objects, [item.unique_key for item in objects]
        check_objects_known(wanted, [key in known for key in wanted])
        return [filled(checkpoint, known[key]) for key in wanted]

    def metadata(checkpoint: Checkpoint) -> Mapping[str, ShardedTensor | ShardedObject]:
        """Return every stored tensor by key, and object by unique key, whole and without data."""
        return load_metadata(checkpoint, contents(checkpoint))

    def verify(checkpoint: Checkpoint) -> tuple[Finding, ...]:
        """Return which records aren't as they were saved, and which parameters' masters aren't their weights."""
        try:
            found = contents(checkpoint)
        except CheckpointingException as error:
            return (Damage("", str(error)),)
        return tuple(_verified(checkpoint, found))

    def resolve(checkpoint: Checkpoint, keys: Set[str], listed: bool) -> Resolution | None:
        """Return how ranks compare copies together, if some of the tensors have any that only reading tells apart."""
        return resolution(checkpoint, contents(checkpoint), keys)

    return load_common, load, load_objects, metadata, verify, resolve


def _verified(checkpoint: Checkpoint, contents: Contents) -> Iterator[Finding]:
    records = [(file, record) for file in contents.files for record in file.records if record.crc32]

    def wrong(pair: tuple[ArchiveFile, Record]) -> str:
        file, record = pair
        try:
            with opened(checkpoint.storage, file.name, record.begin + record.nbytes) as reader:
                found = read_crc32(reader, record.begin, record.begin + record.nbytes)
        except CheckpointingException as error:
            return str(error)
        checkpoint.options.progress(record.nbytes)
        return "" if found == record.crc32 else f"the CRC32 of record {record.name[:100]!r} of an archive differs"

    problems = in_threads(wrong, records, threads_of(checkpoint.storage, checkpoint.options.threads))
    numbers = {file.name: number for number, file in enumerate(contents.files)}
    for (file, record), what in zip(records, problems, strict=True):
        if what:
            yield _damage(contents, numbers[file.name], record, what)
    for file in contents.files:
        covered = ((record.begin, record.begin + record.nbytes) for record in file.records if record.crc32)
        yield from uncovered(file.name, HEADERS, file.length, covered)
    if not any(problems):  # damaged masters differ from their weights in any case
        yield from (Damage("", str(error)) for error in compare_all(checkpoint, contents))
    refused = differing_among(checkpoint, contents, contents.copies) | dict(contents.refused)
    yield from (Damage("", reason, keys=(key,)) for key, reason in refused.items())


def _damage(contents: Contents, number: int, record: Record, what: str) -> Damage:
    begin, end = record.begin, record.begin + record.nbytes
    regions = regions_between(contents.stored, file_contents(contents.stored, number), begin, end)
    keys = tuple(sorted({region.key for region in regions}))
    return Damage(contents.files[number].name, what, begin, end, keys, regions)
