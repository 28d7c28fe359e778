"""Which files of a folder are the ranks': one world size, and every rank's file."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ...errors import CorruptCheckpoint, error_text
from ...storage import Storage
from .._values import Fields, fields_of_backend

BACKEND, VERSION = "dtensor_files", 1

_NAME = re.compile(r"(model|optim|extra_state)_world_size_(\d{1,9})_rank_(\d{1,9})\.pt")

PATTERNS = ("model_world_size_*_rank_*.pt", "optim_world_size_*_rank_*.pt", "extra_state_world_size_*_rank_*.pt")


@dataclass(frozen=True, slots=True)
class RankFiles:
    """The files of a checkpoint.

    Attributes:
        world_size: how many ranks saved it.
        names: by kind ("model", "optim", "extra_state"), each rank's file, by rank; a kind without files isn't there.
    """

    world_size: int
    names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def recognize(storage: Storage) -> Fields | None:
    """Return the fields of metadata.json for a folder of ranks' files; None for anything else.

    Examples:
        >>> from shardtree.storage import MemoryStorage
        >>> recognize(MemoryStorage()) is None
        True
    """
    if storage.length("") is not None or not any(_is_parameters(name) for name in storage.names()):
        return None
    return fields_of_backend(BACKEND, VERSION)


def _is_parameters(name: str) -> bool:
    found = _NAME.fullmatch(name)
    return found is not None and found[1] != "extra_state"


def rank_files(names: Iterable[str], where: str) -> RankFiles:
    """Return a checkpoint's files, by rank as a number.

    Args:
        names: in the folder.
        where: the folder, for messages.

    Raises:
        CorruptCheckpoint: they are of several world sizes, or a rank's file is missing.

    Examples:
        >>> rank_files(["model_world_size_2_rank_1.pt", "model_world_size_2_rank_0.pt"], "example").names["model"][1]
        'model_world_size_2_rank_1.pt'
    """
    found: dict[int, dict[str, dict[int, str]]] = {}
    for name in names:
        match = _NAME.fullmatch(name)
        if match is not None:
            found.setdefault(int(match[2]), {}).setdefault(match[1], {})[int(match[3])] = name
    if len(found) != 1:
        sizes = ", ".join(f"of {size} ranks" for size in sorted(found))
        fix = "Move the other save's files away: only you know which belong together."
        what = f"open: {where!r} has ranks' files of several saves"
        raise CorruptCheckpoint(error_text(what, found=f"files {sizes}", expected="one world size", fix=fix))
    ((size, kinds),) = found.items()
    missing = [
        f"{kind}_world_size_{size}_rank_{rank}.pt"
        for kind, ranks in kinds.items()
        for rank in range(min(size, 100_000))
        if rank not in ranks
    ]
    beyond = [name for ranks in kinds.values() for rank, name in ranks.items() if rank >= size]
    if missing or beyond:
        what = (
            f"open: {where!r} lacks ranks' files" if missing else f"open: {where!r} has files of more ranks than saved"
        )
        fix = "Copy every rank's file; without one, the rows that it holds are missing."
        raise CorruptCheckpoint(error_text(what, offenders=missing or beyond, fix=fix))
    names_of = {kind: tuple(ranks[rank] for rank in range(size)) for kind, ranks in kinds.items()}
    return RankFiles(size, names_of)
