"""Convert a checkpoint and print by how many bytes the memory in use peaked.

Called with the source, the destination, a folder for a conversion that warms up, and "lazy" or "read": what the
transform does to the tensors.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import shardtree as st
from shardtree.conversion import convert


def peak() -> int:
    """Return the most memory that this program has had in use; getrusage would count what its parent had too."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024


def read(leaf: Any) -> Any:
    return replace(leaf, data=leaf.data.read())


torch.set_num_threads(1)
source, destination, warm, how = sys.argv[1:]
halves = st.bind(st.cast, torch.bfloat16)
transform = halves if how == "lazy" else st.compose(lambda tree: st.map_shards(read, tree), halves)
convert(source, warm, backend="safetensors", transform=halves, leave_out=["w*"])
before = peak()
convert(source, destination, backend="safetensors", transform=transform, max_bytes_in_flight=4 * 1024 * 1024)
print(peak() - before)  # noqa: T201 - the parent reads it
