"""Answer, line by line, which index each device gets of an array: JAX's NamedSharding on made-up CPU devices.

A process of its own, since importing JAX starts threads. A question is JSON: shape, mesh (names and sizes), spec (for
each axis a name, a list of names, or null). The answer is, for each device in the mesh's order, start and stop of each
axis, and which replica the device has; or null where JAX refuses.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=32"

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec


def answer(shape: list[int], mesh: dict[str, int], spec: list[Any]) -> list[Any] | None:
    sizes = list(mesh.values())
    devices = np.array(jax.devices()[: int(np.prod(sizes))]).reshape(sizes)
    entries = [tuple(entry) if isinstance(entry, list) else entry for entry in spec]
    sharding = NamedSharding(Mesh(devices, tuple(mesh)), PartitionSpec(*entries))
    try:
        array = jax.device_put(np.zeros(shape, dtype=np.int8), sharding)
    except ValueError:  # an axis that isn't a multiple of its number of parts
        return None
    held = {shard.device: shard for shard in array.addressable_shards}
    return [
        [
            [part.indices(size)[:2] for part, size in zip(held[device].index, shape, strict=True)],
            held[device].replica_id,
        ]
        for device in devices.flat
    ]


for line in sys.stdin:
    sys.stdout.write(f"{json.dumps(answer(**json.loads(line)))}\n")
    sys.stdout.flush()
