"""Checking a native checkpoint: common state and index as wholes, data files by blocks, tensors by fingerprints."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from functools import partial

from ...errors import CheckpointingException, CorruptCheckpoint
from ...fingerprints import add_fingerprints
from ...mapping import ShardedTensor
from .._findings import Damage, Finding, stored_parts
from .._metadata import read_checked
from .._traits import METADATA_FILE
from .._values import Checkpoint
from ..index import IndexMetadata, index_name, load_from_index, read_index, stored_fingerprints, verify_index


def verify_files(checkpoint: Checkpoint) -> tuple[Finding, ...]:
    """Return what is damaged: common state and index as wholes, data files by blocks, then tensors by fingerprints."""
    found: list[Finding] = []
    if checkpoint.fields["common_backend"] == "safetensors":
        found += _whole(checkpoint, "common")
    if checkpoint.fields["sharded_backend"] != "safetensors":
        return tuple(found)
    damage = list(_whole(checkpoint, "index"))
    if damage:
        return (*found, *damage)  # without the index, the data files' hashes aren't known
    files = verify_index(checkpoint, read_index)
    name = index_name(checkpoint)
    damaged = {key for one in files if isinstance(one, Damage) for key in one.keys}
    if any(isinstance(one, Damage) and one.file == name for one in files):
        return (*found, *files)  # it can't be read
    return (*found, *files, *_fingerprint_damage(checkpoint, name, damaged))


def _whole(checkpoint: Checkpoint, field: str) -> Iterator[Damage]:
    try:
        data, _ = read_checked(checkpoint, field)
    except CorruptCheckpoint as error:
        entry = checkpoint.fields.get(field)
        yield Damage(str(entry.get("name")) if isinstance(entry, dict) else METADATA_FILE, str(error))
    else:
        checkpoint.options.progress(data.nbytes)


def _fingerprint_damage(checkpoint: Checkpoint, name: str, damaged: Collection[str]) -> Iterator[Damage]:
    """Yield the tensors whose fingerprints aren't the ones that were stored with them; none if none was stored.

    All bytes may be as they were written: this shows that they also lie where the index says.

    Args:
        checkpoint: of the native format.
        name: the index file's.
        damaged: keys whose bytes are known to be damaged; these aren't read again.
    """
    index = checkpoint.once(read_index)
    metadata = IndexMetadata(index)
    known = stored_fingerprints(metadata)
    tensors = [shard for key in known if key not in damaged and isinstance(shard := metadata[key], ShardedTensor)]
    # Not verified a second time: the blocks' hashes were checked just before.
    load = partial(load_from_index, replace(checkpoint, options=replace(checkpoint.options, verify=None)), index)
    try:
        found = add_fingerprints(stored_parts(tensors, load, threads=checkpoint.options.threads))
    except CheckpointingException as error:
        yield Damage(name, str(error))
        return
    for key in found:
        if found[key] != known[key]:
            what = f"the elements have the fingerprint {found[key]:016x}, not the stored {known[key]:016x}"
            yield Damage(name, what, keys=(key,))
