"""Saves of shards as archives in a file for each rank, for Megatron-Core's `torch_dist` and for plain DCP."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from ...errors import CheckpointingException, StrategyError, TreePath, error_text, render_path
from ...kit import (
    METADATA_FILE,
    AsyncRequest,
    Buffer,
    Column,
    Fields,
    PendingSave,
    ShardColumns,
    ShardedObject,
    ShardedTensor,
    Storage,
    abandoning,
    check_objects_written,
    check_seen,
    check_stored_shards,
    join_columns,
    remove_folder,
    select_rows,
)
from ..torch import COMMON_FILE, encode_with_holes
from ..torch import save_common as save_torch_common
from . import recognize
from ._common import check_names, named_values, without_hollow
from ._dict_kinds import KindsAt, kinds_of, with_kinds
from ._listing import DCP, META_FILE, TORCH_DIST
from ._metadata_file import INDEX_FILE
from ._metadata_write import Archive, WrittenContents, encode_index_file
from ._write import RankFile, data_file, file_layout, write_file

# This section combines and checks the parts of all ranks on rank 0, before any file refers to them.


def collect(storage: Storage, rank_files: Sequence[RankFile]) -> WrittenContents:
    """Return the contents of all ranks' files, which are given in the order of ranks, after checking them.

    Raises:
        StorageError: A file is missing or has another length than its rank wrote.
        IntegrityError: Ranks disagree about a tensor, two wrote the same element or object, or a tensor is named like
            an object.
    """
    for rank, part in enumerate(rank_files):
        check_seen(storage, () if part.file is None else [(part.file, part.file_length)], f"rank {rank}")
    columns = join_columns([part.columns for part in rank_files])
    check_stored_shards(columns)
    # A rank with nothing to write has no file, and no file number.
    number = np.cumsum([0, *(part.file is not None for part in rank_files)])
    file = np.concatenate([np.full(len(part.columns), base) for part, base in zip(rank_files, number, strict=False)])
    # Readers of DCP look up archives by key and offset, and would find either of two with the same.
    rows = _sorted_once(columns)
    return WrittenContents(
        select_rows(columns, rows),
        tuple(part.file for part in rank_files if part.file is not None),
        file[rows],
        np.concatenate([part.byte for part in rank_files])[rows],
        np.concatenate([part.length for part in rank_files])[rows],
        _objects(rank_files, columns.keys),
    )


def _sorted_once(columns: ShardColumns) -> Column:
    """Return the row numbers sorted by key and offset; of rows with the same key and offset, only the first stays."""
    # Only chunks without elements can repeat a place, and readers look up archives by place.
    order = np.lexsort((*columns.offset.T[::-1], columns.key))
    place = np.column_stack([columns.key, columns.offset])[order]
    again = np.zeros(order.size, dtype=np.bool_)
    again[1:] = (place[1:] == place[:-1]).all(axis=1)
    return order[~again]


def _objects(rank_files: Sequence[RankFile], keys: Sequence[str]) -> dict[str, Archive]:
    rows = sorted((key, part.file or "", byte, length) for part in rank_files for key, byte, length in part.objects)
    check_objects_written([row[0] for row in rows], keys)
    return {key: (file, byte, length) for key, file, byte, length in rows}


@dataclass(frozen=True, slots=True)
class StoredValue:
    """A plain value of the common state.

    Attributes:
        name: Path of the value, joined by dots.
        path: Path of the value in the common tree.
        archive: File, offset and length of the value's archive.
    """

    name: str
    path: TreePath
    archive: Archive


@dataclass(slots=True, eq=False)
class Saving:
    """State of a save on a rank, for the later steps of the save.

    Attributes:
        backend: Name of the shards' format: Megatron-Core's or DCP's.
        contents: Archives that all ranks have written; None until rank 0 has checked them.
        values: Plain values of the common state; empty until they are written.
        names: Names of the files that rank 0 has begun to write before the commit; a save that fails removes them.
    """

    backend: str
    contents: WrittenContents | None = None
    values: tuple[StoredValue, ...] = ()
    names: list[str] = field(default_factory=list)


def contents_by(pending: PendingSave, backend: str) -> tuple[Saving, WrittenContents]:
    """Return the state of a save and its shards' archives, after checking that the given backend wrote them.

    Raises:
        StrategyError: Another strategy wrote the shards.
    """
    state = pending.state
    if isinstance(state, Saving) and state.backend == backend and state.contents is not None:
        return state, state.contents
    fix = f"Pass sharded_strategy=({backend!r}, 1) too, or leave common_strategy out."
    heading = f"save: the common state is to be saved as {backend!r}, but the shards are saved in another format"
    raise StrategyError(error_text(heading, fix=fix))


_MEGATRON_FIELDS = ("sharded_backend", "sharded_backend_version", "common_backend", "common_backend_version")


def publish(pending: PendingSave, fields: Fields) -> None:
    """Write the index, then metadata.json with the four fields that Megatron-Core knows."""
    # There are no further fields, since Megatron-Core refuses a metadata.json with any other.
    (saving, contents), durable = contents_by(pending, TORCH_DIST[0]), pending.options.durable
    remove_folder(pending.storage, pending.save_id)
    saving.names.append(INDEX_FILE)
    # The index comes first: with metadata.json alone, Megatron-Core would open a folder that it can't read.
    pending.storage.replace(INDEX_FILE, encode_index_file(contents, pending.save_id), durable=durable)
    # Otherwise the caller writes metadata.json: with another format's common state it needs more fields, and
    # Megatron-Core can't read the checkpoint in any case.
    if fields["common_backend"] == "torch":
        data = json.dumps({name: fields[name] for name in _MEGATRON_FIELDS}).encode()
        pending.storage.replace(METADATA_FILE, data, durable=durable)


def publish_dcp(pending: PendingSave, fields: Fields) -> None:
    """Write the index, which makes the folder a checkpoint of torch.distributed.checkpoint."""
    saving, contents = contents_by(pending, DCP[0])
    remove_folder(pending.storage, pending.save_id)
    # Paths of shards have one entry: a key with dots may be a name or mean nested dicts, and doesn't show which.
    paths = {key: (key,) for key in (*contents.columns.keys, *contents.objects)}
    paths |= {value.name: value.path for value in saving.values}
    archives = {value.name: value.archive for value in saving.values}
    data = encode_index_file(contents, pending.save_id, archives, paths)
    pending.storage.replace(INDEX_FILE, data, durable=pending.options.durable)


def save_sharded(pending: PendingSave, shards: Sequence[ShardedTensor | ShardedObject]) -> AsyncRequest[RankFile]:
    """Prepare a rank's data file in Megatron-Core's format, and return the request that writes it."""
    return _request(pending, shards, TORCH_DIST[0])


def save_dcp_sharded(pending: PendingSave, shards: Sequence[ShardedTensor | ShardedObject]) -> AsyncRequest[RankFile]:
    """Prepare a rank's data file in DCP's format, and return the request that writes it.

    Raises:
        StrategyError: The folder has a common.pt or a meta.pt, so that it would be taken for a checkpoint of
            Megatron-Core or Lightning.
    """
    for name, program in ((COMMON_FILE, "Megatron-Core"), (META_FILE, "Lightning")):
        if pending.storage.length(name) is not None:
            heading = f"save: {pending.storage.where()!r} has the {name} of a checkpoint of {program}"
            raise StrategyError(
                error_text(heading, fix="Save to another folder, or remove the file if it is left over.")
            )
    return _request(pending, shards, DCP[0])


def _request(
    pending: PendingSave, shards: Sequence[ShardedTensor | ShardedObject], backend: str
) -> AsyncRequest[RankFile]:
    layout = file_layout(shards, pending.world.rank, allow_pickle=pending.options.allow_pickle)
    saving = Saving(backend)
    return AsyncRequest(
        world=pending.world,
        async_fn=partial(write_file, pending, layout),
        index=partial(_index, pending, saving),
        abandon=partial(_abandon, pending, saving.names),
        state=saving,
    )


def _index(pending: PendingSave, saving: Saving, rank_files: Sequence[RankFile]) -> Fields:
    """Check the files of all ranks, and keep their contents for the strategy's PUBLISH step, which writes the index."""
    saving.contents = collect(pending.storage, rank_files)
    return {}


def _abandon(pending: PendingSave, names: Sequence[str]) -> None:
    """Remove the files of a failed save, unless the folder has a checkpoint: this save's, or one made meanwhile."""
    # File names are fixed, so that they may belong to a checkpoint in the folder.
    storage = pending.storage
    with abandoning(storage.where()):
        if storage.length(METADATA_FILE) is not None or (INDEX_FILE not in names and recognize(storage) is not None):
            return
        # The index is removed first: while it exists, the folder may be recognised as a checkpoint.
        for name in (*sorted(names, key=INDEX_FILE.__ne__), data_file(pending.world.rank)):
            storage.remove(name)
        remove_folder(storage, pending.save_id)


# This section saves the common state: Megatron-Core's common.pt, or a file of plain values for DCP.


def save_common(pending: PendingSave, common: Any) -> Fields:
    """Write common.pt, and return the fields of metadata.json that name its format."""
    if isinstance(pending.state, Saving):  # Otherwise another format has the shards.
        pending.state.names.append(COMMON_FILE)
    return {**save_torch_common(pending, common), "common_backend": "torch", "common_backend_version": 1}


def save_dcp_common(pending: PendingSave, common: Any) -> Fields:
    """Write the common tree's plain values, each as an archive; the index will list them.

    Raises:
        UnsupportedValue: A value can't be stored.
        TreeError: Two values, or a value and a shard, have one name.
    """
    saving, contents = contents_by(pending, DCP[0])
    shard_keys = {*contents.columns.keys, *contents.objects}
    plain_values = without_hollow(named_values(common), shard_keys)
    check_names(plain_values, shard_keys)
    kinds = kinds_of(common, {name: path for name, (path, _) in plain_values.items()})
    data_of = {name: _encode(path, value, kinds.get(name, ()), pending) for name, (path, value) in plain_values.items()}
    # The values need a second file of rank 0, since its first one was written before.
    file, byte, values = data_file(0, 1), 0, []
    for name, data in data_of.items():
        values.append(StoredValue(name, plain_values[name][0], (file, byte, len(data))))
        byte += len(data)
    if values:
        saving.names.append(file)
        pending.storage.write(file, _buffers(data_of), durable=pending.options.durable)
    saving.values = tuple(values)
    return {"common_backend": DCP[0], "common_backend_version": DCP[1]}


def _encode(path: TreePath, value: Any, kinds: KindsAt, pending: PendingSave) -> bytes:
    allow_pickle = pending.options.allow_pickle
    try:
        return with_kinds(encode_with_holes(value, allow_pickle=allow_pickle), kinds, allow_pickle=allow_pickle)
    except CheckpointingException as error:
        error.add_note(f"tree is the value at {render_path(path, 'common')}")
        raise


def _buffers(data_of: dict[str, bytes]) -> Iterator[Buffer]:
    return map(memoryview, data_of.values())
