"""Contents of ranks' files with parts of DTensors, as verl and hand-written FSDP2 loops save them with torch.save."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from ...errors import TreeError, error_text
from ...kit import Checkpoint, ShardedObject
from ..archives import StoredDTensor, StoredTensor
from ..rank_archives import (
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
    rows_from_contents,
    state_key,
)
from ._listing import rank_files

Entries = Callable[[ArchiveFile], Iterable[tuple[str, Any]]]
"""Function that returns the keys and values of a file."""


def read_contents(checkpoint: Checkpoint) -> Contents:
    """Return the contents of the ranks' files, after comparing tensors that several ranks have.

    Raises:
        CorruptCheckpoint: A rank's file is missing, belongs to another rank, or the files contradict each other.
        UnsafeFile: A file names something that isn't data.
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
    return ((key, member.value) for key, member in file.saved.members(str).items())


def _by_tensor(
    files: Sequence[tuple[int, ArchiveFile]], entries: Entries
) -> tuple[dict[str, list[RankPart]], dict[str, Any]]:
    """Return the ranks' parts of each tensor by key, and other values, such as extra states, by key.

    A rank may lack a tensor, for example one of another pipeline stage. Of other values, the first rank's is taken.

    Args:
        files: Number and file of each rank, in order.
        entries: Function that returns the keys and values of a file.
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


# The optimizer has states by name, or by an index for which no file has a name.


def _groups(file: ArchiveFile) -> list[ValueAt]:
    return file.saved.member("param_groups", []).items()


def _states_of(file: ArchiveFile) -> Iterator[tuple[int | str, str, Any]]:
    """Yield parameter, name and value of each optimizer state; the parameter is an index or a name."""
    for parameter, states in file.saved.member("state", {}).members(int, str).items():
        for state, member in states.members(str).items():
            yield parameter, state, member.value


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
    """Return the parameter names that the caller gave, by the parameters' indices in the optimizer; {} without names.

    Raises:
        TreeError: There are more or fewer names than parameters, or a state has another shape than its parameter.
    """
    parameter_names = checkpoint.options.parameter_names
    if parameter_names is None:
        return {}
    _, file = optimizers[0]
    members = [[index.of(int, str) for index in group.member("params", []).items()] for group in _groups(file)]
    flat = [name for group in parameter_names for name in ([group] if isinstance(group, str) else group)]
    ids = [index for group in members for index in group]
    doing = f"open: LoadOptions(parameter_names=...) does not match {checkpoint.storage.where(file.name)!r}"
    if any(not isinstance(index, int) for index in ids):
        raise TreeError(error_text(doing, found="parameters that already have names", fix="Leave parameter_names out."))
    lengths = [len(group) for group in parameter_names if not isinstance(group, str)]
    sizes = [len(group) for group in members]
    if len(flat) != len(ids) or len(set(flat)) != len(flat) or (lengths and lengths != sizes):
        found = f"{len(flat)} names, {len(set(flat))} distinct" + (f", in param groups of {lengths}" if lengths else "")
        fix = "Name each parameter once, in the order in which the optimizer got them; name tied ones once."
        expected = f"{len(ids)} distinct names, in param groups of {sizes}"
        raise TreeError(error_text(doing, found=found, expected=expected, fix=fix))
    names = dict(zip(ids, flat, strict=True))
    wrong = [
        f"{names[index]!r}: its state {state!r} has shape {value.shape}, "
        f"the parameter {shapes.get(names[index], 'is missing')}"
        for index, state, value in _states_of(file)
        if isinstance(value, StoredDTensor) and index in names and value.shape != shapes.get(names[index])
    ]
    if wrong:
        fix = "Pass the names of this model's parameters, in the order in which the optimizer got them."
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
    """Return each rank's random state as a sharded object, by unique key; {} if no rank has a state."""
    count = len(extra)
    states = [value.get("rng") if isinstance(value, dict) else None for value in extra]
    if all(state is None for state in states):
        return {}
    return {ShardedObject("rng", None, (count,), (rank,)).unique_key: state for rank, state in enumerate(states)}


load_common, load_sharded, load_objects, load_metadata, verify, resolve = rows_from_contents(read_contents)
