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
from ..archives import ArchiveFile, Piece, Tensors, state_key
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
        groups: the trainable parameters of each group, in the order of the flat vectors.
        module: rank 0's tensors by name; those of ZeRO-3's parameters are empty.
        common: what else the files hold.
    """

    groups: Sequence[Sequence[Parameter]]
    module: Mapping[str, StoredTensor]
    common: dict[str, Any]

    @property
    def parameters(self) -> dict[str, Parameter]:
        """The trainable parameters by name."""
        return {parameter.name: parameter for group in self.groups for parameter in group}


def field(value: Any, name: str, kind: type[Any] | tuple[type[Any], ...], where: str) -> Any:
    """Return a field of a dict in a file.

    Raises:
        CorruptCheckpoint: it isn't there, or is of another type.
    """
    found = value.get(name) if isinstance(value, dict) else None
    if not isinstance(found, kind):
        raise _unlike_deepspeed(where, f"{name} is a {type(found).__name__}")
    return found


def _unlike_deepspeed(where: str, found: str) -> CorruptCheckpoint:
    what, fix = f"open: {where!r} isn't as DeepSpeed writes it", "It was damaged, or made by another program."
    return CorruptCheckpoint(error_text(what, found=found, fix=fix))


def _shapes(value: Any, name: str, where: str) -> dict[str, tuple[int, ...]]:
    """Return shapes by name, checked."""
    if not isinstance(value, dict):
        raise _unlike_deepspeed(where, f"{name} has a {type(value).__name__}")
    for key, shape in value.items():
        is_shape = isinstance(shape, (tuple, list)) and all(type(size) is int and size >= 0 for size in shape)
        if not (isinstance(key, str) and is_shape):
            raise _unlike_deepspeed(where, f"{name} has {key!r}: {str(shape)[:100]}")
    return {key: tuple(shape) for key, shape in value.items()}


def read_model(checkpoint: Checkpoint, files: Sequence[ArchiveFile], paddings: Any, tensors: Tensors) -> Model:
    """Return what the model files say, and add the tensors that aren't trained: buffers, frozen parameters.

    Args:
        checkpoint: where the files are.
        files: by data-parallel rank; their numbers are their positions.
        paddings: elements after each parameter of each group, where the optimizer's files have them; else None.
        tensors: filled with the model's own tensors.

    Raises:
        CorruptCheckpoint: the files contradict each other.
    """
    first = files[0]
    where = checkpoint.storage.where(first.name)
    module = field(first.value, "module", dict, where)
    listed = first.value.get("param_shapes") or []
    shapes = [_shapes(each, "param_shapes", where) for each in (listed if isinstance(listed, list) else [listed])]
    groups = [_group(names, paddings, number) for number, names in enumerate(shapes)]
    trained = {parameter.name: parameter for group in groups for parameter in group}
    own = {name: value for name, value in module.items() if isinstance(value, StoredTensor)}
    # Only the first rank's file names them under ZeRO-3.
    shared = field({"shared_params": {}} | first.value, "shared_params", dict, where)
    frozen = _shapes(first.value.get("frozen_param_shapes") or {}, "frozen_param_shapes", where)
    for name, stored in own.items():
        owner = shared.get(name, name)
        if owner in trained and stored.shape != trained[owner].shape:
            tensors.add_derived(name, stored.dtype, trained[owner].shape, state_key("param", owner))
        elif owner in frozen and stored.shape != frozen[owner]:
            _add_frozen(checkpoint, files, name, Parameter(owner, frozen[owner]), tensors)
        else:
            tensors.add(name, stored.dtype, stored.shape, _whole(name, 0, stored))
            _compare_replicas(checkpoint, files, name, stored, tensors)
    others = {name: value for name, value in module.items() if name not in own}
    common = {key: value for key, value in first.value.items() if key not in _NOT_COMMON}
    return Model(groups, own, common | ({"module": others} if others else {}))


def _group(shapes: Mapping[str, tuple[int, ...]], paddings: Any, number: int) -> list[Parameter]:
    skipped = paddings[number] if paddings else [0] * len(shapes)
    if len(skipped) != len(shapes):
        raise CorruptCheckpoint(
            error_text(
                f"open: group {number} of the optimizer isn't the model's",
                found=f"{len(skipped)} paddings of parameters",
                expected=f"{len(shapes)}",
                fix="Files of two saves lie in the folder; load another checkpoint.",
            )
        )
    return [Parameter(name, shape, skip) for (name, shape), skip in zip(shapes.items(), skipped, strict=True)]


def _whole(key: str, number: int, stored: StoredTensor) -> list[Piece]:
    return [Piece(key, number, stored.begin, (0,) * len(stored.shape), stored.shape)] if prod(stored.shape) else []


def _compare_replicas(
    checkpoint: Checkpoint, files: Sequence[ArchiveFile], name: str, stored: StoredTensor, tensors: Tensors
) -> None:
    """Refuse a tensor of which each rank of ZeRO-3 has a copy of its own, unless all are alike."""
    if not stored.is_row_major:
        tensors.refused[name] = f"{checkpoint.storage.where(stored.file)!r} has elements that aren't in row-major order"
    for file in files[1:]:
        other = file.value.get("module", {}).get(name) if isinstance(file.value, dict) else None
        if not prod(stored.shape):
            return
        pair = (checkpoint.storage.where(one) for one in (stored.file, file.name))
        differ = "{!r} and {!r} have different copies of it".format(*pair)
        tensors.add_copy(name, stored, other if isinstance(other, StoredTensor) else None, differ)


def _add_frozen(
    checkpoint: Checkpoint, files: Sequence[ArchiveFile], name: str, parameter: Parameter, tensors: Tensors
) -> None:
    """Add a frozen parameter of ZeRO-3: each rank has its part, cut as trained ones are."""
    vectors = []
    for number, file in enumerate(files):
        where = checkpoint.storage.where(file.name)
        fragments = field(file.value, "frozen_param_fragments", dict, where)
        vectors.append(Vector(number, field(fragments, parameter.name, StoredTensor, where)))
    check_length(checkpoint, vectors, -(-prod(parameter.shape) // len(vectors)), f"its part of {parameter.name!r}")
    pieces = split_pieces(lambda _: name, [parameter], vectors)
    tensors.add(name, vectors[0].tensor.dtype, parameter.shape, pieces)


def check_length(checkpoint: Checkpoint, vectors: Sequence[Vector], expected: int, what: str) -> None:
    """Raise unless each rank's vector has one axis, of that many elements.

    Raises:
        CorruptCheckpoint: one hasn't.
    """
    wrong = [
        f"{checkpoint.storage.where(vector.tensor.file)!r}: {vector.tensor.shape}"
        for vector in vectors
        if vector.tensor.shape != (expected,) or not vector.tensor.is_row_major
    ]
    if wrong:
        fix = "A file is of another save, or of another number of ranks; copy all files of one save."
        raise CorruptCheckpoint(
            error_text(
                f"open: {what} has another length than the parameters",
                offenders=wrong,
                expected=f"({expected},)",
                fix=fix,
            )
        )


def plain(value: Any) -> Any:
    """Return a value with a dict in place of each object of DeepSpeed's."""

    def unstubbed(leaf: Any) -> Any:
        return leaf.state if isinstance(leaf, Stub) else leaf

    return map_shards(unstubbed, value)
