"""What tests/golden/first-edition holds, by values. The first edition of shardtree (commit 8777a4f) wrote it.

The checkpoints are frozen, and every later version loads them bit for bit. The script that made them was run in a
checkout of that commit; they can't be made again.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import zlib
from typing import Any

import torch

import shardtree as st

RANKS = 2
HOLDERS = (0, 1)
DTYPES = "bool int8 int64 float16 bfloat16 float32 float64 complex64 float8_e4m3fn float8_e5m2".split()

Moment = collections.namedtuple("Moment", ["mu", "count"])


class Kind(enum.Enum):
    """An enum of the user's."""

    LARGE = "two"


@dataclasses.dataclass(frozen=True)
class Config:
    """A dataclass of the user's."""

    rate: float
    kind: Kind


RECORDS = (Moment, Kind, Config)
for _cls in RECORDS:
    _cls.__module__ = "first_edition"  # the same name, however this file is run

SHAPES = {
    **dict.fromkeys(("held.0", "held.1", "held.2", "held.3"), (2, 3)),
    **dict.fromkeys(("mixed.0", "mixed.1", "moment.mu", "listed"), (3,)),
    "rows": (4, 3),
    "uneven": (3, 2),
    "flat": (5, 4),
    "prepended": (2, 3),
    "empty": (0, 2),
    "scalar": (),
}


def whole(key: str) -> torch.Tensor:
    """Return a tensor of the checkpoint; its bytes follow from its key."""
    name = key.removeprefix("dtype.")
    dtype = torch.float32 if name == key else getattr(torch, name)
    shape = SHAPES.get(key, (2, 3))
    count = torch.Size(shape).numel()
    start = zlib.crc32(key.encode()) % 50
    if dtype == torch.bool:
        return (torch.arange(start, start + count) % 3 == 0).reshape(shape)
    return torch.arange(start, start + count).to(dtype).reshape(shape)


def replicated(key: str, rank: int) -> st.ShardedTensor:
    """Return a tensor that every rank holds."""
    return st.ShardedTensor.from_rank_offsets(key, whole(key), replica_id=rank)


def cut(key: str, rank: int, axis: int = 0) -> st.ShardedTensor:
    """Return a rank's half of a tensor."""
    return st.ShardedTensor.from_rank_offsets(key, whole(key).chunk(RANKS, axis)[rank], (axis, rank, RANKS))


def box(key: str, start: int, stop: int) -> st.ShardedTensor:
    """Return some rows of a tensor."""
    data = whole(key)[start:stop]
    return st.ShardedTensor(key, data, data.dtype, data.shape, whole(key).shape, (start, 0), None)


def tensors(rank: int, backend: str) -> dict[str, Any]:
    """Return shards of every kind that a format has."""
    found: dict[str, Any] = {
        "rows": cut("rows", rank),
        "uneven": box("uneven", *((0, 1), (1, 3))[rank]),
        "empty": replicated("empty", rank),
        "scalar": replicated("scalar", rank),
        "dtypes": {name: replicated(f"dtype.{name}", rank) for name in DTYPES},
    }
    if backend != "huggingface":
        start, stop = ((0, 7), (7, 20))[rank]
        piece = whole("flat").flatten()[start:stop]
        found["flat"] = st.ShardedTensor.from_rank_offsets_flat(
            "flat", piece, (5, 4), flattened_range=slice(start, stop)
        )
        part = whole("prepended")[rank]
        found["prepended"] = st.ShardedTensor.from_rank_offsets("prepended", part, (0, rank, RANKS), prepend_axis_num=1)
    return found


def held(rank: int, holder: int) -> dict[str, Any]:
    """Return containers of shards that one rank holds; on the other they are empty."""
    if rank != holder:
        return {"list": [], "dict": {}, "tuple": (), "nested": {"list": []}}
    four = [st.ShardedTensor.from_rank_offsets(f"held.{number}", whole(f"held.{number}")) for number in range(4)]
    return {"list": [four[0]], "dict": {"w": four[1]}, "tuple": (four[2],), "nested": {"list": [four[3]]}}


def plain() -> dict[str, Any]:
    """Return values without shards."""
    return {
        "step": 7,
        "empties": {"list": [], "dict": {}, "tuple": (), "deep": [[], {"none": {}}]},
        "lists": [1, [2, (3, None)], "π"],
        "tensor": torch.arange(3, dtype=torch.int16),
        "records": {"kind": Kind.LARGE, "config": Config(0.5, Kind.LARGE), "moment": Moment(1, 2)},
    }


def tree(rank: int, holder: int, backend: str) -> dict[str, Any]:
    """Return a rank's whole state."""
    state = {**plain(), "tensors": tensors(rank, backend), "held": held(rank, holder)}
    if backend != "huggingface":
        cell = st.ShardedObject("rng", {"rank": rank, "state": torch.arange(rank, rank + 3)}, (RANKS,), (rank,))
        state["objects"] = [cell, st.ShardedObject("same", ["on", "all"], (1,), (0,), replica_id=rank)]
    state["local"] = st.LocalNonpersistentObject(rank)
    state["groups"] = [{"params": replicated("listed", rank), "lr": 0.1}]
    if backend != "dcp":  # which had no places for shards in lists
        state["mixed"] = [replicated("mixed.0", rank), 3, (replicated("mixed.1", rank), "x")]
        state["moment"] = Moment(replicated("moment.mu", rank), 5)
    return state
