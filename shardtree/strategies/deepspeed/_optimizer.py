"""DeepSpeed's optimizer files: the flat vectors of each group by rank, its states, its hyperparameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...codec.archives import StoredTensor
from ...errors import CorruptCheckpoint, error_text
from .._values import Checkpoint
from ..archives import ArchiveFile
from ._flat import Vector
from ._model import field

_MASTERS = {True: "fp32_flat_groups", False: "single_partition_of_fp32_groups"}


@dataclass(frozen=True, slots=True, eq=False)
class Optimizer:
    """What the optimizer files say. A group is what has flat vectors: a param group, or a sub-group of ZeRO-3.

    Attributes:
        is_zero3: whether parameters are cut each by itself.
        ranks: how many ranks saved.
        paddings: elements skipped after each parameter of each group; None where there are none.
        masters: of each group, by rank.
        states: by rank, a group's states by its number.
        param_groups: hyperparameters; () where the files have none.
        owners: the groups of each of them.
        step: the step of all, where it is in none of these.
        scaler: what the loss scaler was.
    """

    is_zero3: bool
    ranks: int
    paddings: Sequence[Sequence[int]] | None
    masters: Sequence[Sequence[Vector]]
    states: Sequence[Mapping[Any, Mapping[str, Any]]]
    param_groups: Sequence[Mapping[str, Any]]
    owners: Sequence[Sequence[int]]
    step: Any
    scaler: Mapping[str, Any]

    def param_group(self, group: int) -> Mapping[str, Any]:
        """Return a group's hyperparameters; {} where the files have none."""
        owners = (owner for owner, groups in enumerate(self.owners) if group in groups)
        owner = next(owners, None)
        return {} if owner is None else self.param_groups[owner]


def read_optimizer(checkpoint: Checkpoint, files: Sequence[ArchiveFile], first: int, saved_by: Any) -> Optimizer:
    """Return what the optimizer files say.

    Args:
        checkpoint: where they are.
        files: by rank.
        first: the number of the first file.
        saved_by: how many ranks saved, by the model file; for files that don't say it.

    Raises:
        CorruptCheckpoint: a file isn't as DeepSpeed writes it, or files have different groups.
    """
    where = [checkpoint.storage.where(file.name) for file in files]
    inner = [field(file.value, "optimizer_state_dict", dict, at) for file, at in zip(files, where, strict=True)]
    # By the keys, since BF16_Optimizer names no stage, and the stages are cut in different ways.
    is_zero3 = _MASTERS[True] in inner[0]
    vectors = [field(one, _MASTERS[is_zero3], list, at) for one, at in zip(inner, where, strict=True)]
    counts = {len(one) for one in vectors}
    if len(counts) > 1 or not all(isinstance(tensor, StoredTensor) for one in vectors for tensor in one):
        what = f"open: {where[0]!r} and the other ranks' files have different groups of parameters"
        raise CorruptCheckpoint(error_text(what, found=f"{sorted(counts)} groups", fix="Copy all files of one save."))
    masters = [[Vector(first + rank, one[group]) for rank, one in enumerate(vectors)] for group in range(max(counts))]
    count = inner[0].get("partition_count") or saved_by or len(files)
    base = [one.get("optimizer_state_dict" if is_zero3 else "base_optimizer_state") for one in inner]
    states: list[Mapping[Any, Any]] = []
    for one, at in zip(base, where, strict=True):
        # elastic_checkpoint: a list by group, and no hyperparameters
        states.append(dict(enumerate(one)) if isinstance(one, list) else field(one, "state", dict, at))
    groups: list[Any] = [] if isinstance(base[0], list) else list(field(base[0], "param_groups", list, where[0]))
    owners = [group.get("params", [number]) if is_zero3 else [number] for number, group in enumerate(groups)]
    scaler = {key: inner[0][key] for key in _SCALER if key in inner[0]}
    return Optimizer(
        is_zero3=is_zero3,
        ranks=count if isinstance(count, int) else max(count),
        paddings=inner[0].get("param_alignment_paddings"),
        masters=masters,
        states=states,
        param_groups=groups,
        owners=owners,
        step=inner[0].get("base_optimizer_state_step"),
        scaler=scaler,
    )


_SCALER = ("loss_scaler", "dynamic_loss_scale", "overflow", "clip_grad")
