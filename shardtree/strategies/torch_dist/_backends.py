"""The two names of one format of tensors: Megatron-Core's, and what torch.distributed.checkpoint writes by itself."""

from __future__ import annotations

TORCH_DIST, DCP = ("torch_dist", 1), ("dcp", 1)

INDEX_FILE = ".metadata"
"""The file that says which archive lies where."""
