"""Makes tests/golden/v1, the checkpoint that every later version must read: ``python tests/golden/make.py FOLDER``.

The checkpoint is frozen: don't make it again, add a folder for what a new version writes. What is in it is described
here by values, so that the test compares with these and not with what some version of the code reads.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import enum
import fractions
import io
import math
import pathlib
import sys
from typing import Any

import numpy as np
import torch

import shardtree as st

RANKS = 3
CONTENT_METADATA = {"optimizer": "adam", "sharding": {"tp": 3}}
DTYPES = """
bool uint8 int8 uint16 int16 uint32 int32 uint64 int64 float16 bfloat16 float32 float64 complex32 complex64 complex128
float8_e4m3fn float8_e5m2 float8_e8m0fnu float8_e4m3fnuz float8_e5m2fnuz float4_e2m1fn_x2
""".split()

Pair = collections.namedtuple("Pair", ["left", "right"])


class Kind(enum.Enum):
    """An enum of the user's."""

    SMALL = 1
    LARGE = "two"


@dataclasses.dataclass(frozen=True)
class Config:
    """A dataclass of the user's."""

    rate: float
    kind: Kind


RECORDS = (Pair, Kind, Config)
for _cls in RECORDS:
    _cls.__module__ = "golden"  # the same name, however this file is run


def of_dtype(name: str) -> torch.Tensor:
    """Return five elements whose bytes count up; bools are alternating."""
    if name == "bool":
        return torch.tensor([True, False, True, True, False])
    dtype = getattr(torch, name)
    return torch.arange(1, 5 * dtype.itemsize + 1, dtype=torch.uint8).view(dtype)


def tensors() -> dict[str, torch.Tensor]:
    """Return every tensor of the checkpoint, whole, by key."""
    return {
        "box": torch.arange(30.0).reshape(6, 5) / 4,
        "flat": torch.arange(28, dtype=torch.int32).reshape(7, 4),
        "prepended": torch.arange(24.0).reshape(3, 2, 4).bfloat16(),
        "irregular": torch.arange(30, dtype=torch.int16).reshape(5, 6),
        "uneven": torch.arange(12.0).reshape(3, 4).half(),
        "replicated": torch.tensor([0.1, -0.0, math.inf, math.nan]),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "empty": torch.zeros(0, 3),
        "two on one rank": torch.arange(8, dtype=torch.uint8),
        "__metadata__": torch.tensor([1, 2, 3]),
        "κλειδί/with.dots #1": torch.tensor([True, False]),
        **{f"dtype.{name}": of_dtype(name) for name in DTYPES},
    }


def shards(rank: int) -> dict[str, Any]:
    """Return a rank's shards."""
    whole = tensors()

    def cut(key: str, axis: int) -> st.ShardedTensor:
        return st.ShardedTensor.from_rank_offsets(key, whole[key].chunk(RANKS, axis)[rank], (axis, rank, RANKS))

    def box(key: str, *place: slice) -> st.ShardedTensor:
        data, offset = whole[key][place], tuple(part.start for part in place)
        return st.ShardedTensor(key, data, data.dtype, data.shape, whole[key].shape, offset, None)

    flat = [slice(0, 9), slice(9, 9), slice(9, 28)][rank]
    piece = whole["flat"].flatten()[flat]
    prepended = whole["prepended"][rank]
    everywhere = ("replicated", "scalar", "empty", "__metadata__", "κλειδί/with.dots #1")
    return {
        "box": cut("box", 0),
        "flat": st.ShardedTensor.from_rank_offsets_flat("flat", piece, (7, 4), flattened_range=flat),
        "prepended": st.ShardedTensor.from_rank_offsets("prepended", prepended, (0, rank, RANKS), prepend_axis_num=1),
        "irregular": box("irregular", slice(*[(0, 1), (1, 5), (1, 5)][rank]), slice(*[(0, 6), (0, 2), (2, 6)][rank])),
        "uneven": box("uneven", slice(*[(0, 1), (1, 1), (1, 3)][rank]), slice(0, 4)),
        "replicas": [st.ShardedTensor.from_rank_offsets(key, whole[key], replica_id=rank) for key in everywhere],
        **({"two": [box("two on one rank", slice(4 * n, 4 * n + 4)) for n in range(2)]} if rank == 1 else {}),
        "dtypes": {
            name: st.ShardedTensor.from_rank_offsets(f"dtype.{name}", of_dtype(name))
            for position, name in enumerate(DTYPES)
            if position % RANKS == rank
        },
    }


def objects() -> dict[str, Any]:
    """Return every sharded object's data by unique key; only the last one is a pickle."""
    cells = {
        f"rng/shard_{rank}_{RANKS}": {"state": torch.arange(rank, rank + 4), "rank": rank} for rank in range(RANKS)
    }
    return cells | {"same/shard_0_1": ["on", "all", "ranks"], "pickled/shard_0_1": fractions.Fraction(1, 3)}


def sharded_objects(rank: int) -> list[st.ShardedObject]:
    """Return a rank's sharded objects."""
    keys = (f"rng/shard_{rank}_{RANKS}", "same/shard_0_1", "pickled/shard_0_1")
    empty = (st.ShardedObject.empty_from_unique_key(key, 0 if "rng" in key else rank) for key in keys)
    return [dataclasses.replace(item, data=objects()[item.unique_key]) for item in empty]


def common() -> dict[Any, Any]:
    """Return plain values of each kind that the codec knows, pickles left out."""
    buffer = io.BytesIO(b"buffered")
    buffer.seek(3)
    return {
        "themselves": [None, True, False, 0, -1, 2**63 - 1, -(2**63), 0.1, -0.0, 1e300, "", "text", "π", [], {}],
        "int": [2**63, -(2**64) - 1, 3**200],
        "float": [math.inf, -math.inf, math.nan],
        "complex": complex(1.5, -0.0),
        "str": "lone \ud800 surrogate",
        "tuple": (1, (), (2, [3])),
        "sets": [{3, 1, 2}, frozenset({"a", (1, 2)}), set()],
        "deques": [collections.deque([1, 2], 5), collections.deque()],
        "dict": {"$": 1, 2: "two", (3, None): "three", 1.5: b"four", None: 5},
        "OrderedDict": collections.OrderedDict(b=1, a=2),
        "defaultdicts": [collections.defaultdict(list, a=[1]), collections.defaultdict(None, {2: 3})],
        "ranges": [range(1, 9, 2), slice(None, 4), slice("a", (1,), 2.5)],
        "bytes": [b"", b"\x00\xff", bytearray(b"more")],
        "io.BytesIO": buffer,
        "tensors": {name: of_dtype(name).reshape(5, 1) for name in DTYPES},
        "scalar tensor": torch.tensor(7),
        "empty tensor": torch.zeros(2, 0),
        "arrays": [np.arange(6, dtype=kind).reshape(2, 3) for kind in ("u1", "<i4", "<f8", "<c8", ">i2", "<c16")],
        "array of bools": np.array([True, False]),
        "array of text": np.array(["ab", "π"]),
        "array of times": np.array(["2026-01-02", "NaT"], dtype="datetime64[D]"),
        "numpy scalars": [np.float32(0.1), np.int64(-7), np.bool_(True), np.complex128(1 + 2j), np.float16(1.5)],
        "numpy text": [np.str_("s\0"), np.bytes_(b"b\0")],
        "dtypes": [torch.bfloat16, torch.complex128],
        "devices": [torch.device("cpu"), torch.device("cuda", 1)],
        "torch.Size": torch.Size([2, 0, 3]),
        "paths": [pathlib.PurePosixPath("a/b"), pathlib.PureWindowsPath("c:/d"), pathlib.PosixPath("/e")],
        "argparse.Namespace": argparse.Namespace(lr=0.1, betas=(0.9, 0.95)),
        "records": [Kind.LARGE, Config(0.5, Kind.SMALL), Pair([1], 2)],
    }


def tree(rank: int) -> dict[str, Any]:
    """Return a rank's whole state."""
    local = st.LocalNonpersistentObject(rank)
    return {
        "model": shards(rank),
        "objects": sharded_objects(rank),
        "common": common(),
        "mixed": [local, 1, {"deep": (2, local)}],
    }


if __name__ == "__main__":
    st.simulate(
        RANKS,
        lambda world: st.save(
            tree(world.rank), sys.argv[1], content_metadata=CONTENT_METADATA, allow_pickle=True, world=world
        ),
    )
