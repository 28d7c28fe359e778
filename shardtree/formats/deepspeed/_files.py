"""Contents of DeepSpeed's files: model tensors, parameters in flat vectors, their states, and the common state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from ...errors import CorruptCheckpoint, error_text
from ...kit import Checkpoint, map_sharing
from ..archives import StoredTensor
from ..pickles import Constructor, Stub, inert
from ..rank_archives import ArchiveFile, Piece, Tensors, ValueAt, piece_of, state_key
from ._flat import Parameter, Vector, split_pieces

# These are the names in DeepSpeed's pickles beside tensors and plain data. None of them is imported.


def _stage(number: Any) -> int:
    if type(number) is not int:
        raise TypeError("a ZeRO stage that is not a number")
    return number


CLASSES: Mapping[tuple[str, str], Any] = {
    ("deepspeed.runtime.zero.config", "ZeroStageEnum"): Constructor(_stage),
    **{
        (module, name): inert(f"{module}.{name}")
        for module, names in {
            "deepspeed.runtime.fp16.loss_scaler": ("LossScaler", "DynamicLossScaler"),
            "deepspeed.utils.tensor_fragment": ("fragment_address", "tensor_fragment"),
            "deepspeed.checkpoint.universal_checkpoint": ("SubparamShape",),
        }.items()
        for name in names
    },
}

_NOT_COMMON = frozenset(
    {"module", "param_shapes", "frozen_param_shapes", "frozen_param_fragments", "shared_params", "buffer_names"}
)


@dataclass(frozen=True, slots=True, eq=False)
class Model:
    """Contents of the model files.

    Attributes:
        where: Location of the first file, for errors.
        groups: Trainable parameters of each group, in the order of the flat vectors.
        module: Tensors of rank 0 by name; under ZeRO-3, the tensors of parameters are empty.
        common: Other entries of the first file, which belong to the common state.
    """

    where: str
    groups: Sequence[Sequence[Parameter]]
    module: Mapping[str, StoredTensor]
    common: dict[str, Any]

    @property
    def parameters(self) -> dict[str, Parameter]:
        """The trainable parameters by name."""
        return {parameter.name: parameter for group in self.groups for parameter in group}


def _shapes(shapes: ValueAt) -> dict[str, tuple[int, ...]]:
    return {name: shape.shape() for name, shape in shapes.members(str).items()}


def read_model(
    checkpoint: Checkpoint,
    files: Sequence[ArchiveFile],
    paddings: Sequence[Sequence[int]] | None,
    tensors: Tensors,
) -> Model:
    """Return the contents of the model files, and add their weights, buffers and frozen parameters to `tensors`.

    Args:
        checkpoint: The open checkpoint.
        files: Model files by data-parallel rank; a file's number is its position here.
        paddings: Number of padding elements after each parameter, by group; None if the files have none.
        tensors: Tensors collected so far; those of the model files are added.

    Raises:
        CorruptCheckpoint: A file is not as DeepSpeed writes it, or the files contradict each other.
    """
    first = files[0].saved
    modules = [file.saved.member("module") for file in files]
    module = {name: member.value for name, member in modules[0].members(str).items()}
    field = first.member("param_shapes", [])
    shapes = map(_shapes, [field] if isinstance(field.value, dict) and field.value else field.items())
    groups = [_group(names, paddings, number, files[0].where) for number, names in enumerate(shapes)]
    parameters = {parameter.name: parameter for group in groups for parameter in group}
    module_tensors = {name: value for name, value in module.items() if isinstance(value, StoredTensor)}
    # Under ZeRO-3, only the first rank's file names tied parameters.
    owners = {name: owner.of(str) for name, owner in first.member("shared_params", {}).members(str).items()}
    frozen_shapes = _shapes(first.member("frozen_param_shapes", {}))
    for name, tensor in module_tensors.items():
        owner = owners.get(name, name)
        if owner in parameters and tensor.shape != parameters[owner].shape:
            tensors.add_derived(name, tensor.dtype, parameters[owner].shape, state_key("param", owner))
        elif owner in frozen_shapes and tensor.shape != frozen_shapes[owner]:
            _add_frozen(checkpoint, files, name, Parameter(owner, frozen_shapes[owner]), tensors)
        else:
            tensors.add(name, tensor.dtype, tensor.shape, _whole(name, 0, tensor))
            _compare_replicas(files, modules, name, tensor, tensors)
    others = {name: value for name, value in module.items() if name not in module_tensors}
    common = {key: value for key, value in first.value.items() if key not in _NOT_COMMON}
    return Model(files[0].where, groups, module_tensors, common | ({"module": others} if others else {}))


def _group(
    shapes: Mapping[str, tuple[int, ...]], paddings: Sequence[Sequence[int]] | None, number: int, where: str
) -> list[Parameter]:
    skips: Sequence[int] = next(iter(paddings[number:]), ()) if paddings else [0] * len(shapes)
    if len(skips) != len(shapes):
        raise CorruptCheckpoint(
            error_text(
                f"open: group {number} has different numbers of parameters in the optimizer and in {where!r}",
                found=f"{len(skips)} in param_alignment_paddings[{number}]",
                expected=f"{len(shapes)}, as in param_shapes[{number}]",
                fix="Files of two saves lie in the folder; load another checkpoint.",
            )
        )
    return [Parameter(name, shape, skip) for (name, shape), skip in zip(shapes.items(), skips, strict=True)]


def _whole(key: str, number: int, tensor: StoredTensor) -> list[Piece]:
    return [piece_of(key, number, tensor)] if prod(tensor.shape) else []


def _compare_replicas(
    files: Sequence[ArchiveFile], modules: Sequence[ValueAt], name: str, tensor: StoredTensor, tensors: Tensors
) -> None:
    """Add the copies of a tensor in other ranks' files to `tensors`, for loads to compare. Only ZeRO-3 has copies."""
    for file, module in zip(files[1:], modules[1:], strict=True):
        other = module.member(name).value
        if not prod(tensor.shape):
            return
        places = files[0].where, file.where
        tensors.add_copy([name], tensor, other if isinstance(other, StoredTensor) else None, places)


def _add_frozen(
    checkpoint: Checkpoint, files: Sequence[ArchiveFile], name: str, parameter: Parameter, tensors: Tensors
) -> None:
    """Add a frozen parameter under ZeRO-3, which splits it over the ranks like a trained one."""
    parts = (file.saved.member("frozen_param_fragments").member(parameter.name) for file in files)
    vectors = [Vector(number, part.of(StoredTensor)) for number, part in enumerate(parts)]
    by = f"frozen_param_shapes in {files[0].where!r}"
    expected = -(-prod(parameter.shape) // len(vectors))
    check_length(checkpoint, vectors, expected, f"the partition of {parameter.name!r}", by)
    pieces = split_pieces(lambda _: name, [parameter], vectors)
    tensors.add(name, vectors[0].tensor.dtype, parameter.shape, pieces)


def check_length(checkpoint: Checkpoint, vectors: Sequence[Vector], expected: int, what: str, by: str) -> None:
    """Raise unless each rank's vector has the expected number of elements.

    Args:
        checkpoint: The open checkpoint.
        vectors: Vectors of all ranks.
        expected: Number of elements.
        what: Name of the vectors, for the error.
        by: Source of the number, for the error.

    Raises:
        CorruptCheckpoint: A vector has another length.
    """
    check_flat(checkpoint, vectors, what)
    wrong = [
        f"{checkpoint.storage.where(vector.tensor.file)!r}: {vector.tensor.shape}"
        for vector in vectors
        if vector.tensor.shape != (expected,)
    ]
    if wrong:
        what = f"open: the length of {what} differs from that of the parameters"
        fix = "A file belongs to another save, or to another number of ranks; copy all files of one save."
        shape = f"({expected},), according to {by}"
        raise CorruptCheckpoint(error_text(what, offenders=wrong, expected=shape, fix=fix))


def check_flat(checkpoint: Checkpoint, vectors: Sequence[Vector], what: str) -> None:
    """Raise unless the ranks' vectors are contiguous, of one axis and one dtype, as offsets of parameters assume.

    Raises:
        CorruptCheckpoint: A vector isn't contiguous, or has several axes or another dtype than the others.
    """
    dtype = vectors[0].tensor.dtype
    wrong = [
        f"{checkpoint.storage.where(tensor.file)!r}: {tensor.shape} {str(tensor.dtype).removeprefix('torch.')}"
        for tensor in (vector.tensor for vector in vectors)
        if len(tensor.shape) != 1 or not tensor.is_row_major or tensor.dtype != dtype
    ]
    if wrong:
        what = f"open: {what} is not stored as contiguous 1-D tensors of the same dtype on all ranks"
        fix = "A file was damaged, or belongs to another save; copy all files of one save."
        raise CorruptCheckpoint(error_text(what, offenders=wrong, fix=fix))


def plain(value: Any) -> Any:
    """Return a value with each object of DeepSpeed's classes replaced by the dict of its state."""

    def unstubbed(leaf: Any) -> Any:
        return leaf.state if isinstance(leaf, Stub) else leaf

    return map_sharing(unstubbed, value)


_MASTERS = {True: "fp32_flat_groups", False: "single_partition_of_fp32_groups"}


@dataclass(frozen=True, slots=True, eq=False)
class Optimizer:
    """Contents of the optimizer files.

    A group is a set of parameters that share flat vectors. Under ZeRO-1 and 2 it is a param group of the optimizer.
    ZeRO-3 divides each param group into one or more groups.

    Attributes:
        is_zero3: True if the ranks split each parameter (ZeRO-3); False if they split each group's flat vector.
        ranks: Number of ranks that saved.
        paddings: Number of padding elements after each parameter, by group; None if the files have none.
        masters: Flat vectors of master weights, by group and then by rank.
        states: States of each rank, by the group's number and then by the state's name.
        param_groups: Hyperparameters of each param group, by rank; empty if the files have none.
        owners: Numbers of the groups into which each param group is divided.
        steps: Step of each rank, which applies if the rank's states and hyperparameters have none.
        scaler: State of the loss scaler.
    """

    is_zero3: bool
    ranks: int
    paddings: Sequence[Sequence[int]] | None
    masters: Sequence[Sequence[Vector]]
    states: Sequence[Mapping[Any, Mapping[str, Any]]]
    param_groups: Sequence[Sequence[Mapping[str, Any]]]
    owners: Sequence[Sequence[int]]
    steps: Sequence[Any]
    scaler: Mapping[str, Any]

    def group_steps(self, group: int) -> list[Any]:
        """Return a group's step, by rank: the hyperparameter "step", which FusedAdam writes, or an item of `steps`."""
        owner = next((owner for owner, groups in enumerate(self.owners) if group in groups), None)
        rank_groups = [{} if owner is None else groups[owner] for groups in self.param_groups]
        return [values.get("step", step) for values, step in zip(rank_groups, self.steps, strict=True)]


def read_optimizer(checkpoint: Checkpoint, files: Sequence[ArchiveFile], first: int, saved_by: int) -> Optimizer:
    """Return the contents of the optimizer files.

    Args:
        checkpoint: The open checkpoint.
        files: Optimizer files by rank.
        first: Number of the first optimizer file among all files of the checkpoint.
        saved_by: Number of ranks according to the model file, used if the optimizer files lack it; 0 if unknown.

    Raises:
        CorruptCheckpoint: A file is not as DeepSpeed writes it, or files have different groups.
    """
    inner = [file.saved.member("optimizer_state_dict") for file in files]
    # The keys tell the stages apart, since BF16_Optimizer names none.
    is_zero3 = _MASTERS[True] in inner[0].of(dict)
    vectors = [[tensor.of(StoredTensor) for tensor in saved.member(_MASTERS[is_zero3]).items()] for saved in inner]
    counts = {len(by_group) for by_group in vectors}
    if len(counts) > 1:
        heading = f"open: {files[0].where!r} and the other ranks' files have different numbers of parameter groups"
        raise CorruptCheckpoint(
            error_text(heading, found=f"{sorted(counts)} groups", fix="Copy all files of one save.")
        )
    masters = [
        [Vector(first + rank, by_group[group]) for rank, by_group in enumerate(vectors)] for group in range(max(counts))
    ]
    for number, ranks in enumerate(masters):
        check_flat(checkpoint, ranks, f"the flat vector of group {number}")
    base = [saved.member("optimizer_state_dict" if is_zero3 else "base_optimizer_state") for saved in inner]
    groups = [[] if isinstance(state.value, list) else state.member("param_groups").items() for state in base]
    if len(counts := {*map(len, groups)}) > 1:
        heading = f"open: {files[0].where!r} and the other ranks' files have different numbers of hyperparameter groups"
        raise CorruptCheckpoint(
            error_text(heading, found=f"{sorted(counts)} groups", fix="Copy all files of one save.")
        )
    paddings = inner[0].member("param_alignment_paddings", [])
    return Optimizer(
        is_zero3=is_zero3,
        ranks=_ranks(inner[0].member("partition_count", saved_by or len(files))),
        paddings=[[number.count() for number in group.items()] for group in paddings.items()] or None,
        masters=masters,
        states=[_states(state) for state in base],
        param_groups=[[group.of(dict) for group in rank_groups] for rank_groups in groups],
        owners=[
            [owner.count() for owner in group.member("params", [number]).items()] if is_zero3 else [number]
            for number, group in enumerate(groups[0])
        ],
        steps=[saved.member("base_optimizer_state_step").value for saved in inner],
        scaler={key: value for key, value in inner[0].of(dict).items() if key in _SCALER},
    )


def _ranks(count: ValueAt) -> int:
    """Return the number of ranks that saved, given a number or a list with a number for each param group."""
    counts = count.items() if isinstance(count.value, (list, tuple)) else [count]
    return max((number.count() for number in counts), default=0)


def _states(base: ValueAt) -> dict[Any, dict[str, Any]]:
    # With elastic_checkpoint, the state is a list by group and has no hyperparameters.
    by_group = dict(enumerate(base.items())) if isinstance(base.value, list) else base.member("state").members(int)
    return {
        group: {name: state.value for name, state in states.members(str).items()} for group, states in by_group.items()
    }


_SCALER = ("loss_scaler", "dynamic_loss_scale", "overflow", "clip_grad")
