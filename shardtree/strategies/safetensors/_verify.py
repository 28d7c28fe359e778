"""Checking a whole checkpoint against its hashes: every byte of every file."""

from __future__ import annotations

from collections.abc import Iterator

from ...errors import CorruptCheckpoint
from .._checked import read_checked
from .._findings import Damage, Finding
from .._metadata import METADATA_FILE
from .._values import Checkpoint
from ..base import StrategyAction, register_default_strategy
from ..index import files_damage
from ._fingerprints import fingerprint_damage
from ._load import read_index
from ._save import BACKEND, VERSION


@register_default_strategy(StrategyAction.VERIFY, BACKEND, VERSION)
def verify_files(checkpoint: Checkpoint) -> tuple[Finding, ...]:
    """Return what is damaged: common state and index as wholes, data files by blocks, then tensors by fingerprints."""
    found: list[Finding] = []
    if checkpoint.fields["common_backend"] == BACKEND:
        found += _whole(checkpoint, "common")
    if checkpoint.fields["sharded_backend"] != BACKEND:
        return tuple(found)
    damage = list(_whole(checkpoint, "index"))
    if damage:
        return (*found, *damage)  # without the index nobody knows the data files' hashes
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
