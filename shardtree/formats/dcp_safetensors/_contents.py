"""Contents of a folder of ranks' files: each header gives its parts' offsets, and the parts must tile their tensors.

No file lists the others, and no header has a global shape. A tensor's shape is therefore the smallest that its parts
fit into. If the last parts are missing, the others tile a smaller tensor. Only a caller who knows the shape can notice
that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from ...errors import CheckpointingException, CorruptCheckpoint, MetadataError, ShapeError, UnsupportedValue, error_text
from ...kit import (
    Checkpoint,
    Damage,
    Finding,
    HeaderEntry,
    Index,
    IndexMetadata,
    ReadReport,
    ShardColumns,
    ShardedTensor,
    StoredFile,
    TensorKind,
    Unchecked,
    as_int,
    box_column,
    build_index,
    check_taken,
    collector_paused,
    kind_from_file,
    load_from_index,
    parse_json,
    shared_groups,
    stored_columns,
    untaken_findings,
)
from ..huggingface import TEXTS, ModelListing, WeightFile, check_numbers, joined_texts, read_headers, refusal
from ._listing import part_files

_OFFSETS, _OFFSET, _VERSION, _KNOWN_VERSION = "DCP_SHARDING_INFO", "saved_offsets", "DCP_VERSION", "1.0"
_MOST = 2**63 - 1

_UNPROVEN = "no file has tensors' shapes or the number of files: if a rank's file is missing, a tensor seems smaller"
_PADDED = "allow_shape_mismatch takes any shape, and no file says which shape was saved"
_WHY = "this format carries no checksums, shapes or count of files: headers, lengths and overlaps are compared"


@dataclass(frozen=True, slots=True, eq=False)
class PartContents:
    """Contents of all ranks' files: whole tensors, joined from parts, and strings.

    Attributes:
        index: Index of the tensors, with one chunk for each part.
        refusals: Reason that a tensor cannot be loaded, by key.
        texts: Strings in the files' headers by name, without offsets; a dict by file where files differ.
    """

    index: Index
    refusals: Mapping[str, str]
    texts: Mapping[str, str | dict[str, str]]


@dataclass(frozen=True, slots=True)
class Part:
    """A rank's part of a tensor.

    Attributes:
        file: Number of the file.
        entry: Entry of the part in the file's header.
        kind: Dtype and shape of the part.
        offset: Offset of the part in the tensor.
    """

    file: int
    entry: HeaderEntry
    kind: TensorKind
    offset: tuple[int, ...]

    @property
    def stop(self) -> tuple[int, ...]:
        """Offset of the part's end along each axis."""
        return tuple(start + size for start, size in zip(self.offset, self.kind.global_shape, strict=True))


def read_contents(checkpoint: Checkpoint) -> PartContents:
    """Return the contents of all files, after comparing them with the shapes that the caller gave.

    The headers are read once per open checkpoint.

    Raises:
        CorruptCheckpoint: A file is missing or not sound, parts overlap or leave holes, or they contradict
            ``LoadOptions(shapes=...)``.
        UnsupportedValue: The files have a version of the format that is not known.
    """
    return checkpoint.once(_checked)


def _checked(checkpoint: Checkpoint) -> PartContents:
    contents: PartContents = checkpoint.once(parse)
    _check_told(checkpoint, contents.index)
    return contents


def parse(checkpoint: Checkpoint) -> PartContents:
    """Read all files' headers, and return the contents of the files. One rank calls this for all ranks.

    Raises:
        CorruptCheckpoint: A file is missing or not sound, or parts overlap or leave holes.
        UnsupportedValue: The files have a version of the format that is not known.
    """
    where = checkpoint.storage.where()
    with collector_paused():
        listing = ModelListing(where, part_files(checkpoint.storage.names(), where))
        return _joined(where, read_headers(checkpoint.storage, listing))


def _joined(where: str, files: Sequence[WeightFile]) -> PartContents:
    """Return the contents of all files, given their headers.

    Args:
        where: Location of the folder, for errors.
        files: Headers of all ranks' files.

    Raises:
        CorruptCheckpoint: Offsets are not sound, or parts overlap or leave holes.
        UnsupportedValue: The files have a version of the format that is not known.
    """
    check_numbers([entry for file in files for entry in file.entries], where)
    refusals = {entry.name: reason for file in files for entry in file.entries if (reason := refusal(entry))}
    parts: dict[str, list[Part]] = {}
    for number, file in enumerate(files):
        for part in _parts(number, file, refusals):
            parts.setdefault(part.entry.name, []).append(part)
    parts = dict(sorted(parts.items()))
    kinds = {key: _whole(key, key_parts, files) for key, key_parts in parts.items()}
    rows = [part for key_parts in parts.values() for part in key_parts]
    columns = _columns(kinds, parts)
    _check_tiled(where, columns, parts, files)
    index = build_index(
        columns,
        np.array([part.file for part in rows], dtype=np.int64),
        np.array([files[part.file].data_start + part.entry.start for part in rows], dtype=np.int64),
        files=[StoredFile(file.name, file.length) for file in files],
    )
    known = (_OFFSETS, _VERSION)
    texts = [(file.name, {name: text for name, text in file.texts.items() if name not in known}) for file in files]
    return PartContents(index, refusals, joined_texts(texts))


def _parts(number: int, file: WeightFile, refusals: Mapping[str, str]) -> Iterator[Part]:
    offsets = _offsets(file)
    for entry in file.entries:
        if entry.name in refusals:
            continue
        dtype, shape = kind_from_file(entry.tag, entry.shape)
        part = Part(number, entry, TensorKind(dtype, shape, 0), _offset(file, entry.name, offsets, len(shape)))
        if any(stop > _MOST for stop in part.stop):
            raise _unsound(file, f"{entry.name[:200]!r}: an end of {max(part.stop)}", "offsets inside a tensor")
        yield part


def _offsets(file: WeightFile) -> Mapping[str, Any]:
    if (version := file.texts.get(_VERSION, _KNOWN_VERSION)) != _KNOWN_VERSION:
        heading = f"open: {file.name!r} has an unsupported version of {_OFFSETS}"
        fix = "Load it with the program that wrote it."
        raise UnsupportedValue(error_text(heading, found=version[:100], expected=_KNOWN_VERSION, fix=fix))
    if _OFFSETS not in file.texts:
        raise _unsound(file, f"no {_OFFSETS}", "the offset of each of its parts")
    offsets = parse_json(file.texts[_OFFSETS].encode(), f"open: {_OFFSETS} of {file.name!r}")
    return offsets if isinstance(offsets, dict) else {}


def _offset(file: WeightFile, key: str, offsets: Mapping[str, Any], axes: int) -> tuple[int, ...]:
    place = offsets.get(key)
    values = place.get(_OFFSET) if isinstance(place, dict) else None
    numbers = [as_int(value) for value in values] if isinstance(values, list) else []
    sound = [number for number in numbers if number is not None and number >= 0]
    if not isinstance(values, list) or len(sound) != len(values) or len(sound) != axes:
        raise _unsound(file, f"{key[:200]!r}: {place!r}"[:500], f"{{{_OFFSET!r}: [...]}} of {axes} axes")
    return tuple(sound)


def _unsound(file: WeightFile, found: str, expected: str) -> CorruptCheckpoint:
    heading, fix = f"open: the header of {file.name!r} is malformed", "It was damaged or edited; fetch it again."
    return CorruptCheckpoint(error_text(heading, found=found, expected=expected, fix=fix))


def _whole(key: str, parts: Sequence[Part], files: Sequence[WeightFile]) -> TensorKind:
    """Return the dtype of a tensor's parts, and the smallest shape that the parts fit into."""
    first = parts[0]
    for part in parts:
        if part.kind.dtype != first.kind.dtype or len(part.offset) != len(first.offset):
            heading = f"open: the parts of tensor {key[:200]!r} differ in dtype or number of axes"
            pair = [f"{files[other.file].name!r}: {other.kind}" for other in (first, part)]
            fix = "These files belong to different saves; open a folder with the files of one save."
            raise CorruptCheckpoint(error_text(heading, found=" and ".join(pair), fix=fix))
    ends = (part.stop for part in parts)
    return TensorKind(first.kind.dtype, tuple(map(max, zip(*ends, strict=True))), 0)


def _columns(kinds: Mapping[str, TensorKind], parts: Mapping[str, Sequence[Part]]) -> ShardColumns:
    rows = [part for key_parts in parts.values() for part in key_parts]
    number = np.repeat(np.arange(len(parts)), [len(key_parts) for key_parts in parts.values()])
    offset = box_column([part.offset for part in rows], fill=0)
    return stored_columns(kinds, number, offset, box_column([part.kind.global_shape for part in rows], fill=1))


def _check_tiled(
    where: str, columns: ShardColumns, parts: Mapping[str, Sequence[Part]], files: Sequence[WeightFile]
) -> None:
    """Raise if the parts of a tensor overlap or leave holes."""
    # Python's integers are used, since offsets come from a file and the product of large ones wouldn't fit a column.
    wrong: dict[str, str] = {}
    for key, kind in zip(columns.keys, columns.kinds, strict=True):
        size, stored = prod(kind.global_shape), sum(prod(part.kind.global_shape) for part in parts[key])
        if size > stored:
            wrong[key] = f"{size - stored} of {size} elements of shape {kind.global_shape} are in no file"
        elif size < stored:
            wrong[key] = "parts overlap"
    even = [number for number, key in enumerate(columns.keys) if key not in wrong]
    rows = np.flatnonzero(np.isin(columns.key, even))
    shared = shared_groups(columns.key[rows], columns.offset[rows], columns.shape[rows])
    wrong |= {columns.keys[number]: "parts overlap, and others are in no file" for number in shared.tolist()}
    if wrong:
        lines = (f"{key[:200]!r}: {reason} ({_names(parts[key], files)})" for key, reason in wrong.items())
        heading, count = f"open: the files in {where!r} have missing or overlapping parts of tensors", len(wrong)
        fix = "Copy every rank's file of one save, and move files of other saves away."
        raise CorruptCheckpoint(error_text(heading, offenders=lines, count=count, fix=fix))


def _names(parts: Sequence[Part], files: Sequence[WeightFile]) -> str:
    names = sorted({files[part.file].name for part in parts})
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _check_told(checkpoint: Checkpoint, index: Index) -> None:
    """Raise if ``LoadOptions(shapes=...)`` is not a dict of shapes, or the files' tensors do not have these shapes."""
    try:
        told = {str(key): tuple(map(int, shape)) for key, shape in (checkpoint.options.shapes or {}).items()}
    except (TypeError, ValueError, AttributeError):
        found, expected = repr(checkpoint.options.shapes)[:200], "a dict from keys to shapes, such as {'w': (4, 2)}"
        raise MetadataError(error_text("open: unusable LoadOptions.shapes", found=found, expected=expected)) from None
    numbers = dict(zip(told, index.find_keys(list(told)), strict=True))
    shapes = {key: index.kind(number).global_shape if number >= 0 else None for key, number in numbers.items()}
    wrong = [
        f"{key[:200]!r}: " + ("not stored" if shapes[key] is None else f"stored {shapes[key]}, expected {shape}")
        for key, shape in told.items()
        if shapes[key] != shape
    ]
    if wrong:
        heading = f"open: tensors in {checkpoint.storage.where()!r} differ from LoadOptions(shapes=...)"
        fix = "Copy any missing file of a rank, or correct the shapes if they belong to another model."
        raise CorruptCheckpoint(error_text(heading, offenders=wrong, fix=fix))


def load_sharded(checkpoint: Checkpoint, shards: Sequence[ShardedTensor]) -> ReadReport:
    """Fill each shard's data, a contiguous tensor, in place, and return a report of the reads.

    Raises:
        KeyMismatch: No file has a part of a tensor.
        ShapeError: A tensor has another shape or dtype than its target; or a target allows any shape, and
            ``LoadOptions(shapes=...)`` lacks the tensor's saved shape.
        UnsupportedValue: A tensor has a dtype that torch lacks.
        CorruptCheckpoint: The files aren't sound, or contradict each other.
    """
    contents = read_contents(checkpoint)
    check_taken(contents.refusals, [shard.key for shard in shards])
    if doubts := _doubts(checkpoint, contents, shards):
        lines = (f"{key!r}: {reason}" for key, reason in sorted(doubts.items()))
        heading = "load: the files do not say how large these tensors are, so a missing file would go unnoticed"
        fix = "Pass the saved shapes as LoadOptions(shapes=...)."
        raise ShapeError(error_text(heading, offenders=lines, fix=fix))
    if others := _other_shapes(checkpoint, contents, shards):
        lines = (f"{key!r}: {reason}" for key, reason in sorted(others.items()))
        fix = "Copy any missing file of a rank, or correct the target's shapes."
        raise ShapeError(error_text("load: the target's shapes differ from the stored ones", offenders=lines, fix=fix))
    return load_from_index(checkpoint, contents.index, shards)


def load_metadata(checkpoint: Checkpoint) -> IndexMetadata:
    """Return every stored tensor by its key, whole and without data; its shape follows from its parts."""
    contents = read_contents(checkpoint)
    return IndexMetadata(
        contents.index,
        untaken=contents.refusals,
        refused=lambda shards: {
            **contents.refusals,
            **_doubts(checkpoint, contents, shards),
            **_other_shapes(checkpoint, contents, shards),
        },
        unproven=dict.fromkeys(_with_axes(contents.index) - _told_keys(checkpoint), _UNPROVEN),
    )


def _with_axes(index: Index) -> set[str]:
    """Return the keys of the tensors that have axes.

    If the last parts of such a tensor are missing, the tensor merely seems smaller, and nothing shows the loss.
    """
    return {key for key, axes in zip(index.keys(), index.key_axes.tolist(), strict=True) if axes}


def _doubts(checkpoint: Checkpoint, contents: PartContents, shards: Sequence[ShardedTensor]) -> dict[str, str]:
    """Return the reasons, by key, that targets with `allow_shape_mismatch` cannot be loaded.

    The caller must give the shapes of such tensors as ``LoadOptions(shapes=...)``. Otherwise a tensor with missing
    parts would seem smaller, and would still fit the target.
    """
    padded = sorted({shard.key for shard in shards if shard.allow_shape_mismatch} - _told_keys(checkpoint))
    numbers = contents.index.find_keys(padded)
    return {key: _PADDED for key, number in zip(padded, numbers, strict=True) if number >= 0}


def _other_shapes(checkpoint: Checkpoint, contents: PartContents, shards: Sequence[ShardedTensor]) -> dict[str, str]:
    """Return messages, by key, about targets whose shape differs from the stored tensor's.

    Targets that allow a mismatch, and tensors whose shapes the caller gave, are left out. These messages replace the
    usual error, since that advises `allow_shape_mismatch`, which would hide the loss of a missing file's rows.
    """
    exact = {shard.key: shard.global_shape for shard in shards if not shard.allow_shape_mismatch}
    keys = sorted(exact.keys() - _told_keys(checkpoint))
    numbers = contents.index.find_keys(keys)
    stored = {key: number for key, number in zip(keys, numbers, strict=True) if number >= 0}
    made = {key: contents.index.kind(number).global_shape for key, number in stored.items()}
    return {
        key: f"stored {shape}, target {exact[key]}: a rank's file may be missing"
        for key, shape in made.items()
        if shape != exact[key]
    }


def _told_keys(checkpoint: Checkpoint) -> Set[str]:
    return (checkpoint.options.shapes or {}).keys()


def load_common(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the common state: {"__metadata__": strings in the files' headers}, or {} if there are no strings."""
    texts = read_contents(checkpoint).texts
    return {TEXTS: dict(texts)} if texts else {}


def verify(checkpoint: Checkpoint) -> tuple[Finding, ...]:
    """Return one `Damage` if the files do not form a checkpoint; otherwise report each file as `Unchecked`.

    The files have no checksums. Tensors that cannot be loaded are reported too.
    """
    try:
        contents = read_contents(checkpoint)
    except CheckpointingException as error:
        return (Damage("", str(error)),)
    names = zip(contents.index.file_names(), contents.index.file_length.tolist(), strict=True)
    return (*(Unchecked(name, _WHY, length) for name, length in names), *untaken_findings(contents.refusals))
