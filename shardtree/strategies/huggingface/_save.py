"""Saving as a Hugging Face model: all ranks write whole tensors together, each the runs of its shards."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import Any

from ...errors import (
    AlreadyACheckpoint,
    MetadataError,
    StorageError,
    StrategyError,
    UnsupportedValue,
    error_text,
    render_path,
)
from ...layouts import ShardColumns, check_access
from ...mapping import ShardedObject, ShardedTensor
from ...storage import Buffer
from ...trees import HOLE, leaves_with_paths
from .._actions import SaveSharded
from .._metadata import METADATA_FILE, replace_metadata
from .._values import AsyncRequest, Draft, Fields
from ._layout import ModelFile, model_files, shard_pieces
from ._listing import BACKEND, INDEX_FILE, SINGLE_FILE, draft_name, file_name

# The end of a save: files get the names by which a model is recognised, the one that decides last of all.

_MOVED = f"{BACKEND}.moved"

logger = logging.getLogger("shardtree")


def commit(draft: Draft, fields: Fields) -> None:
    """Make a folder a model: its files get their names, then the index is written; a single file needs none.

    Where another format keeps the common state, metadata.json comes before the index: with it all is there.
    """
    files: Sequence[ModelFile] = draft.memo[BACKEND]
    count = len(files)
    alone = fields["common_backend"] == BACKEND
    if alone and count == 1:
        draft.storage.move(draft_name(draft.save_id, 0, 1), SINGLE_FILE)
        _sync(draft)
        return
    moved: list[str] = draft.memo.setdefault(_MOVED, [])
    for number in range(count):
        draft.storage.move(draft_name(draft.save_id, number, count), file_name(number, count))
        moved.append(file_name(number, count))
    _sync(draft)
    if not alone:
        named = {**fields, "tensor_files": list(moved)}
        replace_metadata(draft.storage, draft.before, named, durable=draft.options.durable)
    draft.storage.replace(INDEX_FILE, index_json(files), durable=draft.options.durable)


def _sync(draft: Draft) -> None:
    """Wait for the files' new names, and then for the old ones to go."""
    if draft.options.durable:
        draft.storage.sync_folder()
        draft.storage.sync_folder(draft.save_id)


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


def check_free(draft: Draft, files: Sequence[ModelFile]) -> None:
    """Raise where a file is in the way that belongs to no model: we write over nothing that isn't ours.

    Raises:
        AlreadyACheckpoint: names the files.
    """
    names = (file_name(number, len(files)) for number in range(len(files)))
    there = [draft.storage.where(name) for name in names if draft.storage.length(name) is not None]
    if there:
        what = "save: files of a model without an index are in the way"
        raise AlreadyACheckpoint(error_text(what, offenders=there, fix="Remove them, or save to another folder."))


def abandon(draft: Draft, files: Sequence[ModelFile]) -> None:
    """Remove what a save that failed has written, unless it is a model already. Never raises."""
    if draft.world.rank != 0:
        return
    try:
        for number in range(len(files)):
            draft.storage.remove(draft_name(draft.save_id, number, len(files)))
        draft.storage.remove_folder(draft.save_id)
        if not any(draft.storage.length(name) is not None for name in (INDEX_FILE, METADATA_FILE)):
            for name in draft.memo.pop(_MOVED, []):
                draft.storage.remove(name)
    except Exception as error:
        # The save's own error is on its way; what stays is removed by a later save.
        logger.warning("save: what a failed save wrote stays in %s: %s", draft.storage.where(draft.save_id), error)


MAX_FILE_BYTES = 5 * 10**9
"""The most bytes of tensors in one file, as the tools of the Hub have it."""

_TOLD_BYTES = 1024 * 1024

_BESIDE = "name common_strategy=('safetensors', 1), which keeps them in files of their own beside the model"


def save_sharded_up_to(max_file_bytes: int) -> SaveSharded:
    """Return the function that saves shards as a model with files of at most that many bytes of tensors.

    Args:
        max_file_bytes: a file with a single tensor may be larger.

    Raises:
        MetadataError: that is no number of bytes.

    Examples:
        >>> import shardtree as st
        >>> from shardtree.strategies import StrategyAction, default_strategies
        >>> row = (StrategyAction.SAVE_SHARDED, "huggingface", 1)
        >>> table = default_strategies | {row: save_sharded_up_to(2 * 10**9)}
    """
    if type(max_file_bytes) is not int or max_file_bytes < 1:
        found = f"{max_file_bytes!r}"[:200]
        raise MetadataError(error_text("huggingface: max_file_bytes", found=found, expected="a positive int, in bytes"))
    return partial(_prepare, max_file_bytes)


def save_sharded(draft: Draft, shards: Sequence[ShardedTensor | ShardedObject]) -> AsyncRequest[None]:
    """Prepare the parts of the model's files that a rank's shards are, and return the request that writes them.

    Raises:
        UnsupportedValue: there are objects, or dtypes that safetensors files don't have.
        StrategyError: ranks didn't tell each other what they hold.
        IntegrityError: shards don't tile their tensors.
    """
    return _prepare(MAX_FILE_BYTES, draft, shards)


def save_common(draft: Draft, common: Any) -> Fields:
    """Refuse a common state, which a model's files can't hold; an empty one is fine.

    Raises:
        UnsupportedValue: names every value by its path.
    """
    paths = [render_path(path) for path, leaf in leaves_with_paths(common) if leaf is not HOLE]
    if paths:
        what = "save: a Hugging Face model holds tensors only, not these values"
        raise UnsupportedValue(error_text(what, offenders=paths, fix=f"Leave them out of the tree, or {_BESIDE}."))
    return {}


def _prepare(max_file_bytes: int, draft: Draft, shards: Sequence[ShardedTensor | ShardedObject]) -> AsyncRequest[None]:
    objects = [repr(shard.unique_key) for shard in shards if isinstance(shard, ShardedObject)]
    if objects:
        what = "save: a Hugging Face model holds tensors only, not these objects"
        raise UnsupportedValue(error_text(what, offenders=objects, fix=f"Leave them out of the tree, or {_BESIDE}."))
    columns = _layout(draft)
    files = model_files(dict(zip(columns.keys, columns.kinds, strict=True)), max_file_bytes=max_file_bytes)
    draft.memo[BACKEND] = files
    tensors = [shard for shard in shards if isinstance(shard, ShardedTensor)]
    return AsyncRequest(
        world=draft.world,
        async_fn=partial(_write, draft, files, tensors),
        commit=partial(_check_lengths, draft, files),
        abandon=partial(abandon, draft, files),
    )


def _layout(draft: Draft) -> ShardColumns:
    """Return all ranks' shards, which are known to tile their tensors."""
    if draft.layout is None:
        what = "save: a Hugging Face model's files are written together, and the ranks don't know each other's shards"
        raise StrategyError(error_text(what, fix="Leave validate_access_integrity on."))
    if draft.world.size == 1:
        check_access(draft.layout)  # more ranks have done so where they told each other
    return draft.layout


def _write(draft: Draft, files: Sequence[ModelFile], shards: Sequence[ShardedTensor]) -> None:
    if draft.world.rank == 0:
        check_free(draft, files)
    # A request may be tried again after its folder was removed.
    draft.storage.make_folder(draft.save_id, durable=draft.options.durable)
    file_of = {key: number for number, file in enumerate(files) for key in file.bytes_before}
    rows = sorted(shards, key=lambda shard: (file_of[shard.key], *_place(shard, files[file_of[shard.key]])))
    own = {number: list(group) for number, group in groupby(rows, lambda shard: file_of[shard.key])}
    for number, file in enumerate(files):
        if draft.world.rank == 0 or number in own:
            parts = _with_progress(_parts(draft, file, own.get(number, [])), draft)
            name = draft_name(draft.save_id, number, len(files))
            draft.storage.write_parts(name, file.length, parts, durable=draft.options.durable)


def _place(shard: ShardedTensor, file: ModelFile) -> tuple[Any, ...]:
    """Return what shards of a file are sorted by: where their first element lies."""
    start = 0 if shard.flattened_range is None else shard.flattened_range.start
    return file.bytes_before[shard.key], shard.global_offset, start


def _parts(draft: Draft, file: ModelFile, shards: Sequence[ShardedTensor]) -> Iterator[tuple[int, Buffer]]:
    if draft.world.rank == 0:
        yield 0, memoryview(file.header)
    for shard in shards:
        yield from shard_pieces(shard, file.bytes_before[shard.key])


def _with_progress(parts: Iterator[tuple[int, Buffer]], draft: Draft) -> Iterator[tuple[int, Buffer]]:
    untold = 0
    for byte, buffer in parts:
        yield byte, buffer
        untold += buffer.nbytes
        if untold >= _TOLD_BYTES:
            draft.options.progress(untold)
            untold = 0
    if untold:
        draft.options.progress(untold)


def _check_lengths(draft: Draft, files: Sequence[ModelFile], results: Sequence[None]) -> Fields:
    """Raise unless rank 0 sees the files that all ranks wrote."""
    for number, file in enumerate(files):
        name = draft_name(draft.save_id, number, len(files))
        found = draft.storage.length(name)
        if found != file.length:
            what = f"save: rank 0 doesn't see {draft.storage.where(name)!r} as it was written"
            fix = "Every rank must see the same folder; use shared storage."
            raise StorageError(error_text(what, found=found, expected=f"{file.length} bytes", fix=fix))
    return {}
