"""DeepSpeed's model files: the model's own tensors, which parameters the flat vectors have, and the common state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from ...codec.archives import StoredTensor
from ...codec.pickles import Constructor, Stub, inert
from ...errors import CorruptCheckpoint, error_text
from ...trees import map_shards
from .._values import Checkpoint
from ..archives import ArchiveFile, Piece, Tensors, ValueAt, state_key
from ._flat import Parameter, Vector, split_pieces

# What pickles of DeepSpeed name, beside tensors and plain data. None of it is imported.


def _stage(number: Any) -> int:
    if type(number) is not int:
        raise TypeError("a ZeRO stage that isn't a number")
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
    """What the model files say.

    Attributes:
        where: the first file, for messages.
        groups: the trainable parameters of each group, in the order of the flat vectors.
        module: rank 0's tensors by name; those of ZeRO-3's parameters are empty.
        common: what else the files hold.
    """

    where: str
    groups: Sequence[Sequence[Parameter]]
    module: Mapping[str, StoredTensor]
    common: dict[str, Any]

    @property
    def parameters(self) -> dict[str, Parameter]:
        """The trainable parameters by name."""
        return {parameter.name: parameter for group in self.groups for parameter in group}


def _shapes(saved: ValueAt) -> dict[str, tuple[int, ...]]:
    return {name: shape.shape() for name, shape in saved.members(str).items()}


def read_model(
    checkpoint: Checkpoint,
    files: Sequence[ArchiveFile],
    paddings: Sequence[Sequence[int]] | None,
    tensors: Tensors,
) -> Model:
    """Return what the model files say, and add the tensors that aren't trained: buffers, frozen parameters.

    Args:
        checkpoint: where the files are.
        files: by data-parallel rank; their numbers are their positions.
        paddings: elements after each parameter of each group, where the optimizer's files have them; else None.
        tensors: filled with the model's own tensors.

    Raises:
        CorruptCheckpoint: a file isn't as DeepSpeed writes it, or the files contradict each other.
    """
    first = files[0].saved
    modules = [file.saved.member("module") for file in files]
    module = {name: one.value for name, one in modules[0].members(str).items()}
    listed = first.member("param_shapes", [])
    shapes = map(_shapes, [listed] if isinstance(listed.value, dict) and listed.value else listed.items())
    groups = [_group(names, paddings, number, files[0].where) for number, names in enumerate(shapes)]
    trained = {parameter.name: parameter for group in groups for parameter in group}
    own = {name: value for name, value in module.items() if isinstance(value, StoredTensor)}
    # Only the first rank's file names them under ZeRO-3.
    shared = {name: owner.of(str) for name, owner in first.member("shared_params", {}).members(str).items()}
    frozen = _shapes(first.member("frozen_param_shapes", {}))
    for name, stored in own.items():
        owner = shared.get(name, name)
        if owner in trained and stored.shape != trained[owner].shape:
            tensors.add_derived(name, stored.dtype, trained[owner].shape, state_key("param", owner))
        elif owner in frozen and stored.shape != frozen[owner]:
            _add_frozen(checkpoint, files, name, Parameter(owner, frozen[owner]), tensors)
        else:
            tensors.add(name, stored.dtype, stored.shape, _whole(name, 0, stored))
            _compare_replicas(checkpoint, files, modules, name, stored, tensors)
    others = {name: value for name, value in module.items() if name not in own}
    common = {key: value for key, value in first.value.items() if key not in _NOT_COMMON}
    return Model(files[0].where, groups, own, common | ({"module": others} if others else {}))


def _group(
    shapes: Mapping[str, tuple[int, ...]], paddings: Sequence[Sequence[int]] | None, number: int, where: str
) -> list[Parameter]:
    skipped: Sequence[int] = next(iter(paddings[number:]), ()) if paddings else [0] * len(shapes)
    if len(skipped) != len(shapes):
        raise CorruptCheckpoint(
            error_text(
                f"open: group {number} of the optimizer isn't that of the model in {where!r}",
                found=f"{len(skipped)} in param_alignment_paddings[{number}]",
                expected=f"{len(shapes)}, by param_shapes[{number}]",
                fix="Files of two saves lie in the folder; load another checkpoint.",
            )
        )
    return [Parameter(name, shape, skip) for (name, shape), skip in zip(shapes.items(), skipped, strict=True)]


def _whole(key: str, number: int, stored: StoredTensor) -> list[Piece]:
    return [Piece(key, number, stored.begin, (0,) * len(stored.shape), stored.shape)] if prod(stored.shape) else []


def _compare_replicas(
    checkpoint: Checkpoint,
    files: Sequence[ArchiveFile],
    modules: Sequence[ValueAt],
    name: str,
    stored: StoredTensor,
    tensors: Tensors,
) -> None:
    """Refuse a tensor of which each rank of ZeRO-3 has a copy of its own, unless all are alike."""
    if not stored.is_row_major:
        tensors.refused[name] = f"{checkpoint.storage.where(stored.file)!r} has elements that aren't in row-major order"
    for file, module in zip(files[1:], modules[1:], strict=True):
        other = module.member(name).value
        if not prod(stored.shape):
            return
        places = files[0].where, file.where
        tensors.add_copy([name], stored, other if isinstance(other, StoredTensor) else None, places)


def _add_frozen(
    checkpoint: Checkpoint, files: Sequence[ArchiveFile], name: str, parameter: Parameter, tensors: Tensors
) -> None:
    """Add a frozen parameter of ZeRO-3: each rank has its part, cut as trained ones are."""
    parts = (file.saved.member("frozen_param_fragments").member(parameter.name) for file in files)
    vectors = [Vector(number, part.of(StoredTensor)) for number, part in enumerate(parts)]
    by = f"frozen_param_shapes in {files[0].where!r}"
    expected = -(-prod(parameter.shape) // len(vectors))
    check_length(checkpoint, vectors, expected, f"its part of {parameter.name!r}", by)
    pieces = split_pieces(lambda _: name, [parameter], vectors)
    tensors.add(name, vectors[0].tensor.dtype, parameter.shape, pieces)


def check_length(checkpoint: Checkpoint, vectors: Sequence[Vector], expected: int, what: str, by: str) -> None:
    """Raise unless each rank's vector has that many elements, as another place says, which is named.

    Raises:
        CorruptCheckpoint: one hasn't.
    """
    check_flat(checkpoint, vectors, what)
    wrong = [
        f"{checkpoint.storage.where(vector.tensor.file)!r}: {vector.tensor.shape}"
        for vector in vectors
        if vector.tensor.shape != (expected,)
    ]
    if wrong:
        what = f"open: {what} has another length than the parameters"
        fix = "A file is of another save, or of another number of ranks; copy all files of one save."
        raise CorruptCheckpoint(error_text(what, offenders=wrong, expected=f"({expected},), by {by}", fix=fix))


def check_flat(checkpoint: Checkpoint, vectors: Sequence[Vector], what: str) -> None:
    """Raise unless the ranks' vectors are adjacent elements of one dtype, as the places of parameters in them assume.

    Raises:
        CorruptCheckpoint: one isn't.
    """
    dtype = vectors[0].tensor.dtype
    wrong = [
        f"{checkpoint.storage.where(one.file)!r}: {one.shape} {str(one.dtype).removeprefix('torch.')}"
        for one in (vector.tensor for vector in vectors)
        if len(one.shape) != 1 or not one.is_row_major or one.dtype != dtype
    ]
    if wrong:
        what = f"open: {what} isn't adjacent elements of one axis and one dtype on each rank"
        fix = "A file was damaged, or is of another save; copy all files of one save."
        raise CorruptCheckpoint(error_text(what, offenders=wrong, fix=fix))


def plain(value: Any) -> Any:
    """Return a value with a dict in place of each object of DeepSpeed's."""

    def unstubbed(leaf: Any) -> Any:
        return leaf.state if isinstance(leaf, Stub) else leaf

    return map_shards(unstubbed, value)
