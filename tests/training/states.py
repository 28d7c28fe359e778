"""What a rank of a training run saves and loads: its model, its optimizer's part, and where its data are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from shardtree.buffers import BufferPlan, buffer_slices, flat_shards, flat_targets
from shardtree.lenses import Lens, attention_qkv, factories_by_pattern, gate_and_up, padded_axis
from shardtree.mapping import ShardedObject, ShardedTensor
from shardtree.optim import (
    abstract_optim_state,
    get_param_id_to_name_map,
    optim_state_by_id,
    optim_state_by_name,
    optim_state_to_sharding_state,
    sharding_state_to_optim_state,
)
from tests.training.transformer import Config, cut_axis, held_weight
from tests.training.zero import Trainer

MASTER = "optimizer.state.fp32_param"
ADAM = {"step": torch.tensor(0.0), "exp_avg": torch.float32, "exp_avg_sq": torch.float32}


def model_lenses(config: Config, tp: int) -> dict[str, Lens]:
    """Return how what the model fuses or pads is stored: apart, and without padding."""
    qkv = attention_qkv(
        heads=config.heads,
        query_groups=config.groups,
        head_size=config.head_dim,
        part="linear_qkv",
        names=("q_proj", "k_proj", "v_proj"),
    )
    padded = padded_axis(config.vocabulary)
    return {
        "**.linear_qkv.weight": qkv,
        "**.linear_fc1.weight": gate_and_up(tensor_parallel=tp, part="linear_fc1", names=("gate_proj", "up_proj")),
        "embedding.weight": padded,
        "output_layer.weight": padded,
    }


def sharded_model(trainer: Trainer, lenses: Mapping[str, Lens]) -> dict[str, Any]:
    """Return the model's parameters as shards and factories, by name."""
    place, shards = trainer.place, {}
    for name, parameter in trainer.parameters.items():
        axis = cut_axis(name)
        cuts = [] if axis is None else [(axis, place.tp_rank, place.layout.tp)]
        replica = (0, place.tp_rank if axis is None else 0, place.dp_rank)
        shards[name] = ShardedTensor.from_rank_offsets(name, parameter.detach(), *cuts, replica_id=replica)
    return factories_by_pattern(shards, lenses, absent=["output_layer.weight"])


def named_optimizer(trainer: Trainer) -> tuple[dict[int, str], Any]:
    """Return the names of the optimizer's ids, and its state dict by names."""
    names = get_param_id_to_name_map(trainer.masters, trainer.optimizer)
    return names, optim_state_by_name(trainer.optimizer.state_dict(), names)


def saved_state(trainer: Trainer, lenses: Mapping[str, Lens], plan: BufferPlan) -> dict[str, Any]:
    """Return the tree that a rank saves."""
    model, rank = sharded_model(trainer, lenses), trainer.place.dp_rank
    own = flat_shards(plan, rank, trainer.parts, model)
    return {
        "model": model,
        "masters": flat_shards(plan, rank, trainer.parts, model, prefix=MASTER),
        "optimizer": optim_state_to_sharding_state(named_optimizer(trainer)[1], own),
        **progress(trainer),
    }


def wanted_state(trainer: Trainer, lenses: Mapping[str, Lens], plan: BufferPlan) -> dict[str, Any]:
    """Return the tree that a rank asks for, once its trainer is made."""
    model, rank = sharded_model(trainer, lenses), trainer.place.dp_rank
    own = flat_targets(plan, rank, model)
    return {
        "model": model,
        "masters": flat_targets(plan, rank, model, prefix=MASTER),
        "optimizer": abstract_optim_state(named_optimizer(trainer)[1], own, ADAM),
        **progress(trainer),
    }


def progress(trainer: Trainer) -> dict[str, Any]:
    """Return how far a run is. Each rank's generator is in the same state, so one of them is stored."""
    draw = ShardedObject("draw", trainer.draw.get_state(), (1,), (0,), replica_id=trainer.place.rank)
    return {"draw": draw, "step": trainer.step}


def resume(trainer: Trainer, loaded: Mapping[str, Any], plan: BufferPlan) -> None:
    """Put a loaded tree into a trainer."""
    with torch.no_grad():
        for name, parameter in trainer.parameters.items():
            parameter.copy_(loaded["model"][name])
        for part, found in zip(
            trainer.parts, buffer_slices(plan, trainer.place.dp_rank, loaded["masters"]), strict=True
        ):
            part.copy_(found)
    names, _ = named_optimizer(trainer)
    state = sharding_state_to_optim_state(loaded["optimizer"])
    trainer.optimizer.load_state_dict(optim_state_by_id(state, names))
    trainer.draw.set_state(loaded["draw"])
    trainer.step = loaded["step"]


def described(trainer: Trainer) -> tuple[dict[str, Lens], BufferPlan]:
    """Return what there is to say of a trainer: how its fused tensors are stored, and how its buffer lies."""
    return model_lenses(trainer.model.config, trainer.place.layout.tp), trainer.plan


def differences(trainer: Trainer, stored: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the names of what a rank holds other bits of than whole tensors have; cut by hand, not by lenses."""
    wrong = []
    for prefix in ("", *(f"optimizer.state.{key}." for key in ("fp32_param", "exp_avg", "exp_avg_sq"))):
        whole = {key.removeprefix(prefix): each for key, each in stored.items() if key.startswith(prefix)}
        for name, tensors in _held(trainer, prefix, whole).items():
            wrong += [prefix + name] * (not torch.equal(*tensors))
    steps = {name: trainer.optimizer.state[master]["step"] for name, master in trainer.masters.items()}
    return wrong + [f"step of {name}" for name, step in steps.items() if step != trainer.step]


def _held(trainer: Trainer, prefix: str, whole: dict[str, torch.Tensor]) -> dict[str, tuple[torch.Tensor, ...]]:
    """Return, by name, what a rank holds, and what it should."""
    if not prefix:
        return {
            name: (parameter.detach(), held_weight(trainer.model, name, whole))
            for name, parameter in trainer.parameters.items()
        }
    key = prefix.split(".")[-2]
    found = {}
    for part in trainer.plan.ranges(trainer.place.dp_rank):
        master = trainer.masters[part.name]
        own = master.detach() if key == "fp32_param" else trainer.optimizer.state[master][key]
        should = held_weight(trainer.model, part.name, whole).flatten()[part.flattened_range]
        found[part.name] = (own, should)
    return found
