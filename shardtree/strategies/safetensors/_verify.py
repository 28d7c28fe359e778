"""Checking a whole checkpoint against its hashes: every byte of every file."""

from __future__ import annotations

from ...errors import CorruptCheckpoint
from .._checked import read_checked
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
            found.append(Damage(str(checkpoint.fields["common"]["name"]), str(error)))
    if checkpoint.fields["sharded_backend"] != BACKEND:
        return tuple(found)
    try:
        index = read_index(checkpoint)
    except CorruptCheckpoint as error:
        # Without the index nobody knows the data files' hashes.
        return (*found, Damage(str(checkpoint.fields["index"]["name"]), str(error)))
    for number in range(index.file_length.size):
        found += file_damage(checkpoint, index, number)
    return tuple(found)
