"""Verification of a checkpoint in the library's own format."""

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
    """Return the findings about the common state, the index, the data files' blocks, and the tensors' fingerprints."""
    findings: list[Finding] = []
    if checkpoint.fields["common_backend"] == "safetensors":
        findings += whole_file_findings(checkpoint, "common")
    if checkpoint.fields["sharded_backend"] != "safetensors":
        return tuple(findings)
    findings += whole_file_findings(checkpoint, "index")
    if any(isinstance(finding, Damage) and finding.file == checked_name(checkpoint, "index") for finding in findings):
        return tuple(findings)  # without the index, the data files' hashes aren't known
    files = verify_index(checkpoint, read_index)
    name = checked_name(checkpoint, "index")
    damaged_keys = {key for finding in files if isinstance(finding, Damage) for key in finding.keys}
    if any(isinstance(finding, Damage) and finding.file == name for finding in files):
        return (*findings, *files)  # the index can't be read
    return (*findings, *files, *_fingerprint_damage(checkpoint, name, damaged_keys))


def _fingerprint_damage(checkpoint: Checkpoint, name: str, damaged_keys: Collection[str]) -> Iterator[Damage]:
    """Yield damage of tensors whose fingerprints differ from the stored ones, if fingerprints were stored.

    Unlike hashes of bytes, fingerprints also show whether elements lie where the index says.

    Args:
        checkpoint: Checkpoint in the native format.
        name: Name of the index's file.
        damaged_keys: Keys whose bytes are known to be damaged; they aren't read again.
    """
    index = checkpoint.once(read_index)
    metadata = IndexMetadata(index)
    originals = stored_fingerprints(metadata)
    tensors = [
        shard for key in originals if key not in damaged_keys and isinstance(shard := metadata[key], ShardedTensor)
    ]
    # Hashes aren't compared a second time: the blocks were checked just before.
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
