"""Removing tensors and objects from a saved checkpoint: a new index first, then the files that it needs no more."""

from __future__ import annotations

import re
from dataclasses import replace

from ...storage import Storage
from .._checked import write_checked
from .._metadata import read_metadata, replace_metadata
from .._save_folders import is_save_file
from .._values import Checkpoint
from ..base import StrategyAction, register_default_strategy
from ..index import texts, without_prefix
from ._index_file import encode_index
from ._load import read_index
from ._save import BACKEND, VERSION

_INDEX = re.compile(r"index-(\d{1,9})\.safetensors")


@register_default_strategy(StrategyAction.REMOVE_SHARDED, BACKEND, VERSION)
def remove_sharded(checkpoint: Checkpoint, key_prefix: str) -> None:
    """Remove every stored tensor and object whose key begins with a prefix, and the data files that become unused."""
    before, fields = read_metadata(checkpoint.storage)
    old = read_index(replace(checkpoint, fields=fields))
    new = without_prefix(old, key_prefix)
    if new is old:
        return
    old_name = fields["index"]["name"]
    name = _next_name(checkpoint.storage, old_name)
    fields["index"] = write_checked(checkpoint.storage, name, encode_index(new), durable=True)
    checkpoint.storage.sync_folder(name.rpartition("/")[0])
    replace_metadata(checkpoint.storage, before, fields, durable=True)
    unused = set(texts(old.file_text, old.file_start)) - set(texts(new.file_text, new.file_start))
    for file in (*sorted(unused), old_name):
        # An index may have been made by somebody else: what no save wrote stays.
        if is_save_file(file):
            checkpoint.storage.remove(file)


def _next_name(storage: Storage, name: str) -> str:
    """Return the name of the index that follows the one of this name."""
    folder, slash, _ = name.rpartition("/")
    numbers = (_INDEX.fullmatch(other) for other in storage.names(folder))
    number = max((int(found[1]) for found in numbers if found), default=0)
    return f"{folder}{slash}index-{number + 1}.safetensors"
