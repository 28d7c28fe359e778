"""Saves as a Hugging Face model: all ranks write to the same files, each rank the byte ranges of its own shards.

Otherwise one rank would have to gather whole tensors, or files would be written twice.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np

from ...errors import (
    AlreadyACheckpoint,
    IntegrityError,
    MetadataError,
    StrategyError,
    UnsupportedValue,
    error_text,
    render_path,
)
from ...kit import (
    METADATA_FILE,
    AsyncRequest,
    Buffer,
    Fields,
    PendingSave,
    ShardColumns,
    ShardedObject,
    ShardedTensor,
    Strategy,
    abandoning,
    as_int,
    can,
    canonical_json,
    check_access,
    check_seen,
    digest,
    level_writes,
    make_folder,
    move,
    remove_folder,
    replace_metadata,
    sync_folder,
    write_parts,
)
from ._layout import ModelFile, model_files, shard_pieces
from ._listing import BACKEND, INDEX_FILE, SINGLE_FILE, VERSION, draft_name, file_name
from ._texts import TEXTS, header_texts, paths_without_room

# To publish, files get the names by which a model is recognised; the name that makes it a model comes last.


@dataclass(frozen=True, slots=True)
class Model:
    """The files of a model, and the ranks that write their headers.

    Attributes:
        files: Layouts of the files.
        file_of: Number of each tensor's file, by key.
        head_writer: Rank that writes the header, by the file's number.
    """

    files: tuple[ModelFile, ...]
    file_of: Mapping[str, int]
    head_writer: tuple[int, ...]


@dataclass(slots=True, eq=False)
class ModelSaving:
    """Plan and progress of a save, kept until the save is published or abandoned.

    Attributes:
        model: Model that all ranks write.
        final_names: Names of the files that were renamed to their final names; a save that fails removes these files.
    """

    model: Model
    final_names: list[str] = field(default_factory=list)


def publish(pending: PendingSave, fields: Fields) -> None:
    """Make a folder a model: rename its files, then write the index, which a model of a single file doesn't need.

    If another format stores the common state, metadata.json is written before the index, and commits the save. There is
    then an index even for a single file.
    """
    saving: ModelSaving = pending.state
    files, final_names = saving.model.files, saving.final_names
    count = len(files)
    alone = fields["common_backend"] == BACKEND
    if alone and count == 1:
        move(pending.storage, draft_name(pending.save_id, 0, 1), SINGLE_FILE)
        _sync(pending)
        return
    for number in range(count):
        move(pending.storage, draft_name(pending.save_id, number, count), file_name(number, count))
        final_names.append(file_name(number, count))
    _sync(pending)
    if not alone:
        all_fields = {**fields, "tensor_files": list(final_names)}
        replace_metadata(pending.storage, pending.before, all_fields, durable=pending.options.durable)
    pending.storage.replace(INDEX_FILE, index_json(files), durable=pending.options.durable)


def _sync(pending: PendingSave) -> None:
    """Make renames durable: sync the folder of the new names, then the folder of the old ones."""
    # After a power failure in this order, a file may have both names, but not none.
    if pending.options.durable:
        sync_folder(pending.storage)
        sync_folder(pending.storage, pending.save_id)


def index_json(files: Sequence[ModelFile]) -> bytes:
    """Return the index of a model of several files.

    Examples:
        >>> file = ModelFile(bytes(8), 12, {"w": 8})
        >>> json.loads(index_json([file]))
        {'metadata': {'total_size': 4}, 'weight_map': {'w': 'model-00001-of-00001.safetensors'}}
    """
    weight_map = {key: file_name(number, len(files)) for number, file in enumerate(files) for key in file.bytes_before}
    total = sum(file.length - len(file.header) for file in files)
    value = {"metadata": {"total_size": total}, "weight_map": weight_map}
    return (json.dumps(value, indent=2, sort_keys=True) + "\n").encode("ascii")


def check_free(pending: PendingSave, files: Sequence[ModelFile]) -> None:
    """Raise if the folder already has files with names of the new model's files, from another program or a killed save.

    Raises:
        AlreadyACheckpoint: There are such files; the error names them.
    """
    # They may belong to another program, or to a save that was killed between its renames; the names don't tell.
    names = (file_name(number, len(files)) for number in range(len(files)))
    existing = [pending.storage.where(name) for name in names if pending.storage.length(name) is not None]
    if existing:
        heading = "save: the folder already has files with the names that this save would write, but no index of them"
        fix = "Move them away, or save to another folder."
        raise AlreadyACheckpoint(error_text(heading, offenders=existing, fix=fix))


def abandon(pending: PendingSave, saving: ModelSaving) -> None:
    """Remove the files of a failed save, unless it is committed already. Never raises."""
    if pending.world.rank != 0:
        return
    files = saving.model.files
    with abandoning(pending.storage.where(pending.save_id)):
        for number in range(len(files)):
            pending.storage.remove(draft_name(pending.save_id, number, len(files)))
        remove_folder(pending.storage, pending.save_id)
        if not any(pending.storage.length(name) is not None for name in (INDEX_FILE, METADATA_FILE)):
            while saving.final_names:
                pending.storage.remove(saving.final_names.pop())


MAX_FILE_BYTES = 5 * 10**9
"""Upper bound of the bytes of tensors in a file, as in the tools of the Hub."""

_NATIVE_COMMON = "pass common_strategy=('safetensors', 1), which stores them in other files beside the model"


def save_sharded_up_to(max_file_bytes: int) -> Strategy:
    """Return a strategy that saves shards as a model, with a limit on the bytes of tensors in a file.

    Args:
        max_file_bytes: Upper bound of the bytes of tensors in a file; a file with a single tensor may be larger.

    Raises:
        MetadataError: `max_file_bytes` is not a positive int.

    Examples:
        >>> import shardtree as st
        >>> from shardtree.strategies import StrategyAction, default_strategies
        >>> row = (StrategyAction.SAVE_SHARDED, "huggingface", 1)
        >>> table = default_strategies | {row: save_sharded_up_to(2 * 10**9)}
    """
    most_bytes = as_int(max_file_bytes)
    if most_bytes is None or most_bytes < 1:
        found = f"{max_file_bytes!r}"[:200]
        heading = "huggingface: unusable max_file_bytes"
        raise MetadataError(error_text(heading, found=found, expected="a positive int, in bytes"))
    return partial(_prepare, most_bytes)


def save_sharded(pending: PendingSave, shards: Sequence[ShardedTensor | ShardedObject]) -> AsyncRequest[str]:
    """Prepare a rank's parts of the model's files, and return the request that writes them.

    Raises:
        UnsupportedValue: There are objects, or dtypes that safetensors files can't have.
        StrategyError: Ranks didn't exchange their layouts.
        IntegrityError: Shards don't tile their tensors.
        MetadataError: Strings beside the tensors are too long for a header.
    """
    return _prepare(MAX_FILE_BYTES, pending, shards)


def save_common(pending: PendingSave, common: Any) -> Fields:
    """Refuse a common state that the model's files cannot hold: they only have room for strings under ``__metadata__``.

    Nothing is written, since each file's header already has these strings.

    Raises:
        UnsupportedValue: There are other values, which the error names by their paths.
        StrategyError: Another format has the shards, so that there is no model with headers.
    """
    if paths := paths_without_room(common):
        heading = f"save: a Hugging Face model only stores tensors and the strings in tree[{TEXTS!r}], not these values"
        fix = f"Leave them out of the tree, or {_NATIVE_COMMON}."
        raise UnsupportedValue(error_text(heading, offenders=map(render_path, paths), fix=fix))
    if not isinstance(pending.state, ModelSaving):
        heading = f"save: the common state is to be saved as {BACKEND!r}, but the shards are saved in another format"
        fix = f"Pass sharded_strategy=({BACKEND!r}, {VERSION}) too, or common_strategy=('safetensors', 1)."
        raise StrategyError(error_text(heading, fix=fix))
    return {}


def _prepare(
    max_file_bytes: int, pending: PendingSave, shards: Sequence[ShardedTensor | ShardedObject]
) -> AsyncRequest[str]:
    objects = [repr(shard.unique_key) for shard in shards if isinstance(shard, ShardedObject)]
    if objects:
        heading = "save: a Hugging Face model can only have tensors, not these objects"
        raise UnsupportedValue(
            error_text(heading, offenders=objects, fix=f"Leave them out of the tree, or {_NATIVE_COMMON}.")
        )
    if isinstance(pending.state, ModelSaving):  # This process also plays another rank, which made the model.
        model = pending.state.model
    else:
        is_whole = can(pending.storage).write_parts is None and pending.world.size > 1
        ranks = pending.world.size if is_whole else None
        model = _model(_layout(pending), max_file_bytes, ranks, header_texts(pending.common))
    saving = ModelSaving(model)
    tensors = [shard for shard in shards if isinstance(shard, ShardedTensor)]
    return AsyncRequest(
        world=pending.world,
        async_fn=partial(_write, pending, model, tensors),
        index=partial(_check_written, pending, model.files),
        abandon=partial(abandon, pending, saving),
        state=saving,
    )


def _model(columns: ShardColumns, max_file_bytes: int, ranks: int | None, texts: Mapping[str, str]) -> Model:
    """Return the layouts of a model's files, and the ranks that write their headers.

    Args:
        columns: Shards of all ranks.
        max_file_bytes: Upper bound of the bytes of tensors in a file.
        ranks: Number of ranks, if each file must belong to one of them; None if they may share files.
        texts: Strings, by name, that each file's header gets.
    """
    kinds, writers = dict(zip(columns.keys, columns.kinds, strict=True)), None
    if ranks is not None:
        writers = _writers(columns, ranks)
        kinds = {key: kinds[key] for key in sorted(kinds, key=writers.__getitem__)}
    files = model_files(kinds, max_file_bytes=max_file_bytes, writers=writers, texts=texts)
    file_of = {key: number for number, file in enumerate(files) for key in file.bytes_before}
    heads = tuple(max((writers[key] for key in file.bytes_before), default=0) if writers else 0 for file in files)
    return Model(files, file_of, heads)


def _writers(columns: ShardColumns, ranks: int) -> dict[str, int]:
    """Return the first rank that writes a part of each tensor, by key; 0 for tensors that no rank writes."""
    rows = np.flatnonzero(level_writes(columns, ranks))
    # Rows are reversed, since a key's last one counts. The storage's error says why only one rank can write a tensor.
    writers = dict(zip(columns.key[rows][::-1].tolist(), columns.rank[rows][::-1].tolist(), strict=True))
    return {key: writers.get(number, 0) for number, key in enumerate(columns.keys)}


def _layout(pending: PendingSave) -> ShardColumns:
    """Return the shards of all ranks, after checking that they tile their tensors."""
    if pending.layout is None:
        heading = "save: a Hugging Face model's files need all ranks' layouts, which are not exchanged"
        fix = "Save with validate_access_integrity=True, so that ranks exchange their layouts."
        raise StrategyError(error_text(heading, fix=fix))
    if pending.world.size == 1:
        check_access(pending.layout)  # Several ranks have checked this when they exchanged their layouts.
    return pending.layout


def _write(pending: PendingSave, model: Model, shards: Sequence[ShardedTensor]) -> str:
    """Write this rank's parts, and return a hash of the rank's strings for headers; rank 0 compares all hashes."""
    files, rank = model.files, pending.world.rank
    if rank == 0:
        check_free(pending, files)
    # The folder is made again, since an abandoned request, whose folder was removed, may run once more.
    make_folder(pending.storage, pending.save_id, durable=pending.options.durable)
    # Shards are sorted by offset, so that each file is written from front to back.
    file_of = model.file_of
    rows = sorted(shards, key=lambda shard: (file_of[shard.key], *_place(shard, files[file_of[shard.key]])))
    by_file = {number: list(group) for number, group in groupby(rows, lambda shard: file_of[shard.key])}
    for number, file in enumerate(files):
        has_head = model.head_writer[number] == rank
        if has_head or number in by_file:
            parts, options = _parts(file, by_file.get(number, []), has_head=has_head), pending.options
            name = draft_name(pending.save_id, number, len(files))
            write_parts(pending.storage, name, file.length, parts, durable=options.durable, progress=options.progress)
    return digest(canonical_json(header_texts(pending.common)))


def _place(shard: ShardedTensor, file: ModelFile) -> tuple[Any, ...]:
    """Return a sort key that puts the shards of a file into the order of their first elements."""
    start = 0 if shard.flattened_range is None else shard.flattened_range.start
    return file.bytes_before[shard.key], shard.global_offset, start


def _parts(file: ModelFile, shards: Sequence[ShardedTensor], *, has_head: bool) -> Iterator[tuple[int, Buffer]]:
    if has_head:
        yield 0, memoryview(file.header)
    for shard in shards:
        yield from shard_pieces(shard, file.bytes_before[shard.key])


def _check_written(pending: PendingSave, files: Sequence[ModelFile], hashes: Sequence[str]) -> Fields:
    """Check that all ranks have the same strings for the headers, and that rank 0 sees all files; return {}.

    The result stands for the fields that a format adds to metadata.json; this format adds none.
    """
    others = [f"rank {rank}" for rank, rank_hash in enumerate(hashes) if rank_hash != hashes[0]]
    # Ranks may differ in values that save's `preprocess_common_before_consistancy_check` leaves out.
    if others:
        heading = f"save: ranks disagree with rank 0 about the strings of {TEXTS!r}, which every file's header has"
        raise IntegrityError(error_text(heading, offenders=others, fix="Give all ranks the same strings."))
    names = (draft_name(pending.save_id, number, len(files)) for number in range(len(files)))
    check_seen(pending.storage, zip(names, (file.length for file in files), strict=True), "the ranks")
    return {}
