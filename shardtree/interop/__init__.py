"""Conversion between other libraries' shards and ours: one module for each library.

No module here imports its library before it has to build the library's own objects.
"""

from . import dtensor, megatron

__all__ = ["dtensor", "megatron"]
