"""Contents of a ZeRO-1, 2 or 3 checkpoint: master weights and optimizer states from flat vectors, and weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ...errors import CorruptCheckpoint, error_text
from ...kit import Checkpoint, Storage, in_threads, is_folder, threads_of
from ..archives import StoredTensor
from ..rank_archives import (
    ArchiveFile,
    Comparison,
    Contents,
    Tensors,
    contents_of,
    filled,
    hyperparameters,
    is_whole_archive,
    piece_of,
    read_archives,
    rows_from_contents,
    state_key,
)
from ._files import CLASSES, Model, Optimizer, check_flat, check_length, plain, read_model, read_optimizer
from ._flat import Parameter, Vector, group_pieces, split_length, split_paddings, split_pieces
from ._listing import LATEST, LATEST_UNIVERSAL, check_count, tag_folder, zero_files


def read_contents(checkpoint: Checkpoint) -> Contents:
    """Return the contents of a save. Only the files' pickles are read, no tensor's elements.

    Raises:
        CorruptCheckpoint: A rank's file is missing, belongs to another save, or the files contradict each other.
        UnsupportedValue: The model is also split by tensor, pipeline or expert parallelism, and no file says how to
            join the parts.
        UnsafeFile: A file names something that is not data.
    """
    storage = checkpoint.storage
    listing = zero_files(storage, tag_folder(storage) or "")
    files = read_archives(checkpoint, [*listing.models, *listing.optimizers], CLASSES)
    models, optimizers = files[: len(listing.models)], files[len(listing.models) :]
    tensors = Tensors()
    if not optimizers:
        model = read_model(checkpoint, models, None, tensors)
        _check_whole(checkpoint, models, model)
        return contents_of(files, tensors, common=plain(model.common), where=storage.where)
    optimizer = read_optimizer(checkpoint, optimizers, len(models), models[0].saved.member("dp_world_size", 0).count())
    by = f"partition_count in {storage.where(optimizers[0].name)!r}"
    check_count(storage, listing.folder, "optimizer", len(optimizers), optimizer.ranks, by)
    if optimizer.is_zero3:
        check_count(storage, listing.folder, "model", len(models), optimizer.ranks, by)
        _check_copies(checkpoint, optimizer)
    model = read_model(checkpoint, models, optimizer.paddings, tensors)
    if len(optimizer.masters) != len(model.groups):
        heading = (
            f"open: {storage.where(optimizers[0].name)!r} and {storage.where(models[0].name)!r} "
            "belong to different saves"
        )
        found, expected = (
            f"{len(optimizer.masters)} parameter groups with fp32 master weights",
            f"{len(model.groups)} parameter groups, as in param_shapes",
        )
        raise CorruptCheckpoint(error_text(heading, found=found, expected=expected, fix="Copy all files of one save."))
    for number, parameters in enumerate(model.groups):
        if parameters:
            _add_group(checkpoint, tensors, model, optimizer, number)
    groups = hyperparameters(optimizer.param_groups[0])
    common = model.common | {"zero": optimizer.scaler, "optimizer": {"param_groups": groups}}
    check = partial(_check_paddings, model.groups, optimizer) if optimizer.is_zero3 else None
    return contents_of(files, tensors, common=plain(common), check=check, where=storage.where)


def _check_copies(checkpoint: Checkpoint, optimizer: Optimizer) -> None:
    """Raise if two ranks' files have the same master weights and states: one was then copied in place of the other.

    This check is for ZeRO-3, which stores no weights to compare the master weights with.
    """
    first_vectors: dict[tuple[tuple[int, int], ...], Vector] = {}
    for rank in range(optimizer.ranks if checkpoint.options.verify is not None else 0):
        vectors = [group[rank] for group in optimizer.masters]
        states = (value for group in optimizer.states[rank].values() for value in group.values())
        tensors = [vector.tensor for vector in vectors] + [state for state in states if isinstance(state, StoredTensor)]
        same = tuple((tensor.record.crc32, tensor.record.nbytes) for tensor in tensors)
        other = first_vectors.setdefault(same, vectors[0])
        if other is vectors[0] or not _has_values(checkpoint, vectors):
            continue
        where, other_where = (checkpoint.storage.where(vector.tensor.file) for vector in (vectors[0], other))
        heading = f"open: {where!r} is a copy of {other_where!r}"
        fix = "Copy each rank's own file, or load another checkpoint."
        raise CorruptCheckpoint(error_text(heading, found="the same fp32 master weights and optimizer states", fix=fix))


def _has_values(checkpoint: Checkpoint, vectors: Sequence[Vector]) -> bool:
    """Return whether a vector begins with at least three distinct values; simple ones may equal another's by chance."""
    first = [replace(vector.tensor, shape=(min(_LOOKED_AT, *vector.tensor.shape),)) for vector in vectors]
    return any(tensor.shape[0] and filled(checkpoint, tensor).unique().numel() > 2 for tensor in first)


_LOOKED_AT = 65536
"""Upper bound of the elements of a vector, or of a padding, that a check reads."""


def _check_paddings(groups: Sequence[Sequence[Parameter]], optimizer: Optimizer, checkpoint: Checkpoint) -> None:
    """Raise if ZeRO-3 ranks' files were exchanged, which the padding in their flat vectors of moments can show.

    DeepSpeed pads gradients with zeros, so that moments are zeros in the padding, unless weight decay is part of the
    gradient. A file with other values in its rank's padding is therefore refused only if another file has zeros there:
    that file then seems to be the rank's.

    Raises:
        CorruptCheckpoint: The files of ranks were exchanged.
    """
    ranks = range(optimizer.ranks)
    paddings = [split_paddings(parameters, optimizer.ranks) for parameters in groups]
    places = [
        [(number, *place) for number, by_rank in enumerate(paddings) for place in by_rank[rank]] for rank in ranks
    ]

    def zeros(rank: int, other: int) -> bool:
        """Return whether a rank's flat vectors of moments have zeros at the offsets of another rank's padding."""
        return not any(bool(filled(checkpoint, part).any()) for part in moments(rank, places[other]))

    def moments(rank: int, padding: Sequence[tuple[int, int, int]]) -> Iterator[StoredTensor]:
        for number, begin, count in padding[:: -(-len(padding) // _LOOKED_AT_PADDINGS)]:
            shape = optimizer.masters[number][rank].tensor.shape
            for state in optimizer.states[rank].get(number, {}).values():
                if isinstance(state, StoredTensor) and state.shape == shape:
                    begin_byte = state.begin + begin * state.dtype.itemsize
                    yield replace(state, begin=begin_byte, shape=(min(count, _LOOKED_AT),))

    threads = threads_of(checkpoint.storage, checkpoint.options.threads)
    are_own = in_threads(lambda rank: not places[rank] or zeros(rank, rank), [*ranks], threads)
    for rank in (rank for rank, is_own in zip(ranks, are_own, strict=True) if not is_own):
        other = next((other for other in ranks if other != rank and zeros(other, rank)), None)
        if other is not None:
            where, other_where = (
                checkpoint.storage.where(optimizer.masters[0][number].tensor.file) for number in (rank, other)
            )
            heading = f"load: {where!r} seems to be another rank's file"
            found = f"non-zero moments in its rank's padding, and zeros at the same offsets in {other_where!r}"
            fix = (
                "Files were renamed, exchanged or copied; copy each rank's own file, or load another checkpoint. "
                "LoadOptions(verify=None) skips this check."
            )
            raise CorruptCheckpoint(error_text(heading, found=found, fix=fix))


_LOOKED_AT_PADDINGS = 4
"""Number of paddings that are read for each rank, spread over its parameters: one that isn't zero is enough."""


def _check_whole(checkpoint: Checkpoint, models: Sequence[ArchiveFile], model: Model) -> None:
    """Raise if the model files lack elements of weights, for a folder without optimizer files.

    ZeRO-3 stores these elements only in the optimizer files, as master weights.
    """
    names = [
        repr(name)
        for name, parameter in model.parameters.items()
        if name in model.module and model.module[name].shape != parameter.shape
    ]
    if names:
        where = checkpoint.storage.where(models[0].name)
        heading = f"open: {where!r} lacks elements of these parameters"
        fix = "Copy the optim_states files of all ranks too: ZeRO-3 stores the elements there, as fp32 master weights."
        raise CorruptCheckpoint(error_text(heading, offenders=names, fix=fix))


def _add_group(checkpoint: Checkpoint, tensors: Tensors, model: Model, optimizer: Optimizer, number: int) -> None:
    """Add the master weights and optimizer states of one group's parameters to `tensors`."""
    parameters, masters = model.groups[number], optimizer.masters[number]
    flat = {"param": masters}
    # A state's vector is as long as its master, or longer by the padding that masters lack.
    lengths = {vector.tensor.shape for vector in masters}
    ranks = [states.get(number, {}) for states in optimizer.states]
    for state in ranks[0]:
        values = [states.get(state) for states in ranks]
        vectors = [value for value in values if isinstance(value, StoredTensor) and _is_flat(value, lengths)]
        if len(vectors) == len(values):
            flat[state] = [Vector(master.file, vector) for master, vector in zip(masters, vectors, strict=True)]
        else:
            _add_for_each(checkpoint, tensors, state, parameters, values, masters)
    for state, ranks_of in flat.items():
        _add_flat(checkpoint, tensors, state, parameters, ranks_of, model.where if optimizer.is_zero3 else None)
    steps = optimizer.group_steps(number)
    if "step" not in ranks[0] and isinstance(steps[0], (int, float)):
        _add_for_each(checkpoint, tensors, "step", parameters, steps, masters)
    if not optimizer.is_zero3:
        _compare(tensors, model, parameters, list(flat))


def _is_flat(value: StoredTensor, lengths: set[tuple[int, ...]]) -> bool:
    return len(value.shape) == 1 and (value.shape in lengths or value.shape > max(lengths))


def _add_flat(
    checkpoint: Checkpoint,
    tensors: Tensors,
    state: str,
    parameters: Sequence[Parameter],
    vectors: Sequence[Vector],
    split_by: str | None,
) -> None:
    """Add a state that has an element for each element of the parameters.

    Args:
        checkpoint: The open checkpoint.
        tensors: Tensors that the state is added to.
        state: Name of the state.
        parameters: Parameters of the group, in order.
        vectors: Flat vectors of the state, by rank.
        split_by: Location, for errors, of the model file with the shapes by which ZeRO-3 splits the vectors; None for
            ZeRO-1 and 2.
    """
    cut = group_pieces if split_by is None else split_pieces
    what = f"the flat vector of {state!r}"
    if split_by is None:
        check_flat(checkpoint, vectors, what)
    else:
        by = f"param_shapes in {split_by!r}"
        check_length(checkpoint, vectors, split_length(parameters, len(vectors)), what, by)
    for parameter in parameters:
        tensors.add(state_key(state, parameter.name), vectors[0].tensor.dtype, parameter.shape)
    tensors.pieces.extend(cut(partial(state_key, state), parameters, vectors))


def _add_for_each(
    checkpoint: Checkpoint,
    tensors: Tensors,
    state: str,
    parameters: Sequence[Parameter],
    values: Sequence[Any],
    masters: Sequence[Vector],
) -> None:
    """Add a state that each rank stores once for a group, such as the step, to each parameter of the group.

    Rank 0's value is loaded, after comparing it with the other ranks'. Loads refuse the state if rank 0's value is
    neither a number nor a tensor without axes.

    Args:
        checkpoint: The open checkpoint.
        tensors: Tensors that the state is added to.
        state: Name of the state.
        parameters: Parameters of the group, in order.
        values: Value of the state, by rank.
        masters: Vectors of the group's master weights, by rank, whose files have the state too.
    """
    value, others = values[0], [one if isinstance(one, (StoredTensor, int, float)) else None for one in values[1:]]
    first, *places = (checkpoint.storage.where(master.tensor.file) for master in masters)
    keys = [state_key(state, parameter.name) for parameter in parameters]
    if isinstance(value, StoredTensor) and not value.shape:
        for key in keys:
            tensors.add(key, value.dtype, (), [piece_of(key, masters[0].file, value)])
    elif isinstance(value, (int, float)):
        for key in keys:
            tensors.add_number(key, value, first)
    else:
        kind = f"of shape {value.shape}" if isinstance(value, StoredTensor) else f"that is a {type(value).__name__}"
        for key in keys:
            tensors.add(key, torch.float32, ())
            tensors.refused[key] = f"the group has one value {kind}, rather than a value for each element"
        return
    for other, place in zip(others, places, strict=True):
        tensors.add_copy(keys, value, other, (first, place))


def _compare(tensors: Tensors, model: Model, parameters: Sequence[Parameter], states: Sequence[str]) -> None:
    """Note in `tensors` that loads of the states must compare the parameters' master weights with their weights.

    ZeRO-1 and 2 store both. Equal values show that the states belong to their parameters.
    """
    for parameter in parameters:
        if parameter.name in model.module and 0 not in parameter.shape:
            pair = Comparison(state_key("param", parameter.name), parameter.name)
            tensors.compared.update((state_key(state, parameter.name), pair) for state in states)


load_common, load_sharded, load_objects, load_metadata, verify, resolve = rows_from_contents(read_contents)


def is_whole(storage: Storage, name: str) -> bool:
    """Return whether a file is complete; raise for an archive that is cut off.

    The file `latest` is complete if it names a folder. An archive is complete if it ends with its zip directory.

    Raises:
        CorruptCheckpoint: The file is an archive without a zip directory.
    """
    if name.rpartition("/")[2] not in (LATEST, LATEST_UNIVERSAL):
        return is_whole_archive(storage, name)
    tag = storage.read(name).decode("utf-8", "replace").strip()
    return bool(tag) and is_folder(storage, tag)
