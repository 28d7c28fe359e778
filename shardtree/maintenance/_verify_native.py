"""Verifying a checkpoint of the library's own format."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from functools import partial

from ..core.fingerprints import add_fingerprints
from ..core.mapping import ShardedTensor
from ..errors import CheckpointingException
from ..shell.table import Checkpoint, Damage, Finding, checked_name
from ..shell.table.index import IndexMetadata, load_from_index, read_index, stored_fingerprints
from ._stored_parts import stored_parts
from ._verify_index import verify_index, whole_file_findings


def verify_files(checkpoint: Checkpoint) -> tuple[Finding, ...]:
    """Return the damage: of common state and index as wholes, data files by blocks, then tensors by fingerprints."""
    findings: list[Finding] = []
    if checkpoint.fields["common_backend"] == "safetensors":
        findings += whole_file_findings(checkpoint, "common")
    if checkpoint.fields["sharded_backend"] != "safetensors":
        return tuple(findings)
    findings += whole_file_findings(checkpoint, "index")
    if any(isinstance(one, Damage) and one.file == checked_name(checkpoint, "index") for one in findings):
        return tuple(findings)  # without the index, the data files' hashes aren't known
    files = verify_index(checkpoint, read_index)
    name = checked_name(checkpoint, "index")
    damaged_keys = {key for one in files if isinstance(one, Damage) for key in one.keys}
    if any(isinstance(one, Damage) and one.file == name for one in files):
        return (*findings, *files)  # it can't be read
    return (*findings, *files, *_fingerprint_damage(checkpoint, name, damaged_keys))


def _fingerprint_damage(checkpoint: Checkpoint, name: str, damaged_keys: Collection[str]) -> Iterator[Damage]:
    """Yield the tensors whose fingerprints aren't the ones that were stored with them; none if none was stored.

    All bytes may be as they were written: this shows that they also lie where the index says.

    Args:
        checkpoint: of the native format.
        name: the index file's.
        damaged_keys: keys whose bytes are known to be damaged; these aren't read again.
    """
    index = checkpoint.once(read_index)
    metadata = IndexMetadata(index)
    originals = stored_fingerprints(metadata)
    tensors = [
        shard for key in originals if key not in damaged_keys and isinstance(shard := metadata[key], ShardedTensor)
    ]
    # Not verified a second time: the blocks' hashes were checked just before.
    load = partial(load_from_index, replace(checkpoint, options=replace(checkpoint.options, verify=None)), index)
    try:
        fingerprints = add_fingerprints(stored_parts(tensors, load, threads=checkpoint.options.threads))
    except CheckpointingException as error:
        yield Damage(name, str(error))
        return
    for key in fingerprints:
        if fingerprints[key] != originals[key]:
            what = f"the elements have the fingerprint {fingerprints[key]:016x}, not the stored {originals[key]:016x}"
            yield Damage(name, what, keys=(key,))
