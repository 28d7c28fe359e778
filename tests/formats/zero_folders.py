"""Folders as DeepSpeed writes them, made here: whole tensors in, each rank's files out, cut by DeepSpeed's rules."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from hypothesis import strategies as some

from shardtree.storage import MemoryStorage
from tests.shell.table.folders import archive

MOMENTS = ("exp_avg", "exp_avg_sq")


def random(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Save:
    """What was saved, and how.

    Attributes:
        groups: shapes of each group's parameters, by name.
        ranks: of data parallelism.
        stage: 1, 2 or 3.
        dtype: of the weights.
        order: in the flat vectors, of each group's parameters by position; None for their own.
        skipped: elements after each parameter that belong to none, as with `parameter_alignment`.
        pad: of moments, where ZeRO-3 pads parameters; masters have anything there.
        form: "usual", "elastic" or "bf16_optimizer".
    """

    groups: list[dict[str, tuple[int, ...]]]
    ranks: int = 2
    stage: int = 1
    dtype: torch.dtype = torch.bfloat16
    order: str = "own"
    skipped: int = 0
    pad: float = 0.0
    form: str = "usual"
    seed: int = 0
    extra: dict[str, Any] = field(default_factory=dict)

    def state(self, state: str) -> dict[str, torch.Tensor]:
        shapes = {name: shape for group in self.groups for name, shape in group.items()}
        offset = 1000 * (1 + ("param", *MOMENTS).index(state)) + self.seed
        return {name: random(shape, offset + number) for number, (name, shape) in enumerate(shapes.items())}

    def in_order(self, group: dict[str, tuple[int, ...]]) -> list[str]:
        names = list(group)
        if self.order == "own":
            return names
        return [name for first in range(self.ranks) for name in names[first :: self.ranks]]  # round robin

    def expected(self) -> dict[str, torch.Tensor]:
        masters = self.state("param")
        found = {name: master.to(self.dtype) for name, master in masters.items()}
        for state in ("param", *MOMENTS):
            found |= {f"optimizer.state.{state}.{name}": tensor for name, tensor in self.state(state).items()}
        return found | {f"optimizer.state.step.{name}": torch.tensor(3.0) for name in masters}


def cut(
    save: Save, group: dict[str, tuple[int, ...]], tensors: dict[str, torch.Tensor], pad: float
) -> list[torch.Tensor]:
    """Return each rank's flat vector of a group, padding in."""
    names = save.in_order(group)
    if save.stage == 3:
        parts: list[list[torch.Tensor]] = [[] for _ in range(save.ranks)]
        for name in names:
            flat = tensors[name].flatten()
            size = -(-flat.numel() // save.ranks)
            padded = torch.cat([flat, torch.full((size * save.ranks - flat.numel(),), pad)])
            for rank in range(save.ranks):
                parts[rank].append(padded[rank * size : (rank + 1) * size])
        return [torch.cat([torch.zeros(0), *own]) for own in parts]
    flats = [torch.cat([tensors[name].flatten(), torch.zeros(save.skipped)]) for name in names]
    whole = torch.cat([torch.zeros(0), *flats])
    padded = torch.cat([whole, torch.zeros(-whole.numel() % (2 * save.ranks))])
    return list(padded.view(save.ranks, -1).unbind())


def padding(save: Save, group: dict[str, tuple[int, ...]], rank: int) -> int:
    total = sum(prod(shape) + save.skipped for shape in group.values())
    size = -(-total // (2 * save.ranks)) * 2
    return min(max((rank + 1) * size - total, 0), size)


def optimizer_file(save: Save, rank: int) -> dict[str, Any]:
    vectors = {
        state: [cut(save, group, save.state(state), pad)[rank] for group in save.groups]
        for state, pad in zip(("param", *MOMENTS), (9.0, save.pad, save.pad), strict=True)
    }
    step = torch.tensor(3.0)
    own = [{"step": step, **{state: vectors[state][number] for state in MOMENTS}} for number in range(len(save.groups))]
    param_groups = [{"lr": 0.1 / (1 + number), "params": [number]} for number in range(len(save.groups))]
    if save.stage == 3:
        outer = {"state": dict(enumerate(own)), "param_groups": param_groups}
        inner = {"zero_stage": 3, "partition_count": save.ranks, "optimizer_state_dict": outer}
        return {"optimizer_state_dict": inner | {"fp32_flat_groups": vectors["param"]}, "ds_version": "0.19.8"}
    kept = [one.numel() - padding(save, group, rank) for one, group in zip(vectors["param"], save.groups, strict=True)]
    masters = [one[:length] for one, length in zip(vectors["param"], kept, strict=True)]
    inner = {"zero_stage": save.stage, "partition_count": [save.ranks] * len(save.groups), "overflow": False}
    if save.skipped:
        inner["param_alignment_paddings"] = [[save.skipped] * len(group) for group in save.groups]
    base: Any = {"state": dict(enumerate(own)), "param_groups": param_groups}
    if save.form == "elastic":
        base = [
            {"step": step, **{state: one[state][:length] for state in MOMENTS}}
            for one, length in zip(own, kept, strict=True)
        ]
    if save.form == "bf16_optimizer":
        del inner["zero_stage"]
        masters = vectors["param"]
    inner |= {"base_optimizer_state": base, "single_partition_of_fp32_groups": masters}
    return {"optimizer_state_dict": inner, "ds_version": "0.19.8"}


def model_file(save: Save, rank: int) -> dict[str, Any]:
    weights = {name: tensor.to(save.dtype) for name, tensor in save.state("param").items()}
    shapes = [OrderedDict((name, torch.Size(group[name])) for name in save.in_order(group)) for group in save.groups]
    if save.stage == 3:
        weights = {name: torch.empty(0, dtype=save.dtype) for name in weights}
    return {
        "module": OrderedDict(weights),
        "param_shapes": shapes,
        "dp_world_size": save.ranks,
        "iteration": 3,
        **save.extra,
    }


def folder_of(save: Save) -> MemoryStorage:
    storage = MemoryStorage()
    put(storage, "latest", b"step_3")
    for rank in range(save.ranks):
        name = f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        put(storage, f"step_3/{name}", archive(optimizer_file(save, rank)))
    for rank in range(save.ranks if save.stage == 3 else 1):
        name = f"zero_pp_rank_{rank}_mp_rank_00" if save.stage == 3 else "mp_rank_00"
        put(storage, f"step_3/{name}_model_states.pt", archive(model_file(save, rank)))
    return storage


def universal_of(save: Save, *, is_flat: bool = False) -> MemoryStorage:
    """Return a Universal Checkpoint; flat, as from ZeRO-3, it has no steps and no weights."""
    save = replace(save, stage=3 if is_flat else 1)
    storage = MemoryStorage()
    for rank in range(save.ranks if is_flat else 1):
        name = f"zero_pp_rank_{rank}_mp_rank_00" if is_flat else "mp_rank_00"
        put(storage, f"{name}_model_states.pt", archive(model_file(save, rank)))
    for state in ("param", *MOMENTS):
        for name, tensor in save.state(state).items():
            value = tensor.flatten() if is_flat else {"param": tensor, "cat_dim": 0}
            put(storage, f"zero/{name}/{'fp32' if state == 'param' else state}.pt", archive(value))
            if not is_flat:
                put(storage, f"zero/{name}/step.pt", archive(torch.tensor(3.0)))
    groups = [{"lr": 0.1, "params": [number]} for number in range(len(save.groups))]
    states = {number: {"step": torch.tensor(3.0)} for number in range(len(save.groups))}
    outer = {"optimizer_state_dict": {"state": states, "param_groups": groups}}
    put(storage, "zero/optimizer_state.pt", archive(outer if is_flat else {"param_groups": groups}))
    return storage


def put(storage: MemoryStorage, name: str, data: bytes) -> None:
    storage.write(name, [memoryview(data)], durable=False)


SHAPES = some.lists(some.integers(1, 5), max_size=3).map(tuple)


@some.composite
def saves(draw: some.DrawFn, stages: tuple[int, ...] = (1, 2, 3)) -> Save:
    counts = draw(some.lists(some.integers(1, 4), min_size=1, max_size=2))
    shapes = [[draw(SHAPES) for _ in range(count)] for count in counts]
    groups = [{f"g{number}.p{at}": shape for at, shape in enumerate(own)} for number, own in enumerate(shapes)]
    stage = draw(some.sampled_from(stages))
    return Save(
        groups,
        ranks=draw(some.integers(1, 12)),
        stage=stage,
        dtype=draw(some.sampled_from([torch.bfloat16, torch.float16, torch.float32])),
        order=draw(some.sampled_from(["own", "round robin"])),
        skipped=0 if stage == 3 else draw(some.sampled_from([0, 0, 3])),
        form=draw(some.sampled_from(["usual", "elastic", "bf16_optimizer"])),
        seed=draw(some.integers(0, 9)) * 100,
    )
