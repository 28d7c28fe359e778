"""DeepSpeed's optimizer files: the flat vectors of each group by rank, its states, its hyperparameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...codec.archives import StoredTensor
from ...errors import CorruptCheckpoint, error_text
from .._values import Checkpoint
from ..archives import ArchiveFile, ValueAt
from ._flat import Vector
from ._model import check_flat

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
        param_groups: by rank, hyperparameters; () where the files have none.
        owners: the groups of each of them.
        steps: by rank, the step of all, where it is in none of these.
        scaler: what the loss scaler was.
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
        """Return by rank a group's step, where it is among its hyperparameters, as FusedAdam has it, or one of all."""
        owner = next((owner for owner, groups in enumerate(self.owners) if group in groups), None)
        found = [{} if owner is None else groups[owner] for groups in self.param_groups]
        return [own.get("step", step) for own, step in zip(found, self.steps, strict=True)]


def read_optimizer(checkpoint: Checkpoint, files: Sequence[ArchiveFile], first: int, saved_by: int) -> Optimizer:
    """Return what the optimizer files say.

    Args:
        checkpoint: where they are.
        files: by rank.
        first: the number of the first file.
        saved_by: how many ranks saved, by the model file, for files that don't say it; 0 where it doesn't either.

    Raises:
        CorruptCheckpoint: a file isn't as DeepSpeed writes it, or files have different groups.
    """
    inner = [file.saved.member("optimizer_state_dict") for file in files]
    # By the keys, since BF16_Optimizer names no stage, and the stages are cut in different ways.
    is_zero3 = _MASTERS[True] in inner[0].of(dict)
    vectors = [[tensor.of(StoredTensor) for tensor in one.member(_MASTERS[is_zero3]).items()] for one in inner]
    counts = {len(one) for one in vectors}
    if len(counts) > 1:
        what = f"open: {files[0].where!r} and the other ranks' files have different groups of parameters"
        raise CorruptCheckpoint(error_text(what, found=f"{sorted(counts)} groups", fix="Copy all files of one save."))
    masters = [[Vector(first + rank, one[group]) for rank, one in enumerate(vectors)] for group in range(max(counts))]
    for number, ranks in enumerate(masters):
        check_flat(checkpoint, ranks, f"the flat vector of group {number}")
    base = [one.member("optimizer_state_dict" if is_zero3 else "base_optimizer_state") for one in inner]
    groups = [[] if isinstance(one.value, list) else one.member("param_groups").items() for one in base]
    if len(own := {*map(len, groups)}) > 1:
        what = f"open: {files[0].where!r} and the other ranks' files have different groups of hyperparameters"
        raise CorruptCheckpoint(error_text(what, found=f"{sorted(own)} groups", fix="Copy all files of one save."))
    return Optimizer(
        is_zero3=is_zero3,
        ranks=_ranks(inner[0].member("partition_count", saved_by or len(files))),
        paddings=_paddings(inner[0].member("param_alignment_paddings", [])),
        masters=masters,
        states=[_states(one) for one in base],
        param_groups=[[group.of(dict) for group in each] for each in groups],
        owners=[_owned(group, number) if is_zero3 else [number] for number, group in enumerate(groups[0])],
        steps=[one.member("base_optimizer_state_step").value for one in inner],
        scaler={key: value for key, value in inner[0].of(dict).items() if key in _SCALER},
    )


def _ranks(count: ValueAt) -> int:
    """Return how many ranks saved: one number, or one for each group."""
    counts = count.items() if isinstance(count.value, (list, tuple)) else [count]
    return max((each.count() for each in counts), default=0)


def _paddings(listed: ValueAt) -> list[list[int]] | None:
    return [[number.count() for number in group.items()] for group in listed.items()] or None


def _states(base: ValueAt) -> dict[Any, dict[str, Any]]:
    # elastic_checkpoint: a list by group, and no hyperparameters
    by_group = dict(enumerate(base.items())) if isinstance(base.value, list) else base.member("state").members(int)
    return {group: {name: one.value for name, one in states.members(str).items()} for group, states in by_group.items()}


def _owned(group: ValueAt, number: int) -> list[int]:
    return [owned.count() for owned in group.member("params", [number]).items()]


_SCALER = ("loss_scaler", "dynamic_loss_scale", "overflow", "clip_grad")
