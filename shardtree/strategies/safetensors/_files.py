"""The files of a native checkpoint: listing them, checking every byte against its hash, and removing tensors."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import replace
from functools import partial

from ...errors import CheckpointingException, CorruptCheckpoint
from ...fingerprints import add_fingerprints
from ...mapping import ShardedTensor
from ...storage import Storage
from .._findings import Damage, Finding, stored_parts
from .._metadata import METADATA_FILE, read_checked, read_metadata, replace_metadata, write_checked
from .._save_folders import is_save_file
from .._values import Checkpoint
from ..index import IndexMetadata, files_damage, stored_fingerprints, texts, without_prefix
from ._load import encode_index, load_sharded, read_index
from ._save import BACKEND

# Comparing stored fingerprints with the tensors that are read back


def fingerprint_damage(checkpoint: Checkpoint, name: str, damaged: Collection[str]) -> Iterator[Damage]:
    """Yield the tensors whose fingerprints aren't the ones that were stored with them; none if none was stored.

    All bytes may be as they were written: this shows that they also lie where the index says.

    Args:
        checkpoint: of the native format.
        name: the index file's.
        damaged: keys whose bytes are known to be damaged; these aren't read again.
    """
    metadata = IndexMetadata(read_index(checkpoint))
    known = stored_fingerprints(metadata)
    tensors = [shard for key in known if key not in damaged and isinstance(shard := metadata[key], ShardedTensor)]
    # Not verified a second time: the blocks' hashes were checked just before.
    load = partial(load_sharded, replace(checkpoint, options=replace(checkpoint.options, verify=None)))
    try:
        found = add_fingerprints(stored_parts(tensors, load, threads=checkpoint.options.threads))
    except CheckpointingException as error:
        yield Damage(name, str(error))
        return
    for key in found:
        if found[key] != known[key]:
            what = f"the elements have the fingerprint {found[key]:016x}, not the stored {known[key]:016x}"
            yield Damage(name, what, keys=(key,))


# Checking a whole checkpoint against its hashes: every byte of every file


def verify_files(checkpoint: Checkpoint) -> tuple[Finding, ...]:
    """Return what is damaged: common state and index as wholes, data files by blocks, then tensors by fingerprints."""
    found: list[Finding] = []
    if checkpoint.fields["common_backend"] == BACKEND:
        found += _whole(checkpoint, "common")
    if checkpoint.fields["sharded_backend"] != BACKEND:
        return tuple(found)
    damage = list(_whole(checkpoint, "index"))
    if damage:
        return (*found, *damage)  # the data files' hashes are in the index
    try:
        index = read_index(checkpoint)
    except CorruptCheckpoint as error:
        return (*found, Damage(_name(checkpoint, "index"), str(error)))
    found += files_damage(checkpoint, index)
    damaged = {key for one in found if isinstance(one, Damage) for key in one.keys}
    return (*found, *fingerprint_damage(checkpoint, _name(checkpoint, "index"), damaged))


def _whole(checkpoint: Checkpoint, field: str) -> Iterator[Damage]:
    try:
        data, _ = read_checked(checkpoint, field)
    except CorruptCheckpoint as error:
        yield Damage(_name(checkpoint, field), str(error))
    else:
        checkpoint.options.progress(data.nbytes)


def _name(checkpoint: Checkpoint, field: str) -> str:
    entry = checkpoint.fields.get(field)
    return str(entry.get("name")) if isinstance(entry, dict) else METADATA_FILE


# Removing tensors and objects from a saved checkpoint: a new index first, then the files that became unused. Data files
# are never rewritten, so that every moment has one whole checkpoint.

_INDEX = re.compile(r"index-(\d{1,9})\.safetensors")


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
        # Guards against a crafted index that names other files: only names that a save gives are removed.
        if is_save_file(file):
            checkpoint.storage.remove(file)


def _next_name(storage: Storage, name: str) -> str:
    """Return the name of the index that follows the one of this name."""
    folder, slash, _ = name.rpartition("/")
    numbers = (_INDEX.fullmatch(other) for other in storage.names(folder))
    number = max((int(found[1]) for found in numbers if found), default=0)
    return f"{folder}{slash}index-{number + 1}.safetensors"


# Listing the files of a native checkpoint


def list_files(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return the names of the files of a save's folder that a save writes."""
    folder = checkpoint.fields.get("save_id")
    names = checkpoint.storage.names(folder) if isinstance(folder, str) and folder else ()
    return tuple(name for name in (f"{folder}/{last}" for last in names) if is_save_file(name))
