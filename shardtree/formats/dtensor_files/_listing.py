"""Listing of a folder in which each rank has files with its parts of DTensors; the file names tell kind and rank."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ...errors import CorruptCheckpoint, error_text, missing_numbers
from ...kit import Fields, Storage, fields_of_backend

BACKEND, VERSION = "dtensor_files", 1

# Leading zeros aren't matched, as a rank has one file.
_NUMBER = r"(0|[1-9]\d{0,8})"
_NAME = re.compile(rf"(model|optim|extra_state)_world_size_{_NUMBER}_rank_{_NUMBER}\.pt", re.ASCII)

PATTERNS = ("model_world_size_*_rank_*.pt", "optim_world_size_*_rank_*.pt", "extra_state_world_size_*_rank_*.pt")


@dataclass(frozen=True, slots=True)
class RankFiles:
    """The files of a checkpoint.

    Attributes:
        world_size: Number of ranks that saved.
        names: Files by kind ("model", "optim", "extra_state"), in the order of ranks; a kind without files is absent.
    """

    world_size: int
    names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def recognize(storage: Storage) -> Fields | None:
    """Return the fields that metadata.json would have for a folder of ranks' files; None for anything else.

    Examples:
        >>> from shardtree.storage import MemoryStorage
        >>> recognize(MemoryStorage()) is None
        True
    """
    if storage.length("") is not None or not any(_is_parameters(name) for name in storage.names()):
        return None
    return fields_of_backend(BACKEND, VERSION)


def _is_parameters(name: str) -> bool:
    match = _NAME.fullmatch(name)
    return match is not None and match[1] != "extra_state"


def rank_files(names: Iterable[str], where: str) -> RankFiles:
    """Return a checkpoint's files, in the order of ranks.

    Args:
        names: Names of the files in the folder.
        where: Location of the folder, for errors.

    Raises:
        CorruptCheckpoint: The files have several world sizes, or a rank's file is missing.

    Examples:
        >>> rank_files(["model_world_size_2_rank_1.pt", "model_world_size_2_rank_0.pt"], "example").names["model"][1]
        'model_world_size_2_rank_1.pt'
    """
    by_size: dict[int, dict[str, dict[int, str]]] = {}
    for name in names:
        match = _NAME.fullmatch(name)
        if match is not None:
            by_size.setdefault(int(match[2]), {}).setdefault(match[1], {})[int(match[3])] = name
    if len(by_size) != 1:
        sizes = " and of ".join(f"a save by {size} ranks" for size in sorted(by_size))
        fix = "Move the files of all saves but one away; nothing in them says which save is current."
        heading = f"open: {where!r} has ranks' files of several saves"
        raise CorruptCheckpoint(error_text(heading, found=f"files of {sizes}", expected="files of one save", fix=fix))
    ((size, kinds),) = by_size.items()
    fix = "Copy every rank's file: each holds rows that no other file has."
    beyond = [name for ranks in kinds.values() for rank, name in ranks.items() if rank >= size]
    count = len(kinds) * size - sum(map(len, kinds.values())) + len(beyond)
    if count:
        missing = (
            f"{kind}_world_size_{size}_rank_{rank}.pt"
            for kind, ranks in kinds.items()
            for rank in missing_numbers(ranks, sum(rank < size for rank in ranks), size)
        )
        heading = f"open: {where!r} lacks ranks' files"
        raise CorruptCheckpoint(error_text(heading, offenders=missing, count=count, fix=fix))
    if beyond:
        heading = f"open: {where!r} has files of ranks above {size - 1}, but only {size} ranks saved"
        raise CorruptCheckpoint(error_text(heading, offenders=beyond, fix="Move the files of other saves away."))
    names_of = {kind: tuple(ranks[rank] for rank in range(size)) for kind, ranks in kinds.items()}
    return RankFiles(size, names_of)
