"""Conversion between other libraries' shards and ours: a module for each library, two for Megatron-Core.

The module `dcp` has plugs instead: classes that torch.distributed.checkpoint calls in place of its own ones. Plugs
derive from the library's classes, so their module is imported on first access, and so is `jax`. The other modules
import a library only to build its objects.
"""

import types
import typing

from . import deepspeed, dtensor, megatron, megatron_optimizer

__all__ = ["dcp", "deepspeed", "dtensor", "jax", "megatron", "megatron_optimizer"]

if typing.TYPE_CHECKING:
    from . import dcp as dcp
    from . import jax as jax
else:

    def __getattr__(name: str) -> types.ModuleType:
        from ..core.deferred import import_quickly

        if name in __all__:
            return import_quickly(f".{name}", __name__)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
