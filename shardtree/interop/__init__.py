"""Conversion between other libraries' shards and ours: a module for each library, two for Megatron-Core.

No module here imports its library before it has to build the library's own objects.
"""

from . import deepspeed, dtensor, megatron, megatron_optimizer

__all__ = ["deepspeed", "dtensor", "megatron", "megatron_optimizer"]
