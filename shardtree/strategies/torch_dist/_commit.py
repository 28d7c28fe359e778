"""The last step: the index, and the file that makes a folder a checkpoint."""

from __future__ import annotations

import json

from .._metadata import METADATA_FILE
from .._values import Draft, Fields
from ..base import StrategyAction, register_default_strategy
from ._backends import DCP, INDEX_FILE, TORCH_DIST
from ._metadata_write import encode_index_file
from ._save_common import VALUES
from ._write import note
from ._write_collect import stored_by

_MEGATRON_FIELDS = ("sharded_backend", "sharded_backend_version", "common_backend", "common_backend_version")


@register_default_strategy(StrategyAction.COMMIT, *TORCH_DIST)
def commit(draft: Draft, fields: Fields) -> None:
    """Write the index, then metadata.json with the four fields that Megatron-Core takes, and no more."""
    stored, durable = stored_by(draft, TORCH_DIST[0]), draft.options.durable
    draft.storage.remove_folder(draft.save_id)
    draft.storage.replace(note(draft, INDEX_FILE), encode_index_file(stored, draft.save_id), durable=durable)
    # With another format's common state metadata.json has to say more, and isn't Megatron-Core's then.
    if fields["common_backend"] == "torch":
        data = json.dumps({name: fields[name] for name in _MEGATRON_FIELDS}).encode()
        draft.storage.replace(METADATA_FILE, data, durable=durable)


@register_default_strategy(StrategyAction.COMMIT, *DCP)
def commit_dcp(draft: Draft, fields: Fields) -> None:
    """Write the index, which makes the folder a checkpoint of torch.distributed.checkpoint."""
    stored, values = stored_by(draft, DCP[0]), draft.memo.get(VALUES, ())
    draft.storage.remove_folder(draft.save_id)
    # A sharded tensor's key is a name of its own, dots and all: it says nothing of dicts in dicts.
    paths = {key: (key,) for key in (*stored.columns.keys, *stored.objects)}
    paths |= {value.name: value.path for value in values}
    archives = {value.name: value.archive for value in values}
    data = encode_index_file(stored, draft.save_id, archives, paths)
    draft.storage.replace(INDEX_FILE, data, durable=draft.options.durable)
