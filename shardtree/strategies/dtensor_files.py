"""A file for each rank with its parts of DTensors, as verl and hand-written FSDP2 loops save them with torch.save."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..codec.archives import StoredDTensor, StoredTensor
from ..errors import CorruptCheckpoint, TreeError, error_text, missing_numbers
from ..mapping import ShardedObject
from ..storage import Storage
from ._values import Checkpoint, Fields, fields_of_backend
from .archives import (
    ArchiveFile,
    Contents,
    RankPart,
    Tensors,
    ValueAt,
    check_rank,
    contents_of,
    hyperparameters,
    place_parts,
    read_archives,
    rows_of_archives,
    state_key,
)

BACKEND, VERSION = "dtensor_files", 1

# Without leading zeros: a rank has one file.
_NUMBER = r"(0|[1-9]\d{0,8})"
_NAME = re.compile(rf"(model|optim|extra_state)_world_size_{_NUMBER}_rank_{_NUMBER}\.pt", re.ASCII)

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
    match = _NAME.fullmatch(name)
    return match is not None and match[1] != "extra_state"


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
    by_size: dict[int, dict[str, dict[int, str]]] = {}
    for name in names:
        match = _NAME.fullmatch(name)
        if match is not None:
            by_size.setdefault(int(match[2]), {}).setdefault(match[1], {})[int(match[3])] = name
    if len(by_size) != 1:
        sizes = ", ".join(f"of {size} ranks" for size in sorted(by_size))
        fix = "Move the other save's files away: only you know which belong together."
        what = f"open: {where!r} has ranks' files of several saves"
        raise CorruptCheckpoint(error_text(what, found=f"files {sizes}", expected="one world size", fix=fix))
    ((size, kinds),) = by_size.items()
    fix = "Copy every rank's file; without one, the rows that it holds are missing."
    beyond = [name for ranks in kinds.values() for rank, name in ranks.items() if rank >= size]
    count = len(kinds) * size - sum(map(len, kinds.values())) + len(beyond)
    if count:
        missing = (
            f"{kind}_world_size_{size}_rank_{rank}.pt"
            for kind, ranks in kinds.items()
            for rank in missing_numbers(ranks, sum(rank < size for rank in ranks), size)
        )
        what = f"open: {where!r} lacks ranks' files"
        raise CorruptCheckpoint(error_text(what, offenders=missing, count=count, fix=fix))
    if beyond:
        what = f"open: {where!r} has files of more ranks than saved"
        raise CorruptCheckpoint(error_text(what, offenders=beyond, fix=fix))
    names_of = {kind: tuple(ranks[rank] for rank in range(size)) for kind, ranks in kinds.items()}
    return RankFiles(size, names_of)


Entries = Callable[[ArchiveFile], Iterable[tuple[str, Any]]]
"""Returns keys and values of a file."""


def read_contents(checkpoint: Checkpoint) -> Contents:
    """Return what is in the ranks' files, after comparing what several ranks have.

    Raises:
        CorruptCheckpoint: a rank's file is missing, is another rank's, or the files contradict each other.
        UnsafeFile: a file names something that isn't data.
        TreeError: `parameter_names` doesn't fit the optimizer.
    """
    storage = checkpoint.storage
    listing = rank_files(storage.names(), storage.where())
    kinds = list(listing.names)
    files = read_archives(checkpoint, [name for kind in kinds for name in listing.names[kind]], {})
    of_kind = {
        kind: list(enumerate(files))[number * listing.world_size : (number + 1) * listing.world_size]
        for number, kind in enumerate(kinds)
    }
    model, others = _by_tensor(of_kind.get("model", []), _entries)
    shapes = {key: ranks[0][1].shape for key, ranks in model.items()}
    optimizers = of_kind.get("optim", [])
    names = _names(checkpoint, optimizers, shapes) if optimizers else {}
    tensors = Tensors()
    states, other_states = _by_tensor(optimizers, lambda file: _states(file, names, tensors))
    for key, ranks in {**model, **states}.items():
        place_parts(checkpoint, key, ranks, tensors, files)
    extra = [file.value for _, file in of_kind.get("extra_state", [])]
    common, objects = _common(optimizers, extra, other_states), _objects(extra)
    common |= {"model": others} if others else {}
    return contents_of(files, tensors, common=common, objects=objects, where=storage.where)


def _entries(file: ArchiveFile) -> Iterator[tuple[str, Any]]:
    return ((key, one.value) for key, one in file.saved.members(str).items())


def _by_tensor(
    files: Sequence[tuple[int, ArchiveFile]], entries: Entries
) -> tuple[dict[str, list[RankPart]], dict[str, Any]]:
    """Return what ranks have of each tensor, by rank, and other values, as extra states, of the first that has them.

    A rank may lack a tensor, as of another pipeline stage.
    """
    parts: dict[str, list[RankPart]] = {}
    others: dict[str, Any] = {}
    for rank, (number, file) in enumerate(files):
        for key, value in entries(file):
            if not isinstance(value, (StoredTensor, StoredDTensor)):
                others.setdefault(key, value)
                continue
            check_rank(file, rank, key, value)
            parts.setdefault(key, []).append((number, value))
    return parts, others


# The optimizer: states by index, whose names no file has, or by name


def _groups(file: ArchiveFile) -> list[ValueAt]:
    return file.saved.member("param_groups", []).items()


def _states_of(file: ArchiveFile) -> Iterator[tuple[int | str, str, Any]]:
    """Yield each state: the parameter's number or name, the state's name, and its value."""
    for parameter, states in file.saved.member("state", {}).members(int, str).items():
        for state, one in states.members(str).items():
            yield parameter, state, one.value


def _states(file: ArchiveFile, names: Mapping[int | str, str], tensors: Tensors) -> Iterator[tuple[str, Any]]:
    for parameter, state, value in _states_of(file):
        key = state_key(state, names.get(parameter, parameter))
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            tensors.add_number(key, value, file.where)
        else:
            yield key, value


def _names(
    checkpoint: Checkpoint, optimizers: Sequence[tuple[int, ArchiveFile]], shapes: Mapping[str, tuple[int, ...]]
) -> dict[int | str, str]:
    """Return the parameter's name of each index, as the caller gave them; {} if he gave none.

    Raises:
        TreeError: these are more or fewer, or a state has another shape than the parameter of its name.
    """
    parameter_names = checkpoint.options.parameter_names
    if parameter_names is None:
        return {}
    _, file = optimizers[0]
    members = [[one.of(int, str) for one in group.member("params", []).items()] for group in _groups(file)]
    flat = [name for group in parameter_names for name in ([group] if isinstance(group, str) else group)]
    ids = [index for group in members for index in group]
    doing = f"open: parameter_names for {checkpoint.storage.where(file.name)!r}"
    if any(not isinstance(index, int) for index in ids):
        raise TreeError(error_text(doing, found="states that have names already", fix="Leave parameter_names out."))
    lengths = [len(group) for group in parameter_names if not isinstance(group, str)]
    sizes = [len(group) for group in members]
    if len(flat) != len(ids) or len(set(flat)) != len(flat) or (lengths and lengths != sizes):
        counts = f"{len(flat)} names, {len(set(flat))} different" + (f", in groups of {lengths}" if lengths else "")
        fix = "Name each parameter once, in the order in which the optimizer was given them, tied ones under one name."
        raise TreeError(error_text(doing, found=counts, expected=f"{len(ids)} in groups of {sizes}", fix=fix))
    names = dict(zip(ids, flat, strict=True))
    wrong = [
        f"{names[index]!r}: its state {state!r} has shape {value.shape}, "
        f"the parameter {shapes.get(names[index], 'is not there')}"
        for index, state, value in _states_of(file)
        if isinstance(value, StoredDTensor) and index in names and value.shape != shapes.get(names[index])
    ]
    if wrong:
        fix = "The names are in another order than the optimizer's, or of another model."
        raise TreeError(error_text(doing, offenders=wrong, fix=fix))
    return names


def _common(
    optimizers: Sequence[tuple[int, ArchiveFile]], extra: Sequence[Any], states: Mapping[str, Any]
) -> dict[str, Any]:
    common: dict[str, Any] = {}
    if optimizers:
        groups = hyperparameters(group.of(dict) for group in _groups(optimizers[0][1]))
        common["optimizer"] = {"param_groups": groups} | ({"state": dict(states)} if states else {})
    if extra and isinstance(extra[0], dict):
        common |= {key: value for key, value in extra[0].items() if key != "rng"}
    return common


def _objects(extra: Sequence[Any]) -> dict[str, Any]:
    """Return the state that each rank has of its own."""
    count = len(extra)
    states = [value.get("rng") if isinstance(value, dict) else None for value in extra]
    if all(state is None for state in states):
        return {}
    return {ShardedObject("rng", None, (count,), (rank,)).unique_key: state for rank, state in enumerate(states)}


ROWS = rows_of_archives(BACKEND, VERSION, recognize, PATTERNS, read_contents)
