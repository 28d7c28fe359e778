"""Conversion between other libraries' shards and ours: a module for each library, two for Megatron-Core; and plugs.

A plug is a class in the place that another library has for it, such as `dcp` for torch.distributed.checkpoint. Being
derived from the library's own classes, it is imported when it is first asked for, and so is `jax`; the other modules
import no library before they have to build its objects.
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
