"""Checking a whole checkpoint against its hashes: every byte of every file."""

from __future__ import annotations

from ...errors import CorruptCheckpoint
from .._checked import read_checked
from .._metadata import METADATA_FILE
from .._values import Checkpoint, Damage
from ..base import StrategyAction, register_default_strategy
from ..index import file_damage
from ._load import read_index
from ._save import BACKEND, VERSION


@register_default_strategy(StrategyAction.VERIFY, BACKEND, VERSION)
def verify_files(checkpoint: Checkpoint) -> tuple[Damage, ...]:
    """Return what is damaged: the common state and the index as wholes, each data file block by block."""
    found = []
    if checkpoint.fields["common_backend"] == BACKEND:
        try:
            read_checked(checkpoint, "common")
        except CorruptCheckpoint as error:
            found.append(Damage(_name(checkpoint, "common"), str(error)))
    if checkpoint.fields["sharded_backend"] != BACKEND:
        return tuple(found)
    try:
        index = read_index(checkpoint)
    except CorruptCheckpoint as error:
        # Without the index nobody knows the data files' hashes.
        return (*found, Damage(_name(checkpoint, "index"), str(error)))
    for number in range(index.file_length.size):
        found += file_damage(checkpoint, index, number)
    return tuple(found)


def _name(checkpoint: Checkpoint, field: str) -> str:
    entry = checkpoint.fields.get(field)
    return str(entry.get("name")) if isinstance(entry, dict) else METADATA_FILE
