"""The end of a save: files get the names by which a model is recognised, the one that decides last of all."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence

from ...errors import AlreadyACheckpoint, error_text
from .._metadata import METADATA_FILE, replace_metadata
from .._values import Draft, Fields
from ..base import StrategyAction, register_default_strategy
from ._files import ModelFile
from ._names import BACKEND, INDEX_FILE, SINGLE_FILE, VERSION, draft_name, file_name

_MOVED = f"{BACKEND}.moved"

logger = logging.getLogger("shardtree")


@register_default_strategy(StrategyAction.COMMIT, BACKEND, VERSION)
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
