"""Conversion between other libraries' shards and ours: a module for each library, two for Megatron-Core; and plugs.

A plug is a class that another library calls in place of its own class, such as the classes of `dcp` for
torch.distributed.checkpoint. Plugs derive from the library's classes, so they are imported when they are first asked
for. So is the module `jax`; the other modules import a library only to build its objects.
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
