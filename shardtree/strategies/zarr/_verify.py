"""Checking a zarr folder of ours: every chunk file against its hashes, every zarr.json against the group's."""

from __future__ import annotations

from collections.abc import Iterator

from ...codec import canonical_json
from ...errors import CheckpointingException, CorruptCheckpoint
from .._checked import read_checked
from .._findings import Damage, Finding
from .._values import Checkpoint
from ..base import StrategyAction, register_default_strategy
from ..index import files_damage
from ._chunk_files import group_findings
from ._common import BACKEND, VERSION
from ._load import is_own, read_arrays
from ._remove import group_members
from ._v3 import NODE_FILE


@register_default_strategy(StrategyAction.VERIFY, BACKEND, VERSION)
def verify_files(checkpoint: Checkpoint) -> tuple[Finding, ...]:
    """Return what is damaged: small files as wholes, chunk files block by block.

    A file that several ranks wrote has no hashes, and neither have arrays of other programs: there what is missing or
    cut is seen, what can't be decoded, and what a codec's own checksum tells.
    """
    if not is_own(checkpoint.fields):
        try:
            return group_findings(checkpoint, read_arrays(checkpoint))
        except CheckpointingException as error:
            return (Damage("", str(error)),)
    found = [*_whole(checkpoint, "common"), *_documents(checkpoint)]
    try:
        index = read_arrays(checkpoint).index
    except CheckpointingException as error:
        # Without the index nobody knows the chunk files' hashes.
        return (*found, Damage(_name(checkpoint, "index"), str(error)))
    checkpoint.options.progress(int(checkpoint.fields["index"]["length"]))
    return (*found, *files_damage(checkpoint, index))


def _whole(checkpoint: Checkpoint, field: str) -> Iterator[Damage]:
    try:
        if field in checkpoint.fields:
            data, _ = read_checked(checkpoint, field)
            checkpoint.options.progress(data.nbytes)
    except CorruptCheckpoint as error:
        yield Damage(_name(checkpoint, field), str(error))


def _name(checkpoint: Checkpoint, field: str) -> str:
    entry = checkpoint.fields[field]
    return str(entry.get("name")) if isinstance(entry, dict) else ""


def _documents(checkpoint: Checkpoint) -> Iterator[Damage]:
    """Yield which zarr.json files differ from what the group's says of them."""
    damage = list(_whole(checkpoint, "group"))
    yield from damage
    if damage:
        return
    storage = checkpoint.storage
    for folder, document in group_members(checkpoint).items():
        name = f"{folder}/{NODE_FILE}"
        length = storage.length(name)
        if length is None or storage.read(name) != canonical_json(document):
            yield Damage(name, "the metadata of an array isn't what the group's zarr.json says of it")
        checkpoint.options.progress(length or 0)
