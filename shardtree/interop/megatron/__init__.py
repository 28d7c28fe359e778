"""Megatron-Core's shards as ours, and ours as Megatron-Core's: the two directions undo each other.

Leaves are told by the name of their class and by their attributes, so that a tree of any version of Megatron-Core, or
of a fork of it, is read without importing it.
"""

from ._from import from_megatron as from_megatron
from ._to import to_megatron as to_megatron
