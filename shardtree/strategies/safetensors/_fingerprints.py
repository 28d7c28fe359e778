"""Fingerprints that a save stored, held against the tensors as they are read back."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from functools import partial

from ...errors import CheckpointingException
from ...fingerprints import add_fingerprints
from ...mapping import ShardedTensor
from .._findings import Damage
from .._stored_parts import stored_parts
from .._values import Checkpoint
from ..index import IndexMetadata, stored_fingerprints
from ._load import load_sharded, read_index


def fingerprint_damage(checkpoint: Checkpoint, name: str, damaged: Collection[str]) -> Iterator[Damage]:
    """Yield the tensors that don't have the fingerprints that were stored with them; none where none was stored.

    Their bytes may all be as they were written: this shows that they also lie where the index says.

    Args:
        checkpoint: of the native format.
        name: the index file's.
        damaged: keys whose bytes are known to be damaged; these aren't read again.
    """
    metadata = IndexMetadata(read_index(checkpoint))
    known = stored_fingerprints(metadata)
    tensors = [shard for key in known if key not in damaged and isinstance(shard := metadata[key], ShardedTensor)]
    # The blocks' hashes were looked at already.
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
