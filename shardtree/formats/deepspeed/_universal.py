"""DeepSpeed's Universal Checkpoint: a folder for each parameter, with a file for each of its states."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import prod
from typing import Any

from ...errors import CorruptCheckpoint, error_text
from ...kit import Checkpoint, Storage
from ..archives import StoredTensor
from ..rank_archives import (
    ArchiveFile,
    Comparison,
    Contents,
    Tensors,
    ValueAt,
    contents_of,
    hyperparameters,
    piece_of,
    read_archives,
    rows_from_contents,
    state_key,
)
from ._files import CLASSES, Model, plain, read_model
from ._flat import Parameter
from ._listing import STATES, universal_folder, zero_files

OPTIMIZER_FILE = "optimizer_state.pt"

MASTER, STEP = "fp32", "step"


def read_contents(checkpoint: Checkpoint) -> Contents:
    """Return the contents of a Universal Checkpoint: states from their folders, weights and buffers from model files.

    Only the folders of trained parameters are read. Other folders have buffers, frozen parameters or tied weights as
    float32, but the model file has these tensors in their own dtype.

    Raises:
        CorruptCheckpoint: A parameter's folder is missing, or a state in it has another shape.
        UnsupportedValue: The model is also split by tensor, pipeline or expert parallelism, and no file says how to
            join the parts.
        UnsafeFile: A file names something that is not data.
    """
    storage = checkpoint.storage
    folder = universal_folder(storage) or ""
    listing = zero_files(storage, folder)
    models = read_archives(checkpoint, listing.models, CLASSES)
    tensors = Tensors()
    model = read_model(checkpoint, models, None, tensors)
    names = _state_files(storage, folder, model)
    optimizer_file = f"{folder}{STATES}/{OPTIMIZER_FILE}"
    state_files = [*names, *([optimizer_file] if storage.length(optimizer_file) is not None else [])]
    files = [*models, *read_archives(checkpoint, state_files, CLASSES)]
    for number, (file, place) in enumerate(zip(files[len(models) :], names.values(), strict=False), len(models)):
        _add_state(checkpoint, tensors, model, file, number, *place)
    optimizer = files[-1].saved if len(state_files) > len(names) else ValueAt({}, "")
    groups = _groups(optimizer)
    _add_steps(tensors, model, optimizer, groups, len(files) - 1)
    common = model.common | {"optimizer": {"param_groups": hyperparameters(groups)}}
    return contents_of(files, tensors, common=plain(common), where=storage.where)


def _state_files(storage: Storage, folder: str, model: Model) -> dict[str, tuple[Parameter, str]]:
    """Return the files with states of trained parameters: by file name, the parameter and the name of its state."""
    files: dict[str, tuple[Parameter, str]] = {}
    missing = list[str]()
    for parameter in model.parameters.values():
        place = f"{folder}{STATES}/{parameter.name}"
        states = [name.removesuffix(".pt") for name in storage.names(place) if name.endswith(".pt")]
        if MASTER not in states:
            missing.append(repr(f"{place}/{MASTER}.pt"))
        files |= {f"{place}/{state}.pt": (parameter, state) for state in states}
    if missing:
        where = storage.where(folder.rstrip("/"))
        heading = f"open: {where!r} lacks fp32 master weights of parameters that {model.where!r} lists"
        raise CorruptCheckpoint(
            error_text(heading, offenders=missing, fix="Copy the whole folder, or repeat DeepSpeed's ds_to_universal.")
        )
    return files


def _add_state(
    checkpoint: Checkpoint,
    tensors: Tensors,
    model: Model,
    file: ArchiveFile,
    number: int,
    parameter: Parameter,
    state: str,
) -> None:
    value = file.value.get("param") if isinstance(file.value, Mapping) else file.value
    key = state_key("param" if state == MASTER else state, parameter.name)
    if state == STEP and isinstance(value, (int, float)):
        tensors.add_number(key, value, file.where)
        return
    shape: tuple[int, ...] = () if state == STEP else parameter.shape
    if isinstance(value, StoredTensor) and isinstance(file.value, Mapping) and "vocab_tensor" in file.value:
        shape = value.shape[:1] + shape[1:]  # The file lacks the rows that pad the vocabulary.
    # A checkpoint that was converted from ZeRO-3 has flat tensors.
    if not isinstance(value, StoredTensor) or not _fits(value.shape, shape):
        description = f"a {type(value).__name__}"
        if isinstance(value, StoredTensor):
            description = f"a tensor of shape {value.shape}"
        heading = f"open: {file.where!r} does not have its parameter's shape"
        expected = f"a tensor of shape {shape}, as in param_shapes of {model.where!r}"
        fix = "The file belongs to another model, or is damaged; repeat DeepSpeed's ds_to_universal."
        raise CorruptCheckpoint(error_text(heading, found=description, expected=expected, fix=fix))
    pieces = [piece_of(key, number, _shaped(value, shape))] if 0 not in shape else []
    tensors.add(key, value.dtype, shape, pieces)
    weight = model.module.get(parameter.name)
    if weight is not None and weight.shape == shape and 0 not in shape and parameter.name not in tensors.derived:
        tensors.compared[key] = Comparison(state_key("param", parameter.name), parameter.name)


def _fits(stored_shape: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    return stored_shape in (shape, (prod(shape),))


def _shaped(value: StoredTensor, shape: tuple[int, ...]) -> StoredTensor:
    """Return a stored tensor in the given shape. It has that shape already, or is flat with as many elements."""
    if value.shape == shape:
        return value
    (step,) = value.stride
    return replace(value, shape=shape, stride=tuple(step * prod(shape[axis + 1 :]) for axis in range(len(shape))))


def _groups(optimizer: ValueAt) -> list[Mapping[str, Any]]:
    inner, outer = (state.member("param_groups", []).items() for state in (_inner(optimizer), optimizer))
    return [group.of(dict) for group in inner or outer]


def _inner(optimizer: ValueAt) -> ValueAt:
    inner = optimizer.member("optimizer_state_dict", optimizer.member("base_optimizer_state", {}).value)
    return replace(inner, value={}) if isinstance(inner.value, list) else inner


def _add_steps(tensors: Tensors, model: Model, optimizer: ValueAt, groups: list[Mapping[str, Any]], file: int) -> None:
    """Add the step of each parameter that has no file for its step, as after a conversion from ZeRO-3.

    The optimizer's file has a step for each group of parameters.
    """
    for parameter, step in _steps(model, optimizer, groups):
        key = state_key(STEP, parameter.name)
        if key in tensors.kinds:
            continue
        if isinstance(step, (int, float)):
            tensors.add_number(key, step, optimizer.file)
        elif isinstance(step, StoredTensor) and not step.shape:
            tensors.add(key, step.dtype, (), [piece_of(key, file, step)])


def _steps(model: Model, optimizer: ValueAt, groups: list[Mapping[str, Any]]) -> Iterator[tuple[Parameter, Any]]:
    states = _inner(optimizer).member("state", {}).members(int, str)
    for number, parameters in enumerate(model.groups):
        step = states[number].member(STEP).value if number in states else None
        group_step = groups[number].get(STEP) if number < len(groups) else None
        yield from ((parameter, group_step if step is None else step) for parameter in parameters)


load_common, load_sharded, load_objects, load_metadata, verify, resolve = rows_from_contents(read_contents)
