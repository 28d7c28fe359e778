"""Run by torchrun: saves a state in one layout, or loads it in another and compares every element with the original."""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import shardtree as st
from shardtree.storage import Verify
from shardtree.testing import (
    GlobalState,
    Layout,
    Piece,
    even_layout,
    first_difference,
    glu,
    random_bits,
    rank_tree,
    refilled,
    target_tree,
)
from shardtree.testing._states import check_rest
from shardtree.trees import leaves_with_paths

DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.complex128, torch.bool, torch.int64]
COMMON = {"step": 7, "schedule": {"lr": [0.1, float("nan")], "name": None}}


def state() -> GlobalState:
    tensors = {f"w.{n}": random_bits((8, 12), dtype, n + 1) for n, dtype in enumerate(DTYPES)}
    tensors |= {"norm": random_bits((5,), torch.float32, 9), "scale": random_bits((), torch.float64, 9)}
    tensors |= {"flat": random_bits((4, 6), torch.float32, 9), "layers": random_bits((4, 3, 2), torch.bfloat16, 9)}
    return GlobalState(tensors, {"rng": [{"seed": n} for n in range(3)]}, COMMON)


def flat_layout(ranks: int) -> Layout:
    """Cut the flattened tensor of 24 elements into unequal ranges, and keep a copy of each on the next rank."""
    cuts = [0, *(24 * rank // ranks - 1 for rank in range(1, ranks)), 24]
    ranges = list(pairwise(cuts))
    copies = [((rank + n) % ranks, n, flat) for rank, flat in enumerate(ranges) for n in range(2)]
    return Layout(ranks, (4, 6), tuple(Piece(rank, (0, 0), (4, 6), flat, n) for rank, n, flat in copies), grid=(1, 1))


def stage_layout(ranks: int, axis: int) -> Layout:
    """Give each rank whole layers, as entries of a prepended axis, or a part of every layer."""
    if axis:
        return even_layout((4, 3, 2), 2, axis=2) if ranks == 2 else even_layout((4, 3, 2), ranks)
    pieces = tuple(Piece(layer * ranks // 4, (layer, 0, 0), (1, 3, 2)) for layer in range(4))
    return Layout(ranks, (4, 3, 2), pieces, prepended=1, grid=(4, 1, 1))


def layout(ranks: int, axis: int) -> dict[str, Layout]:
    even = {f"w.{n}": even_layout((8, 12), ranks, axis) for n in range(len(DTYPES))}
    copied = {"norm": even_layout((5,), ranks), "scale": even_layout((), ranks)}
    return even | copied | {"flat": flat_layout(ranks), "layers": stage_layout(ranks, axis)}


def gated(rank: int, ranks: int) -> torch.Tensor:
    gate, value = random_bits((8, 3), torch.float32, 5), random_bits((8, 3), torch.float32, 6)
    return torch.cat([gate.chunk(ranks)[rank], value.chunk(ranks)[rank]])


def save(folder: str, axis: int) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    tree = rank_tree(state(), layout(ranks, axis), rank) | {"glu": glu("glu", gated(rank, ranks), rank, ranks)}
    st.save(tree, folder, options=st.SaveOptions(durable=False))


def load(folder: str, axis: int, *, verify: Verify = "all") -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    own = layout(ranks, axis)
    target: dict[str, Any] = target_tree(state(), own, rank)
    for exchange in ("never", "always"):
        factory = glu("glu", torch.zeros_like(gated(rank, ranks)), rank, ranks)
        loaded = st.load(target | {"glu": factory}, folder, options=st.LoadOptions(verify=verify, exchange=exchange))
        assert first_difference(loaded.pop("glu"), gated(rank, ranks)) is None
        check_shards(refilled(target, loaded), rank_tree(state(), own, rank))
        check_rest(state(), target, loaded, rank)


def unverified(folder: str, axis: int) -> None:
    load(folder, axis, verify=None)


def check_shards(found: Any, expected: Any) -> None:
    """Raise unless each shard holds the same bits; objects and the rest are compared elsewhere."""
    right = {path: leaf for path, leaf in leaves_with_paths(expected) if isinstance(leaf, st.ShardedTensor)}
    for path, leaf in leaves_with_paths(found):
        if isinstance(leaf, st.ShardedTensor):
            differs = first_difference(leaf.data, right[path].data)
            assert differs is None, f"rank {dist.get_rank()}: {leaf.key!r}: {differs}"


def fail(folder: str, axis: int) -> None:
    """One rank has a bad tree: every process must hear which one."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    good = rank_tree(state(), layout(ranks, axis), rank)
    try:
        st.save(st.without_data(good) if rank == 1 else good, Path(folder) / "failed")
    except st.errors.RemoteError as error:
        assert (error.phase, list(error.failures)) == ("save: prepare", [1])
    else:
        raise AssertionError("no rank heard of the failure")
    assert not st.is_checkpoint(Path(folder) / "failed")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    for step in sys.argv[2:]:
        name, axis = step.split(":")
        {"save": save, "load": load, "fail": fail, "load unverified": unverified}[name](sys.argv[1], int(axis))
        dist.barrier()
    dist.destroy_process_group()
