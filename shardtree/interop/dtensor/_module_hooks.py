"""Load hooks of a module: torch's hooks are known by name, all others count as the module's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.modules.batchnorm import _NormBase

# torch's own hooks, which may run around our fill, since they look at no element. They are private; their names are
# those of torch 2.6 and later. A hook of another name runs like any other: correctly, but its module reads its tensors
# whole.

_KNOWN_HOOKS = {
    # FSDP2: parameters must be sharded before, and are padded again after a load that replaced them.
    (
        "torch.distributed.fsdp._fully_shard._fsdp_param_group",
        "FSDPParamGroup._register_state_dict_hooks.<locals>.to_sharded_hook",
    ),
    ("torch.distributed.fsdp._fully_shard._fsdp_param", "FSDPParam.__init__.<locals>.<lambda>"),
    # These move entries to other names, and make memory of the stored shape.
    ("torch.nn.utils.parametrizations", "weight_norm.<locals>._weight_norm_compat_hook"),
    ("torch.distributed.algorithms._checkpoint.checkpoint_wrapper", "ActivationWrapper._pre_load_state_dict_hook"),
    ("torch.nn.modules.lazy", "LazyModuleMixin._lazy_load_hook"),
}

_FSDP_HOOKS = {(module, name) for module, name in _KNOWN_HOOKS if module.startswith("torch.distributed.fsdp")}

_KNOWN_OVERRIDES = {
    ("torch.nn.modules.module", "Module._load_from_state_dict"),
    ("torch.nn.modules.batchnorm", "_NormBase._load_from_state_dict"),
    ("torch.nn.modules.instancenorm", "_InstanceNorm._load_from_state_dict"),
}


def loads_itself(module: torch.nn.Module, entries: Mapping[str, Any], prefix: str) -> bool:
    """Return whether a module has hooks, or a loading method of its own, that may look at stored values."""
    return bool(own_hooks(module)) or (
        # Torch's own loading refuses running statistics of old checkpoints here, or reports them.
        isinstance(module, _NormBase)
        and not module.track_running_stats
        and any(f"{prefix}running_{name}" in entries for name in ("mean", "var"))
    )


def own_hooks(module: torch.nn.Module) -> list[str]:
    """Return the names of a module's load pre-hooks, and of its `_load_from_state_dict`, unless they are torch's own.

    Examples:
        >>> own_hooks(torch.nn.BatchNorm1d(2))
        []
        >>> model = torch.nn.Linear(2, 2)
        >>> _ = model.register_load_state_dict_pre_hook(print)
        >>> own_hooks(model)
        ['print']
    """
    override = module._load_from_state_dict  # the instance may have one of its own
    names = [] if _identity(override) in _KNOWN_OVERRIDES else [name_of(override)]
    hooks = module._load_state_dict_pre_hooks.values()
    return names + [name_of(hook) for hook in hooks if _identity(hook) not in _KNOWN_HOOKS]


def has_renaming_hooks(module: torch.nn.Module) -> bool:
    """Return whether a module may load stored entries whose names its own state dict lacks.

    All load pre-hooks except FSDP2's may rename entries, and so may a `_load_from_state_dict` that isn't torch's.
    """
    hooks = module._load_state_dict_pre_hooks.values()
    return bool(own_hooks(module)) or not all(map(is_of_fsdp2, hooks))


def is_of_fsdp2(hook: Any) -> bool:
    """Return whether a hook is FSDP2's."""
    return _identity(hook) in _FSDP_HOOKS


def _identity(function: Any) -> tuple[Any, Any]:
    function = getattr(function, "hook", function)  # torch wraps pre-hooks, to pass them their module
    return getattr(function, "__module__", None), getattr(function, "__qualname__", None)


def name_of(function: Any) -> str:
    """Return the name of a hook or method, for errors."""
    _, name = _identity(function)
    return str(name) if name is not None else type(function).__name__


def overrides_loading(module: torch.nn.Module) -> bool:
    """Return whether a module overrides `load_state_dict`, which torch calls on the outermost module alone."""
    return _identity(module.load_state_dict) != ("torch.nn.modules.module", "Module.load_state_dict")
