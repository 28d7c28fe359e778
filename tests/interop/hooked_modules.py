"""A module with hooks of torch and of a user's, cut by FSDP2."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shardtree.interop.dtensor import ModuleKeys, _module_hooks, load_module
from shardtree.world import World


def halves(_: nn.Module, state: Any, prefix: str, *__: Any) -> None:
    state[f"{prefix}weight"] = torch.cat([state.pop(f"{prefix}upper"), state.pop(f"{prefix}lower")])
    state[f"{prefix}bias"] = state[f"{prefix}bias"] * 2


def hooked_module() -> nn.Module:
    torch.manual_seed(5)
    layers = [
        nn.Linear(3, 5),
        nn.utils.parametrizations.weight_norm(nn.Linear(5, 4)),
        nn.BatchNorm1d(4),
        nn.Linear(4, 4),
    ]
    model = nn.Sequential(*layers)
    model[3].register_load_state_dict_pre_hook(halves)
    return model


def hooked_values() -> dict[str, torch.Tensor]:
    numbers = torch.Generator().manual_seed(1)
    state = {name: torch.randn(each.shape, generator=numbers) for name, each in hooked_module().state_dict().items()}
    for number, name in enumerate(("1.weight_g", "1.weight_v")):
        state[name] = state.pop(f"1.parametrizations.weight.original{number}")
    state["3.upper"], state["3.lower"] = state.pop("3.weight").split((1, 3))
    return {name: each for name, each in state.items() if name != "2.num_batches_tracked"}


def check_under_fsdp2(world: World, folder: str) -> None:
    """Raise unless each rank's part is of what `load_state_dict` gives to the whole module."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    theirs, ours = hooked_module(), hooked_module()
    theirs.load_state_dict(hooked_values())
    mesh = init_device_mesh("cpu", (world.size,), mesh_dim_names=("dp",))
    for layer in ours:
        fully_shard(layer, mesh=mesh)
    fully_shard(ours, mesh=mesh)
    assert [_module_hooks.own_hooks(layer) for layer in ours] == [[], [], [], ["halves"]]
    post_hooks = [hook for layer in ours.modules() for hook in layer._load_state_dict_post_hooks.values()]
    assert len(post_hooks) == len([*ours.parameters()])
    assert all(map(_module_hooks.is_of_fsdp2, post_hooks))
    assert load_module(ours, folder) == ModuleKeys((), (), ("2.num_batches_tracked",))
    for name, each in ours.state_dict().items():
        whole = each.full_tensor() if hasattr(each, "full_tensor") else each
        assert torch.equal(whole, theirs.state_dict()[name]), name
    assert torch.isfinite(ours(torch.ones(2, 3))).all()
